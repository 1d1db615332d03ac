"""logger=tensorboard: its event files, read back by TensorBoard's own reader, beside metrics.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qerl_bench.commands.run import run_experiment
from qerl_bench.config import build
from qerl_bench.logger.tensorboard import FOLDER, TensorBoard
from qerl_core.checks import ConfigError
from tests.short_runs import killed_in_step, without_figures

SPEC = TensorBoard(name="tensorboard", names=None)
needs_package = pytest.mark.usefixtures("package")


@pytest.fixture
def package() -> None:
    pytest.importorskip("tensorboard", reason="extra tensorboard is not installed")


def read(run_dir: Path) -> tuple[dict[str, dict[int, float]], str]:
    """Values of each metric by step, and the text. Fails if a step is there twice."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / FOLDER), size_guidance={"scalars": 0})
    events.Reload()
    found: dict[str, dict[int, float]] = {}
    for name in events.Tags()["scalars"]:
        rows = events.Scalars(name)
        found[name] = {row.step: row.value for row in rows}
        assert len(found[name]) == len(rows), f"{name} has a step twice"
    (text,) = events.Tensors("config/text_summary")
    return found, text.tensor_proto.string_val[0].decode()


def local(run_dir: Path) -> dict[str, dict[int, float]]:
    """metrics.jsonl in the same form."""
    found: dict[str, dict[int, float]] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for name, value in record.items():
            if name not in ("kind", "step", "time") and value is not None:
                found.setdefault(name, {})[record["step"]] = value
    return found


@needs_package
def test_a_run_that_was_killed_and_continued_is_there_once(make_config: Callable[..., Any], tmp_path: Path) -> None:
    cfg = make_config("logger=tensorboard", "steps=4", "save_every=1", f"root={tmp_path}")
    experiment = build(cfg)
    with without_figures():
        with killed_in_step(3):
            run_experiment(experiment, cfg)
        run_experiment(experiment, cfg)
    found, text = read(experiment.run_dir)
    own = local(experiment.run_dir)
    assert found.keys() == own.keys() and {"reward/mean", "eval/accuracy_greedy"} <= own.keys()
    for name, values in own.items():
        assert found[name] == pytest.approx(values, rel=1e-6), name  # of FP32
    assert {1, 2, 3, 4} <= found["reward/mean"].keys() and "name: tensorboard" in text


@needs_package
def test_what_is_no_number_is_left_out_and_nan_is_there(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [{"kind": "train", "step": 1, "time": 0.0, "loss": None, "lr": 0.5}]
    with SPEC.mirror(tmp_path, records, {"name": "a"}) as mirror:
        mirror.log("train", 2, {"loss": float("nan"), "lr": 0.25})
    found, _ = read(tmp_path)
    assert found["lr"] == {1: 0.5, 2: 0.25}
    assert [*found["loss"]] == [2] and math.isnan(found["loss"][2])


@needs_package
def test_a_folder_that_cannot_be_written_stops_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FOLDER).write_text("a file in the way")
    with SPEC.mirror(tmp_path, [], {"name": "a"}) as mirror:
        mirror.log("train", 1, {"loss": 1.0})
    assert "logger=tensorboard cannot start and is off" in caplog.text


def test_without_the_package_it_is_refused_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"logger=tensorboard needs the package tensorboard.*\[tensorboard\]"):
        SPEC.check()
