"""conf/<axis>/x.yaml belongs to qerl_bench/<axis>/x.py, and modules import from their own floor or from below."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from qerl_bench.options.names import load_option

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


SRC = ROOT / "src" / "qerl_bench"
FLOORS, ABOVE = (ROOT / "docs" / "architecture.md").read_text().split("## Floors")[1].split("Imports for type")
NAME = r"(?<![\w.])([a-z_]\w*)(?:\.py|/)(?=[,\s]|$)"  # checks.py or engine/


def floors() -> dict[str, int]:
    """The floor of each module and package, the top one being 0."""
    rows = re.split(r"\n    (?=\S)", FLOORS)[1:]
    return {name: number for number, row in enumerate(rows) for name in re.findall(NAME, row)}


def imported(node: ast.AST) -> Iterator[str]:
    """The modules and packages of ours that `node` imports when it runs."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.ImportFrom) and (child.module or "").startswith(("qerl_bench", "hydra_plugins")):
            package, *inner = str(child.module).split(".")
            of_ours = inner[:1] or [alias.name for alias in child.names]
            yield from of_ours if package == "qerl_bench" else [package]
        yield from imported(child)


def test_modules_import_from_their_floor_or_below_but_for_those_that_the_page_names() -> None:
    floor = floors()
    places = {path.stem if path.suffix else path.name for path in SRC.iterdir()} - {"__init__", "__pycache__", "py"}
    assert places <= floor.keys(), "docs/architecture.md has no floor for these"
    upward = set()
    for path in SRC.rglob("*.py"):
        inside = path.relative_to(SRC)
        own = floor.get(inside.parts[0].removesuffix(".py"), 0)
        if any(floor.get(name, own) < own for name in imported(ast.parse(path.read_text()))):
            upward.add(str(inside))
    assert upward == set(re.findall(r"(?m)^- `([\w/]+\.py)`", ABOVE.split("`kernels/")[0]))
