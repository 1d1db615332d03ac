"""What other programs and hands leave in logs and tables, and reads as something else: refused, or counted once."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from qerl_bench.__main__ import main
from qerl_core.checks import ConfigError
from qerl_studies.foreign.gather import ForeignRun, named_seed, study_of
from qerl_studies.foreign.verdict import Judged, judge
from qerl_studies.runs.reported import ABOUT, COLUMNS, Row, checked, read_rows

STARTS = {"a-s0": 0.5, "a-s1": 0.51, "b-s0": 0.6, "b-s1": 0.64}


def imported(root: Path, runs: dict[str, float], time: float) -> tuple[dict[str, str], list[Judged]]:
    """What is not judged of runs of TRL whose rewards begin so, and the verdicts; the last runs took another time."""
    for place, (name, start) in enumerate(runs.items()):
        own = {"step_time": time if place > 3 else 1.0}
        history = [{"step": step, "reward": start + 0.01 * step} | own for step in range(5)]
        (root / "runs" / name).mkdir(parents=True)
        (root / "runs" / name / "trainer_state.json").write_text(json.dumps({"log_history": history, "max_steps": 4}))
    assert main(["import", "trl", str(root / "runs"), f"out={root / 'study'}", "model=m", "task=t"]) == 0
    judged = [one for one in judge(root / "study") if one.metric == "reward/mean"]
    return json.loads((root / "study" / ABOUT).read_text())["unjudged"], judged


@pytest.mark.parametrize("time", [1.0, 9.0])  # of a copy, of a rerun
@pytest.mark.parametrize(("a", "b"), [("a-s1", "b-s1"), ("a-s0", "b-s0"), ("a-s1", "b-s0"), ("a-s0", "b-s1")])
def test_a_run_that_stands_twice_counts_once(a: str, b: str, time: float, tmp_path: Path) -> None:
    _, once = imported(tmp_path / "once", STARTS, 1.0)
    unjudged, twice = imported(tmp_path / "twice", STARTS | {"a-s2": STARTS[a], "b-s2": STARTS[b]}, time)
    assert {*unjudged} == {"a-s2", "b-s2"} and all("has the numbers of" in reason for reason in unjudged.values())
    assert [one.difference for one in twice] == [one.difference for one in once] and once[0].difference is not None


@pytest.mark.parametrize(("copy", "of"), [("a-s2", "b-s1"), ("b-s2", "a-s0"), ("a-s2", "b-s0"), ("b-s2", "a-s1")])
def test_a_run_that_stands_in_two_arms_counts_in_none(copy: str, of: str, tmp_path: Path) -> None:
    unjudged, (one,) = imported(tmp_path, STARTS | {copy: STARTS[of]}, 1.0)
    assert {*unjudged} == {copy, of} and one.difference is None and "single seed" in one.state.untested


@pytest.mark.parametrize(
    ("names", "seed"),
    [
        (("a-s3", "a_seed_3", "a/seed3", "mxfp8s3", "s3", "a.s3", "qloraseed3"), 3),
        (("a-bs8", "a-steps100", "a-gpus4", "a-eps1", "a-params7", "a-s3-v2", "a-s", "a-0.5", ""), None),
    ],
)
def test_a_seed_is_what_is_called_so(names: tuple[str, ...], seed: int | None) -> None:
    assert {*map(named_seed, names)} == {seed}


SETTINGS = [  # of two runs of an arm, and whether they are one
    *(("rollout.name", "vllm", "sglang", False), ("model_name_or_path", "Qwen/A", "Qwen/B", False)),
    *(("model.path", "/a/Qwen-0.5B", "/a/Qwen-1.5B", False), ("reward.path", "/x/strict.py", "/x/mild.py", False)),
    *((key, "1", "2", True) for key in ("run_name", "trainer.experiment_name", "output_dir", "seed", "data.seed")),
    ("model.path", "/home/x/Qwen-0.5B", "/scratch/y/Qwen-0.5B/", True),
]


@pytest.mark.parametrize(("key", "first", "second", "one"), SETTINGS)
def test_an_arm_has_one_setting_by_values_and_not_by_keys(key: str, first: str, second: str, one: bool) -> None:
    runs = [ForeignRun(f"a-s{seed}", "f", {1: {"r": 0.1}}, {key: (first, second)[seed]}, seed) for seed in (0, 1)]
    _, about = study_of("TRL", "s", "m", "t", runs)
    assert [key in reason for reason in about.unjudged.values()] == [True, True] * (not one)


ROW = Row("s", "a", 0, "m", "t", 1, "eval/accuracy_greedy", "", 0.5, None, "d", "f")
FITS = [(1.0, None), (0.0, None), (1.0000001, None), (float("nan"), None), (0.5, 2), (0.33, 3), (0.1, 900)]
WRONG = [(45.3, None), (100.0, None), (1.5, None), (-2.0, None), (0.5, 1), (0.4, 4), (0.5, 3)]


@pytest.mark.parametrize(("value", "n"), FITS + WRONG)
def test_a_share_is_no_percentage_and_a_part_is_one_of_its_n(value: float, n: int | None) -> None:
    row = replace(ROW, value=value, n=n, question="" if n is None else "q")
    said = r"here: .*(is a share|such as 0\.5 of 2)"
    with pytest.raises(ConfigError, match=said) if (value, n) in WRONG else nullcontext():
        checked(row, "here")
    checked(replace(ROW, value=value, metric="reward/mean"), "here")


@pytest.mark.parametrize("cell", ["4_5", "0,45", "45 %", "1e", "0x1p3", "--", "n/a", "½", "1 000"])
def test_a_cell_that_programs_read_differently_is_refused_by_its_line(cell: str, tmp_path: Path) -> None:
    cells = dict(zip(COLUMNS, map(str, vars(ROW).values()), strict=True)) | {"n": "", "value": f'"{cell}"'}
    (tmp_path / "t.csv").write_text(f'{",".join(COLUMNS)},"\n"\n{",".join(cells.values())},\n')
    with pytest.raises(ConfigError, match="line 3: value must be a number"):
        [*read_rows(tmp_path / "t.csv")]
