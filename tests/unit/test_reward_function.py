"""reward=FILE.py: a plain function is tried before anything loads, decides training, and leaves grading as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qerl_bench.__main__ import main
from qerl_bench.commands.run import run_experiment
from qerl_bench.config import build, compose
from qerl_bench.sweep.check import check_points
from qerl_core.checks import ConfigError
from qerl_core.options.composer import Composer

COLUMNS = ("prompts", "question", "answer", "id", "correct", "finished")
LENGTH = "def reward(completions, **columns):\n    return [len(text) for text in completions]\n"
RECORDED = f"""
calls = []
def reward(completions, **columns):
    assert tuple(columns) == {COLUMNS}
    assert all(len(column) == len(completions) for column in columns.values())
    calls.append(completions)
    return [len(text) for text in completions]
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "mine.py"
    file.write_text(text)
    return file


def checked(file: Path, *words: str) -> None:
    check_points([["device=cpu", f"root={file.parent}", f"reward={file}", *words]])


def test_a_file_is_a_reward(tmp_path: Path) -> None:
    place = str(tmp_path / "mine.py")
    assert compose([f"reward={place}"]) == compose(["reward=function", f"reward.file={place}"])
    assert Composer().spelled_out([f"reward={place}", "seed=3"]) == [
        "reward=function",
        f"reward.file={place}",
        "seed=3",
    ]
    for words in (["reward=a.py,b.py"], ["reward=task"], ["task.train_file=a.py"]):
        assert Composer().spelled_out(words) == words


def test_it_is_tried_once_on_three_completions_and_recorded(tmp_path: Path) -> None:
    from qerl_core.options.user_options import load_file
    from qerl_core.rundir.environment import own_modules

    file = written(tmp_path, RECORDED)
    checked(file)
    (completions,) = load_file("reward.file", file).calls
    assert len(completions) == 3 and completions[0] == "" and len({*completions}) == 3
    assert list(own_modules()) == ["mine.py"]


def test_nothing_that_only_builds_a_config_executes_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, "raise SystemExit('executed')")
    assert build(compose([f"reward={file}"])).reward.name == "function"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def reward(completions, **columns):\n    return [1 / len(one) for one in completions]\n", "line 2.*ZeroDiv"),
        ("def reward(completions, country, **columns):\n    return [0] * 3\n", r"country.*question, answer"),
        ("def reward(completions, **columns):\n    return 0.5\n", "0.5"),
        ("def reward(completions, **columns):\n    return [0.5]\n", "1 numbers for 3"),
        ("def reward(completions, **columns):\n    return ['a'] * len(completions)\n", "'a'"),
        ("def reward(completions, **columns):\n    return [float('nan')] * len(completions)\n", "nan"),
        ("def score(completions, **columns):\n    return [0] * 3\n", r"no function reward.*reward\.function.*score"),
        ("import nothing_of_this_name\n", "nothing_of_this_name"),
        ("def reward(:\n", "SyntaxError"),
    ],
)
def test_what_does_not_work_is_refused_with_the_form(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"(?s)reward.*{said}"):
        checked(written(tmp_path, text))


def test_other_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward\.file.*none\.py"):
        checked(tmp_path / "none.py")
    with pytest.raises(ConfigError, match=r"reward\.file=FILE\.py"):
        check_points([["device=cpu", f"root={tmp_path}", "reward=function"]])
    with pytest.raises(ConfigError, match="algo=sft"):
        checked(written(tmp_path, LENGTH), "algo=sft")


def test_another_function_of_the_file(tmp_path: Path) -> None:
    checked(written(tmp_path, LENGTH.replace("reward", "length")), "reward.function=length")


def test_training_maximizes_it_and_evaluation_grades(tmp_path: Path, make_config: Any, no_figures: None) -> None:
    words = ("task=even_characters", "steps=2", f"root={tmp_path}", "name=run")
    cfg = make_config(*words, f"reward={written(tmp_path, LENGTH)}")
    experiment = build(cfg)
    experiment.reward.check(experiment.task)
    run_experiment(experiment, cfg)
    records = [*map(json.loads, (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines())]
    train = [record for record in records if record["kind"] == "train"]
    assert train and all(record["reward/mean"] > 1 for record in train)
    assert all(0 <= record["accuracy"] <= 1 for record in train)
    environment = json.loads((tmp_path / "runs" / "run" / "env.json").read_text())
    assert [*environment["own_code"]] == ["mine.py"]


def test_the_command_says_it_before_torch_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, "def reward(completions):\n    return [0] * len(completions)\n")
    with pytest.raises(SystemExit) as end:
        main(["run", f"reward={file}", f"root={tmp_path}", "device=cpu"])
    said = " ".join(capsys.readouterr().err.split())
    assert end.value.code == 2 and "unexpected keyword argument" in said and not (tmp_path / "runs").exists()
