"""Numbers of operations of task=dag that bases can learn from, by probes that are made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qerl_bench.config import build, compose
from qerl_bench.task.dag import operations_needed
from qerl_core.checks import ConfigError
from qerl_core.seeding import derive
from qerl_studies.design.design import read_design
from tests.scripts import script

SCRIPT = script("studies/dag-2026/rungs.py")
chosen, fits, main, report, windows = (getattr(SCRIPT, n) for n in ("chosen", "fits", "main", "report", "windows"))
RUNGS = Path(__file__).parents[2] / "studies" / "dag-2026" / "rungs.yaml"


def _rung(once: float, most: float, none: float) -> dict[str, float]:
    return {"pass@1": once, "pass@k": most, "no success": none, "questions": 10.0}


def test_of_five_in_a_row_that_fit_the_middle_one_is_chosen() -> None:
    """Each rung has 6 points more groups without success than the one before; 35 % is the middle."""
    rungs = {n: _rung(0.5 - 0.04 * n, 1.0 - 0.01 * n, 0.06 * n) for n in range(1, 11)}
    together = windows(rungs, 5)
    assert list(together) == [tuple(range(first, first + 5)) for first in range(1, 7)]
    assert together[2, 3, 4, 5, 6] == pytest.approx({"pass@1": 0.34, "pass@k": 0.96, "no success": 0.24})
    assert [one[0] for one in together if fits(together[one])] == [2, 3, 4, 5, 6]
    assert chosen(together) == (4, 5, 6, 7, 8)
    gap = windows({n: rung for n, rung in rungs.items() if n != 5}, 5)
    assert list(gap) == [(6, 7, 8, 9, 10)] and chosen({}) is None


def test_of_two_that_are_equally_near_the_one_with_fewer_operations_is_chosen() -> None:
    easy, hard = (2, 3, 4, 5, 6), (3, 4, 5, 6, 7)
    for first, second in ((0.3, 0.4), (0.4, 0.3)):
        assert chosen({hard: _rung(0.2, 0.9, second), easy: _rung(0.2, 0.9, first)}) == easy


def test_fewer_in_a_row_are_looked_at_only_where_more_do_not_fit() -> None:
    """A ladder so steep that five in a row have too few answers among 64, and three have enough."""
    steep = {n: _rung(0.6 / n**2, 1.1 - 0.15 * n, 0.2 * n - 0.1) for n in range(1, 8)}
    shown = report(steep, 8, [5, 4, 3]).split("\n\n")
    assert [part.splitlines()[2].split(" | ")[0] for part in shown[2:-1]] == ["| 1 to 5", "| 1 to 4", "| 1 to 3"]
    assert shown[-1] == "task.operations=[1,2,3]" and report(steep, 8, [5]).endswith("none fits")
    gentle = {n: _rung(0.3, 0.9, 0.35) for n in range(1, 6)}
    assert report(gentle, 1, [5, 4, 3]).endswith("task.operations=[1,2,3,4,5]")


@pytest.mark.parametrize(
    "wrong",
    [_rung(0.41, 0.9, 0.3), _rung(0.09, 0.9, 0.3), _rung(0.2, 0.79, 0.3), _rung(0.2, 0.9, 0.19), _rung(0.2, 0.9, 0.51)],
)
def test_each_gate_of_difficulty_counts(wrong: dict[str, float]) -> None:
    assert fits(_rung(0.2, 0.9, 0.3)) and not fits(wrong)


def test_probes_are_read_by_number_of_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four bases; about n tenths of the problems of n operations are right once in 64 samples, the others 25 times."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"the bases \[60, 61, 62, 63\] were not probed; run qerl-bench gates .*rungs.yaml"
    ):
        main([str(RUNGS)])
    design = read_design(RUNGS)
    task: Any = build(compose(design.base_words(design.reference, 60))).task
    prompts = task.train_prompts(1, design.probe.questions, derive("probe"))
    right = [1 if place % 10 < operations_needed(one.question) else 25 for place, one in enumerate(prompts)]
    for base in design.bases:
        file = design.probe_file(base)
        file.parent.mkdir(parents=True, exist_ok=True)
        counts = {"bf16": right, "nvfp4": [n - 1 for n in right]}
        formats = {name: {"correct": correct, "samples": 64} for name, correct in counts.items()}
        file.write_text(json.dumps({"base": base, "formats": formats, "doses": {}}))
    main([str(RUNGS)])
    with pytest.raises(ConfigError, match="--widths must be at most 9"):
        main([str(RUNGS), "--widths", "10"])
    bases, single, five, words = capsys.readouterr().out.split("\n\n")
    assert bases == "4 bases" and words.strip() == "task.operations=[2,3,4,5,6]"
    header, _, *lines = single.splitlines()
    assert header == "| operations | pass@1 | pass@k | no success | damage by nvfp4 | questions |"
    rows = [line.strip("| ").split(" | ") for line in lines]
    assert [row[0] for row in rows] == [str(n) for n in range(2, 11)] and sum(int(row[5]) for row in rows) == 512
    assert float(rows[0][1]) == pytest.approx(0.314, abs=5e-4)
    assert rows[-1][1:5] == ["0.016", "1.000", "0.750", "0.016"]
    assert [line.split(" | ")[0] for line in five.splitlines()[2:]] == [f"| {n} to {n + 4}" for n in range(2, 7)]
