"""The rule of CONTRIBUTING.md: conf/<axis>/x.yaml belongs to qerl_bench/<axis>/x.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from qerl_bench.option_names import load_option

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
COMPOSED = {"experiment", "recipe"}  # their files choose options of several axes
FILES = sorted(path for path in CONF.glob("*/**/*.yaml") if path.relative_to(CONF).parts[0] not in COMPOSED)
SHARED = set(re.findall(r"`src/qerl_bench/(\w+/\w+)\.py`, shared", (ROOT / "CONTRIBUTING.md").read_text()))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CONF)))
def test_an_option_lies_where_its_name_says(path: Path) -> None:
    axis = path.relative_to(CONF).parts[0]
    text = OmegaConf.to_yaml(
        load_option([CONF], axis, str(path.relative_to(CONF / axis).with_suffix("")))
    )  # with the values that a preset takes from another option
    targets = re.findall(r"^\s*_target_: (\S+)", text, flags=re.MULTILINE)
    assert targets and all(target.startswith(f"qerl_bench.{axis}.") for target in targets)
    module = targets[0].split(".")[2]  # of engine.vllm.spec.VLLM: vllm
    own = CONF / axis / f"{module}.yaml", CONF / axis / module
    assert any(place.exists() for place in own) or f"{axis}/{module}" in SHARED


def test_every_shared_module_named_in_contributing_is_shared() -> None:
    assert SHARED
    for name in SHARED:
        target = f"_target_: qerl_bench.{name.replace('/', '.')}."
        assert sum(target in path.read_text() for path in FILES) > 1, name
