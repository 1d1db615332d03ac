"""A finished run is not taken for one of a reward, a text or data that came later."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from qerl_bench.__main__ import main
from qerl_core.process.arguments import whole

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
