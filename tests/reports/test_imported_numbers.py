"""What other programs and hands leave in logs and tables, and reads as something else: refused, or counted once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from qerl_bench.__main__ import main
from qerl_core.checks import ConfigError
from qerl_studies.foreign.gather import ForeignRun, named_seed, study_of
from qerl_studies.foreign.verdict import judge
from qerl_studies.runs.reported import ABOUT, COLUMNS, Row, checked


def trl_run(folder: Path, rewards: Sequence[float], **more: Any) -> None:
    folder.mkdir(parents=True)
    history = [{"step": step, "reward": one} | more for step, one in enumerate(rewards, start=1)]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history, "max_steps": len(rewards)}))


def imported(root: Path, program: str = "trl") -> Path:
    study = root.with_name("study")
    assert main(["import", program, str(root), f"out={study}", "model=m", "task=t"]) == 0
    return study


# --- a run that stands twice, or whose seed changed nothing: an interval of three that are two ------------------------

AGAIN: dict[str, Callable[[Path], object]] = {
    "copied": lambda run: shutil.copytree(run, run.with_name(f"{run.name[:-1]}2")),
    "copied, with the times of a rerun": lambda run: trl_run(
        run.with_name(f"{run.name[:-1]}2"), rewards(run.name), step_time=9.0
    ),
    "of the other arm": lambda run: trl_run(run.with_name(f"{run.name[:-1]}2"), rewards("a-s0"), step_time=3.0),
}


def rewards(name: str) -> list[float]:
    start = {"a-s0": 0.5, "a-s1": 0.51, "b-s0": 0.6, "b-s1": 0.64}[name]
    return [start + 0.01 * step for step in range(5)]


@pytest.mark.parametrize("how", AGAIN)
def test_a_run_that_stands_twice_counts_once(how: str, tmp_path: Path) -> None:
    for name in ("a-s0", "a-s1", "b-s0", "b-s1"):
        trl_run(tmp_path / "runs" / name, rewards(name), step_time=1.0)
    once = judge(imported(tmp_path / "runs"))
    for name in ("a-s1", "b-s1"):
        AGAIN[how](tmp_path / "runs" / name)
    study = tmp_path / "again"
    assert main(["import", "trl", str(tmp_path / "runs"), f"out={study}", "model=m", "task=t"]) == 0
    unjudged = json.loads((study / ABOUT).read_text())["unjudged"]
    assert {*unjudged} == {"a-s2", "b-s2"} and all("has the numbers of" in reason for reason in unjudged.values())
    assert [one.difference for one in judge(study) if one.metric == "reward/mean"] == [
        one.difference for one in once if one.metric == "reward/mean"
    ]


def test_few_numbers_may_agree_by_chance(tmp_path: Path) -> None:
    for name in ("a-s0", "a-s1", "b-s0", "b-s1"):
        trl_run(tmp_path / "runs" / name, [0.0, 0.5, 0.0, 0.5, 0.0])
    assert not json.loads((imported(tmp_path / "runs") / ABOUT).read_text())["unjudged"]


# --- what a name says of a seed: the last number is not always one ----------------------------------------------------


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        *[("a-s3", 3), ("a_seed_3", 3), ("a/seed3", 3), ("mxfp8s3", 3), ("s3", 3), ("a.s3", 3), ("qloraseed3", 3)],
        *[("a-bs8", None), ("a-steps100", None), ("a-gpus4", None), ("a-eps1", None), ("a-params7", None)],
        *[("a-s3-v2", None), ("a-loss1", None), ("a-s", None), ("a-0.5", None), ("", None)],
    ],
)
def test_a_seed_is_what_is_called_so(name: str, seed: int | None) -> None:
    assert named_seed(name) == seed


# --- options whose names say that they decide nothing -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "values", "decides"),
    [
        ("rollout.name", ("vllm", "sglang"), True),
        ("optim.name", ("adamw", "muon"), True),
        ("model.path", ("/a/Qwen2.5-0.5B", "/a/Qwen2.5-1.5B"), True),
        ("model_name_or_path", ("Qwen/A", "Qwen/B"), True),
        ("custom_reward_function.path", ("/home/x/strict.py", "/home/x/lenient.py"), True),
        ("model.path", ("/home/x/Qwen2.5-0.5B", "/scratch/y/Qwen2.5-0.5B"), False),
        ("model.path", ("/a/Qwen2.5-0.5B/", "/b/Qwen2.5-0.5B"), False),
        ("run_name", ("one", "two"), False),
        ("trainer.experiment_name", ("one", "two"), False),
        ("output_dir", ("/a/one", "/a/two"), False),
        ("data.seed", (1, 2), False),
    ],
)
def test_an_arm_has_one_setting_by_values_and_not_by_keys(key: str, values: tuple[Any, Any], decides: bool) -> None:
    runs = [
        ForeignRun(f"a-s{seed}", "f", {1: {"reward": 0.1 * seed}}, {key: value}, seed)
        for seed, value in enumerate(values)
    ]
    _, about = study_of("TRL", "s", "m", "t", runs)
    assert bool(about.unjudged) == decides and all(key in reason for reason in about.unjudged.values())


# --- cells that are a number to one program, and another number to the next -------------------------------------------

ROW = Row("s", "a", 0, "m", "t", 1, "eval/accuracy_greedy", "", 0.5, None, "d", "f")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *[({"value": value}, "is a share") for value in (45.3, 100.0, 1.5, -2.0)],
        *[({"value": 2.0, "metric": metric}, "is a share") for metric in ("accuracy", "completions/truncated_frac")],
        *[({"question": "q", "n": n, "value": one}, "such as 0.5 of 2") for n, one in ((1, 0.5), (4, 0.4), (3, 0.5))],
        *[
            ({"question": "q", "n": n, "value": one}, "")
            for n, one in ((2, 0.5), (3, 0.33), (3, 0.6667), (1000, 0.1234))
        ],
        *[({"value": value}, "") for value in (0.0, 1.0, 1.0000001, float("nan"))],
        *[({"value": 45.3, "metric": metric}, "") for metric in ("reward/mean", "trl/accuracy", "completions/tokens")],
    ],
)
def test_a_share_is_no_percentage_and_a_part_is_one_of_its_n(changes: dict[str, Any], said: str) -> None:
    row = Row(**{**vars(ROW), **changes})
    if not said:
        assert checked(row, "here") is row
        return
    with pytest.raises(ConfigError, match=rf"here: .*{said}"):
        checked(row, "here")


@pytest.mark.parametrize("cell", ["4_5", "0,45", "45 %", "45%", "1e", "0x1p3", "--", "n/a", "½", "1 000"])
def test_a_cell_that_programs_read_differently_is_refused_by_its_line(
    cell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = dict(zip(COLUMNS, map(str, vars(ROW).values()), strict=True)) | {
        "metric": "mine",
        "n": "",
        "value": f'"{cell}"',
    }
    (tmp_path / "t.csv").write_text(f"{','.join(COLUMNS)}\n{','.join(cells.values())}\n")
    with pytest.raises(SystemExit) as end:
        main(["import", "csv", str(tmp_path / "t.csv"), f"out={tmp_path / 'study'}"])
    assert end.value.code == 2 and "line 2: value must be a number" in " ".join(capsys.readouterr().err.split())
