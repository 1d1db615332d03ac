"""A finished run is not taken for one of a reward, a text or data that came later."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from qerl_bench.__main__ import main
from qerl_bench.eval import inputs
from qerl_bench.sweep import since_finished
from qerl_bench.sweep.since_finished import changed_since
from qerl_core.options.composer import Composer
from qerl_core.process.arguments import whole
from qerl_core.process.installation import CONF_DIR

TINY = Path(__file__).parents[1] / "assets" / "gsm8k_tiny.jsonl"
LENGTH = "def reward(completions, **columns):\n    return [len(text) / 10 for text in completions]\n"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a reward, data, and a finished run of both."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "mine.py").write_text(LENGTH)
    lines = TINY.read_text().splitlines()
    (folder / "train.jsonl").write_text("\n".join(lines[:4]))
    (folder / "test.jsonl").write_text("\n".join(lines[4:8]))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        main(WORDS)
    return folder


WORDS = [
    *("run", "experiment=smoke", "model=tiny_untrained", "model.layers=1", "task=gsm8k", "steps=1", "eval.questions=2"),
    *("task.train_file=train.jsonl", "task.eval_file=test.jsonl", "reward=mine.py", "name=done", "root=."),
    *("task.max_completion_tokens=4", "rollout.prompts_per_step=2", "rollout.group_size=2", "device=cpu"),
]


@pytest.mark.parametrize(
    ("file", "names"),
    [
        (None, []),
        ("mine.py", ["mine.py"]),
        ("train.jsonl", ["the training data"]),
        ("test.jsonl", ["the held-out data"]),
    ],
)
def test_what_has_changed_since_is_named(
    finished: Path,
    tmp_path: Path,
    file: str | None,
    names: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = shutil.copytree(finished, tmp_path / "copy")
    monkeypatch.chdir(place)
    if file == "mine.py":
        (place / file).write_text(LENGTH.replace("/ 10", "* -100"))
    elif file is not None:
        (place / file).write_text((place / file).read_text().replace("How", "So how", 1))
    for words in (WORDS, [*WORDS, "-m"]):
        caplog.clear()
        main(words)
        said = whole(caplog.text + capsys.readouterr().err)  # of a sweep Hydra takes the log
        assert re.findall(r"(mine\.py|the \S+ data) is not what finished runs were made with \(done\)", said) == names


def test_only_data_of_files_that_were_written_since_are_read(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever a task of the user's own raises then: a finished run needs nothing of it."""
    place = shutil.copytree(finished, tmp_path / "copy")
    monkeypatch.chdir(place)
    record = json.loads((place / "runs" / "done" / "done.json").read_text())
    read: list[str] = []

    def reading(*given: object) -> dict[str, str]:
        read.append("read")
        raise KeyError("answer")

    monkeypatch.setattr(inputs, "inputs_of", reading)
    caplog.set_level("INFO")
    tree = Composer().tree([*WORDS[1:]])
    assert changed_since(place / "runs" / "done", tree) == [] and read == ["read"]  # copies were written just now
    assert [line.endswith("cannot be read now, so they are not compared ('answer')") for line in caplog.messages] == [
        True
    ]
    (place / "runs" / "done" / "done.json").write_text(json.dumps(record | {"started": 4e9}))
    assert changed_since(place / "runs" / "done", tree) == [] and read == ["read"]
    hub = Composer().tree([word for word in WORDS[1:] if "_file" not in word])
    (place / "runs" / "done" / "done.json").write_text(json.dumps(record | {"started": 0.0}))
    assert changed_since(place / "runs" / "done", hub) == [] and read == ["read"]


def test_a_file_that_is_named_goes_before_one_of_its_name_among_options(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = shutil.copytree(finished, tmp_path / "copy")
    monkeypatch.chdir(place)
    monkeypatch.setattr(since_finished, "folders", lambda: [CONF_DIR, place / "options"])
    (place / "options").mkdir()
    other, tree = place / "options" / "mine.py", Composer().tree(WORDS[1:])
    other.write_text("# another file of this name")
    assert "mine.py" not in changed_since(place / "runs" / "done", tree)
    other.write_text(LENGTH)
    (place / "mine.py").write_text("# changed")
    assert "mine.py" in changed_since(place / "runs" / "done", tree)


def test_what_is_gone_is_not_missed(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = shutil.copytree(finished, tmp_path / "copy")
    monkeypatch.chdir(place)
    for name in ("mine.py", "train.jsonl"):
        (place / name).unlink()
    main(WORDS)
    assert "is not what" not in caplog.text
    assert [*json.loads((place / "runs" / "done" / "env.json").read_text())["own_code"]] == ["mine.py"]
