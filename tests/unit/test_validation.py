"""Held-out accuracy during training: it changes nothing else, is repeated exactly, and names the best checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from qerl_bench.commands.eval import main
from qerl_bench.commands.run import run_experiment
from qerl_bench.config import build
from qerl_bench.eval.validation import best_step, reduced, spacing
from qerl_core.checks import ConfigError
from qerl_core.options.fingerprint import fingerprint
from qerl_core.rundir.checkpoints import checkpoints
from qerl_core.rundir.finished_run import stored_config
from qerl_core.rundir.run_checks import check_run_dir
from qerl_core.rundir.run_dir import RunDir
from qerl_core.seeding import derive
from qerl_studies.runs.load import load_run
from qerl_studies.tables.terminal import summary

pytestmark = pytest.mark.usefixtures("no_figures")
# A task on which an untrained model earns something. Dropout draws from PyTorch's own random numbers, which an
# evaluation in between could shift.
WORDS = (
    *("task=even_characters", "optim.lr=0.05", "lora.dropout=0.1"),
    *("eval.questions=8", "eval.samples=6", "eval.every_questions=3"),
)


def run(make_config: Callable[..., Any], root: Path, name: str, *words: str) -> Path:
    cfg = make_config(*WORDS, f"root={root}", f"name={name}", *words)
    run_experiment(build(cfg), cfg)
    return root / "runs" / name


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, make_config: Callable[..., Any], no_figures: None
) -> dict[str, Path]:
    """The same run with and without points."""
    root = tmp_path_factory.mktemp("root")
    return {every: run(make_config, root, every, f"eval.every={every[-1]}") for every in ("every1", "every0")}


def records(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clocks = ("time", "speed/", "memory/")
    return [{key: value for key, value in line.items() if not key.startswith(clocks)} for line in lines]


def of_kind(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in records(folder) if record["kind"] == kind]


def test_points_change_nothing_else(runs: dict[str, Path]) -> None:
    with_points, without = runs["every1"], runs["every0"]
    assert [record["step"] for record in of_kind(with_points, "validation")] == [0, 1, 2, 3, 4]
    assert of_kind(without, "validation") == []
    assert len({record["validation/accuracy_sampled"] for record in of_kind(with_points, "validation")}) > 1
    for kind in ("train", "eval"):
        assert of_kind(with_points, kind) == of_kind(without, kind)
    for name in ("eval.json", "checkpoints/step_000004/adapter/adapter_model.safetensors"):
        assert (with_points / name).read_bytes() == (without / name).read_bytes()
    configs = [json.loads(json.dumps(load_run(folder).config)) for folder in runs.values()]
    assert fingerprint(configs[0]) == fingerprint(configs[1])
    numbers = summary(runs.values()).drop(columns=["run", "rollout_tok_s", "peak_gib"])
    pd.testing.assert_series_equal(numbers.loc[0], numbers.loc[1], check_names=False)


def test_the_points_at_both_ends_are_of_the_first_questions(runs: dict[str, Path]) -> None:
    rows = pd.read_parquet(runs["every1"] / "samples.parquet")
    for point in (record for record in of_kind(runs["every1"], "validation") if record["step"] in (0, 4)):
        whole: Any = rows[rows["step"] == point["step"]]
        few = whole[whole["question"].isin(whole["question"].unique()[:3]) & (whole["sample"] < 4)]
        for mode in ("greedy", "sampled"):
            assert point[f"validation/accuracy_{mode}"] == pytest.approx(few[few["mode"] == mode]["correct"].mean())
        assert point["validation/questions"] == 3 and len(few) == 3 * (1 + 4)


def test_a_point_equals_the_whole_evaluation_of_as_many_questions(
    runs: dict[str, Path], tmp_path: Path, make_config: Callable[..., Any]
) -> None:
    """Step 2 of the run, evaluated again from its checkpoint; and the same run, continued from there, repeats it."""
    folder = tmp_path / "runs" / "every1"
    shutil.copytree(runs["every1"], folder)
    before = records(folder)
    main([str(folder), "checkpoint=2", "eval.questions=3", "eval.samples=4", f"out={tmp_path / 'again'}"])
    again = {
        (one["step"], one["metric"]): one["value"] for one in json.loads((tmp_path / "again/eval.json").read_text())
    }
    (point,) = (record for record in before if record["kind"] == "validation" and record["step"] == 2)
    for mode in ("greedy", "sampled"):
        assert point[f"validation/accuracy_{mode}"] == again[2, f"eval/accuracy_{mode}"]
    assert json.loads((tmp_path / "again/done.json").read_text())["checkpoint"] == "step_000002"

    (folder / "done.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "step_000004")
    run(make_config, tmp_path, "every1", "eval.every=1")
    assert records(folder) == before


def test_whole_evaluations_at_chosen_steps(
    runs: dict[str, Path], tmp_path: Path, make_config: Callable[..., Any]
) -> None:
    """They change nothing else, are those of the checkpoint of their step, and are kept by a run that goes on there."""
    words = ("eval.every=0", "eval.at=[2]")
    folder = run(make_config, tmp_path, "at2", *words)
    assert [record["step"] for record in of_kind(folder, "eval")] == [0, 2, 4]
    assert of_kind(folder, "train") == of_kind(runs["every0"], "train")
    assert [one for one in of_kind(folder, "eval") if one["step"] != 2] == of_kind(runs["every0"], "eval")
    main([str(folder), "checkpoint=step_000002", f"out={tmp_path / 'again'}"])
    again = {one["metric"]: one["value"] for one in json.loads((tmp_path / "again/eval.json").read_text())}
    (whole,) = (one for one in of_kind(folder, "eval") if one["step"] == 2)
    assert whole["eval/accuracy_sampled"] == again["eval/accuracy_sampled"]
    assert set(pd.read_parquet(folder / "samples.parquet")["step"]) == {0, 2, 4}

    before = records(folder)
    (folder / "done.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "step_000004")
    run(make_config, tmp_path, "at2", *words)
    assert records(folder) == before


def test_evaluations_between_may_leave_greedy_completions_out(
    runs: dict[str, Path], tmp_path: Path, make_config: Callable[..., Any]
) -> None:
    words = ("eval.every=0", "eval.at=[2]")
    both = run(make_config, tmp_path, "both", *words)
    sampled = run(make_config, tmp_path, "sampled", *words, "eval.at_greedy=false")
    every, some = (pd.read_parquet(folder / "samples.parquet") for folder in (both, sampled))
    kept = every[(every["step"] != 2) | (every["mode"] == "sampled")].reset_index(drop=True)
    pd.testing.assert_frame_equal(some, kept)
    assert of_kind(sampled, "train") == of_kind(runs["every0"], "train")
    (between,) = (one for one in of_kind(sampled, "eval") if one["step"] == 2)
    assert not [name for name in between if "greedy" in name]


@pytest.mark.parametrize(("steps", "said"), [("[4]", r"eval\.at has \[4\].*steps=4"), ("[0]", r"eval\.at must be")])
def test_no_whole_evaluation_after_the_last_step_or_before_the_first(
    steps: str, said: str, make_experiment: Callable[..., Any]
) -> None:
    with pytest.raises(ConfigError, match=said):
        make_experiment(f"eval.at={steps}")


def test_the_best_checkpoint_is_named_and_kept(
    runs: dict[str, Path], tmp_path: Path, make_config: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(make_config, tmp_path, "few", "eval.every=1", "save_every=1", "checkpoints.keep=1")
    best = json.loads((folder / "done.json").read_text())["checkpoints"]
    points = {one["step"]: one["validation/accuracy_sampled"] for one in of_kind(folder, "validation") if one["step"]}
    assert best == {"last": 4, "best": max(points, key=lambda step: (points[step], -step))}
    assert sorted(int(one.name[-6:]) for one in checkpoints(folder)) == sorted({*best.values()})
    assert of_kind(folder, "train") == of_kind(runs["every1"], "train")
    check_run_dir(folder, load_run(folder).config)
    assert f"best step_{best['best']:06d}" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"checkpoint=best: .*eval\.every"):
        main([str(runs["every0"]), "checkpoint=best"])
    with pytest.raises(ConfigError, match=r"checkpoint=3 must be .*: 2, 4"):
        main([str(runs["every0"]), "checkpoint=3"])


def test_checkpoints_that_are_not_kept_go_at_once(tmp_path: Path, make_config: Callable[..., Any]) -> None:
    with RunDir(tmp_path / "run", make_config()) as run_dir:
        for step in (1, 2, 3, 4, 5):
            with run_dir.checkpoint(step) as writing:
                (writing / "adapter").write_text(str(derive(step)))
            run_dir.keep_checkpoints(2, best=2 if step > 1 else None)
        assert sorted(folder.name[-1] for folder in checkpoints(run_dir.path)) == ["2", "4", "5"]
        (run_dir.path / "checkpoints" / ".removing").mkdir()  # as a kill leaves it
        assert run_dir.resume_step() == 5
        assert len([*(run_dir.path / "checkpoints").iterdir()]) == 3


def test_a_run_from_before_is_evaluated_again(runs: dict[str, Path], tmp_path: Path) -> None:
    """Its config has neither eval.every nor checkpoints nor a reward."""
    folder = tmp_path / "old"
    shutil.copytree(runs["every0"], folder)
    config = load_run(folder).config
    del config["reward"], config["checkpoints"], config["eval"]["every"], config["eval"]["every_questions"]
    del config["eval"]["quant"], config["rollout"]["quant"]
    for name in ("seals.jsonl", "done.json"):  # a run from before seals is taken as it is
        (folder / name).unlink()
    (folder / "done.json").write_text("{}")
    (folder / "config.yaml").write_text(json.dumps(config))
    assert build(stored_config(folder)).checkpoints.keep is None
    check_run_dir(folder, load_run(runs["every1"]).config)  # the command of today finds it finished


def test_the_points_fall_on_checkpoints_where_that_can_be() -> None:
    assert [spacing(None, *sizes) for sizes in ((150, 25), (1000, 25), (100, 100), (200, 1), (40, 25))] == [
        *(25, 200, 20, 40, 25),
    ]
    assert spacing(None, 6, 3) >= 6 and spacing(None, 4, 2) >= 4  # none in short runs
    assert spacing(0, 150, 25) == 0 and spacing(7, 150, 25) == 7


def test_a_point_asks_no_more_questions_than_there_are(make_experiment: Callable[..., Any]) -> None:
    task = make_experiment("task=even_characters").task
    for questions, wanted, asked in ((8, 32, 8), (None, 2000, 1024), (8, 3, 3)):
        of_all = make_experiment(f"eval.questions={questions or 'null'}", f"eval.every_questions={wanted}").eval
        assert reduced(of_all, task).questions == asked


def test_the_earliest_of_the_best_steps_wins() -> None:
    accuracies = {0: 0.9, 1: 0.2, 2: 0.5, 3: 0.5, 4: None, 5: 0.7}
    lines = [
        {"kind": "validation", "step": step, "validation/accuracy_sampled": value} for step, value in accuracies.items()
    ]
    assert best_step([*lines, {"kind": "train", "step": 2}], [1, 2, 3, 4]) == 2
    assert best_step(lines, [4, 6]) is None and best_step([], [1]) is None
