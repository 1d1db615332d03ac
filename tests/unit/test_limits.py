"""A study names its own gates and limits; what they read of bases and runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import yaml

from qerl_core.checks import ConfigError
from qerl_studies.design.design import Design, read_design
from qerl_studies.design.gates import gates
from qerl_studies.design.limits import BUILT_IN, read_limits
from qerl_studies.design.readings import above_half_time, gain_where_complete, lenient_gap, mixed_group

STUDY: dict[str, Any] = {
    "common": ["model=tiny", "rollout.group_size=2"],
    "bases": 2,
    "seeds": 1,
    "arms": {
        "bf16": {"tier": 1, "words": ["quant=bf16"]},
        "nvfp4": {"tier": 1, "words": ["quant=nvfp4"]},
    },
    "probe": {"questions": 2, "samples": 4},
    "dose": {"rise": 0.1, "prompts": 8, "draws": 1},
}
OWN = {"pass_at_1": [0.15, 0.65], "mixed_groups": 0.4, "strict_lenient": 0.02, "gain": 0.1, "above_half_time": 0.01}


def design(folder: Path, **more: Any) -> Design:
    (folder / "study.yaml").write_text(yaml.safe_dump(STUDY | more))
    return read_design(folder / "study.yaml")


def run(before: list[float], half: list[float], after: list[float], finished: list[float]) -> Any:
    tables = {
        "lenient": pd.DataFrame({0: before, 5: half, 10: after}),
        "finished": pd.DataFrame({0: finished, 5: finished, 10: finished}),
    }
    tables["correct"] = tables["lenient"]
    return SimpleNamespace(
        name="a",
        path=Path("none"),
        kept_answers=tables,
        option=lambda key: {"steps": 10}[key],
        answers=lambda mode, column="correct": tables[column],
    )


def probe(right: list[int], lenient: list[int] | None) -> dict[str, Any]:
    at_one = {"correct": right, "lenient": lenient, "samples": 4}
    return {"formats": {name: at_one | {"temperatures": {"1": at_one}} for name in ("bf16", "nvfp4")}, "doses": {}}


def test_a_study_asks_the_gates_that_it_names(tmp_path: Path) -> None:
    probes = [probe([1, 2], [1, 2]), probe([2, 1], [2, 1])]
    found = {one.gate: one for one in gates(design(tmp_path, gates=OWN), probes, {})}
    asked = ["pass@1 of the base", "mixed groups of 2", "lenient minus strict, bf16", "lenient minus strict, nvfp4"]
    asked += ["damage by nvfp4", "gain where complete", "end above half time"]
    assert [*found][:7] == asked
    assert found["mixed groups of 2"].value == pytest.approx((1 / 2 + 2 / 3) / 2)  # of six pairs three, and four
    assert found["pass@1 of the base"].word == "yes" and found["lenient minus strict, bf16"].word == "yes"
    assert found["gain where complete"].word == found["end above half time"].word == "open"


def test_a_format_that_costs_answers_fails_its_gate(tmp_path: Path) -> None:
    named = design(tmp_path, gates=OWN)
    costly = [probe([1, 2], [2, 3]), probe([1, 2], [2, 3])]
    found = {one.gate: one for one in gates(named, costly, {})}
    assert found["lenient minus strict, bf16"].word == "no" and found["lenient minus strict, bf16"].value == 0.25
    assert lenient_gap(probe([1], None), "bf16") is None


def test_runs_are_read_by_their_last_numbers() -> None:
    one = run([0, 0, 1, 0], [1, 0, 1, 0], [1, 1, 1, 1], [1, 1, 1, 0])
    assert gain_where_complete(one) == pytest.approx(2 / 3)  # the last question was cut off
    assert above_half_time(one) == pytest.approx(0.5)
    with pytest.raises(ConfigError, match=r"a was not evaluated at half time: eval\.at=\[6\]"):
        above_half_time(SimpleNamespace(**vars(one) | {"option": lambda _: 12}))  # type: ignore[arg-type]


def test_gates_of_training_need_all_units(tmp_path: Path) -> None:
    named = design(tmp_path, gates={"gain": 0.1, "above_half_time": 0.01})
    learns = run([0, 0], [0, 1], [1, 1], [1, 1])
    runs = {("bf16", base, 0): learns for base in (0, 1)}
    found = {one.gate: one.word for one in gates(named, [], runs)}
    assert (found["gain where complete"], found["end above half time"]) == ("yes", "yes")
    still = {("bf16", base, 0): run([0, 0], [1, 1], [1, 1], [1, 1]) for base in (0, 1)}
    assert {one.gate: one.word for one in gates(named, [], still)}["end above half time"] == "no"


def test_groups_are_drawn_without_replacement() -> None:
    assert mixed_group(0, 64, 8) == mixed_group(64, 64, 8) == 0 and mixed_group(1, 8, 8) == 1
    assert mixed_group(2, 4, 2) == pytest.approx(2 / 3)  # of six pairs two are alike
    assert mixed_group(1, 2, 8) == 1  # of fewer samples all


def test_without_gates_a_study_has_those_of_worlds(tmp_path: Path) -> None:
    assert design(tmp_path).limits == BUILT_IN == read_limits(None)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"pass_at_2": 0.1}, r"gates must have entries of .*pass_at_1.*got \['pass_at_2'\]"),
        ({}, "gates must have entries"),
        ([0.1], "gates must have entries"),
        ({"pass_at_1": 0.15}, r"gates\.pass_at_1 must be null or two numbers, from and to, got 0\.15"),
        ({"pass_at_1": [0.6, 0.1]}, r"gates\.pass_at_1 must be"),
        ({"gain": 1.5}, r"gates\.gain must be null or a number from 0 to below 1, got 1\.5"),
    ],
)
def test_wrong_gates_are_refused(tmp_path: Path, written: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        design(tmp_path, gates=written)
