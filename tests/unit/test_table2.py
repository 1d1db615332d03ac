"""studies/table2/table2.py: the average over four sets, from records as `qerl-bench eval` leaves them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from omegaconf import DictConfig, OmegaConf

from qerl_bench.commands.eval import apply_overrides
from qerl_bench.config import compose
from qerl_bench.eval.base import Score
from qerl_core.checks import ConfigError
from qerl_studies.runs.load import load_run
from tests.scripts import script

table2 = script("studies/table2/table2.py")
SETS, rows = table2.SETS, table2.rows
RIGHT = {"math500": (0.7, 0.8), "aime24": (0.1, 0.2), "aime25": (0.0, 0.1), "amc23": (0.4, 0.5)}
ERRORS = {"math500": (0.02, 0.01), "aime24": (0.06, 0.03), "aime25": (0.03, 0.02), "amc23": (0.06, 0.04)}


def record(folder: Path, config: DictConfig, name: str, **settings: Any) -> None:
    """One finished evaluation of the set `name`, before training and after it."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(config, resolve=True))
    (folder / "done.json").write_text("{}")
    said = {"temperature": 0.6, "top_p": 0.95, "max_tokens": 4096, "samples": 8} | settings
    whole, sampling = ERRORS[name]
    n = SETS[name]
    entries = [
        {"task": config.task.name, "step": step, **asdict(score), "settings": said}
        for step, value in zip((0, 500), RIGHT[name], strict=True)
        for score in (
            Score(metric="eval/accuracy_greedy", value=0.0, stderr=0.0, n=n),
            Score(metric="eval/accuracy_sampled", value=value, stderr=whole, stderr_sampling=sampling, n=n),
        )
    ]
    (folder / "eval.json").write_text(json.dumps(entries))


@pytest.fixture(scope="module")
def configs() -> dict[str, DictConfig]:
    trained = compose(["experiment=paper/table2", "recipe=method/nvfp4"])
    words = {name: [f"task={name}", "task.instruction=suffix"] for name in RIGHT}
    return {"run": trained} | {name: apply_overrides(trained, asked) for name, asked in words.items()}


@pytest.fixture
def run(configs: dict[str, DictConfig], tmp_path: Path) -> Path:
    """A run of table 2, evaluated on the other three sets too."""
    folder = tmp_path / "runs" / "a"
    record(folder, configs["run"], "math500")
    (folder / "env.json").write_text(json.dumps({"code": "1f"}))
    (folder / "metrics.jsonl").write_text('{"kind": "train", "step": 500, "entropy": 0.1}\n')
    for name in ("aime24", "aime25", "amc23"):
        record(folder / "evals" / name, configs[name], name)
    return folder


def change(file: Path, key: str, value: Any) -> None:
    entries = json.loads(file.read_text())
    for entry in entries:
        (entry if key in entry else entry["settings"])[key] = value
    file.write_text(json.dumps(entries))


def test_each_set_counts_a_quarter_and_errors_add_in_squares(run: Path, tmp_path: Path) -> None:
    table2.main([str(run.parent), "--out", str(tmp_path)])
    table = pd.read_csv(tmp_path / "table2.csv")
    assert list(table["step"]) == [0, 500] and set(table["quant"]) == {"nvfp4"}
    assert list(table["average"]) == pytest.approx([30.0, 40.0])  # of 70, 10, 0, 40 and of 80, 20, 10, 50
    assert list(table["amc23"]) == pytest.approx([40.0, 50.0])
    whole = 100 * (0.02**2 + 0.06**2 + 0.03**2 + 0.06**2) ** 0.5 / 4
    sampling = 100 * (0.01**2 + 0.03**2 + 0.02**2 + 0.04**2) ** 0.5 / 4
    assert list(table["stderr"]) == pytest.approx([whole] * 2)
    assert list(table["stderr_sampling"]) == pytest.approx([sampling] * 2)


def test_a_later_evaluation_of_the_runs_own_set_takes_its_place(
    run: Path, configs: dict[str, DictConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RIGHT, "math500", (0.3, 0.4))
    record(run / "evals" / "again", configs["math500"], "math500")
    assert [row["average"] for row in rows(load_run(run))] == pytest.approx([20.0, 30.0])


def test_sets_that_are_missing_are_named_with_the_command_that_makes_them(run: Path) -> None:
    (run / "evals" / "aime25" / "done.json").unlink()  # not finished
    (run / "evals" / "amc23" / "config.yaml").write_text((run / "config.yaml").read_text().replace("MATH-500", "other"))
    with pytest.raises(
        ConfigError, match=r"no finished evaluation of aime25, amc23: .*task=aime25 task.instruction=suffix"
    ):
        rows(load_run(run))


def test_two_evaluations_of_one_set_are_refused(run: Path, configs: dict[str, DictConfig]) -> None:
    record(run / "evals" / "again", configs["amc23"], "amc23")
    with pytest.raises(ConfigError, match=r"evals/amc23 and .*evals/again both evaluate amc23: move one"):
        rows(load_run(run))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("n", 10, r"aime24 asked 10 of the 30 questions of aime24: evaluate with eval\.questions=null"),
        ("top_p", 1.0, r"aime24 and math500 differ in eval\.top_p \(1\.0, 0\.95\)"),
        ("metric", "eval/majority", r"no sampled accuracy of step 0, 500"),
    ],
)
def test_sets_that_were_asked_in_other_ways_are_not_averaged(run: Path, key: str, value: Any, message: str) -> None:
    change(run / "evals" / "aime24" / "eval.json", key, value)
    with pytest.raises(ConfigError, match=message):
        rows(load_run(run))


def test_another_prompt_is_another_way(run: Path, configs: dict[str, DictConfig]) -> None:
    config = apply_overrides(configs["run"], ["task=aime24"])  # its own prompt, not the run's
    (run / "evals" / "aime24" / "config.yaml").write_text(OmegaConf.to_yaml(config, resolve=True))
    with pytest.raises(ConfigError, match=r"aime24 and math500 differ in task\.instruction \(system, suffix\)"):
        rows(load_run(run))


def test_without_a_finished_run_of_these_sets_the_experiment_is_named(run: Path, tmp_path: Path) -> None:
    (run / "done.json").unlink()
    with pytest.raises(ConfigError, match="experiment=paper/table2"):
        table2.main([str(run), "--out", str(tmp_path)])
