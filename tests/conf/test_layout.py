"""conf/<axis>/x.yaml belongs to qerl_bench/<axis>/x.py, and modules lie in rooms, which import downwards only."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from qerl_bench.__main__ import COMMANDS
from qerl_core.options.names import load_option

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
NO_OPTIONS = {"experiment", "recipe", "claim"}  # the first two choose options of several axes
FILES = sorted(path for path in CONF.glob("*/**/*.yaml") if path.relative_to(CONF).parts[0] not in NO_OPTIONS)
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


SRC, PACKAGE = ROOT / "src", ROOT / "src" / "qerl_bench"
FLOORS = (ROOT / "docs" / "architecture.md").read_text().split("## Floors")[1].split("\n\n")[2]
CONTRACTS = {"checks", "metrics", "parallel", "records", "seeding", "statistics", "options", "process", "rundir"}
LINES, ROOTS, EXCEPTIONS = 300, 12, 12  # at most: of a file, of modules that lie in no room, and of files in LONG
LONG = {
    "benchmarks/training.py": "the cases of every kernel of training, one after the other",
    "kernels/qerl_kernels/jit_decode_common.py": "what the kernels of decoding are made of, which Triton inlines",
    "src/qerl_bench/engine/hf_graph.py": "one step of decoding over one set of buffers",
    "src/qerl_bench/experiment.py": "the loop, read from top to bottom",
    "src/qerl_core/metrics.py": "the definition of every metric",
}


def modules() -> dict[str, Path]:
    """Every module of the program and of the kernels, by name."""
    found = {}
    for root in (SRC, ROOT / "kernels"):
        for path in root.rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imported(path: Path) -> Iterator[str]:
    """The modules of ours that a file imports anywhere: inside functions and for type checkers too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                yield from [name] if name in MODULES else [str(node.module)] if node.module in MODULES else []
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)


@cache
def imports() -> dict[str, set[str]]:
    """What each module imports of ours; read when a test asks, as each process collects this file."""
    return {name: {*imported(path)} - {name} for name, path in MODULES.items()}


def room(module: str) -> str:
    """The package of a module, as docs/architecture.md has it; the module itself if that lies in none."""
    package, *inner = module.split(".")
    if package != "qerl_bench" or not inner:
        return package
    return "/".join(inner[:2] if inner[0] == "studies" else inner[:1])


def between_rooms() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {room(module): set() for module in MODULES}
    for module, others in imports().items():
        found[room(module)] |= {room(other) for other in others} - {room(module)}
    return found


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Names that lead from one to the next, and back to the first; empty if none do."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_neither_files_nor_rooms_import_in_a_circle() -> None:
    assert circle(imports()) == []
    assert circle(between_rooms()) == []


def test_modules_import_from_their_floor_or_below() -> None:
    rows = re.split(r"\n    (?=\S)", f"\n{FLOORS}")[1:]
    floor = {
        name: number for number, row in enumerate(rows) for name in re.findall(r"([\w/]+)(?:\.py|/)(?=[,\s]|$)", row)
    }
    ours = {room(name) for name in MODULES if name.startswith(("qerl_bench.", "hydra_plugins."))} - {"studies"}
    assert floor.keys() == ours, "docs/architecture.md has no floor for these, or one for what is gone"
    upward = {(one, other) for one in ours for other in between_rooms()[one] & ours if floor[other] < floor[one]}
    assert upward == set()


def test_what_reads_runs_imports_nothing_of_what_makes_them() -> None:
    for module, others in imports().items():
        if room(module).startswith("studies/") and room(module) != "studies/conduct":
            allowed = {name for name in others if room(name).startswith("studies/") or room(name) in CONTRACTS}
            assert others - allowed <= {"qerl_bench", "qerl_core.sweeps.points"}, module
            assert not any(room(name) == "studies/conduct" for name in others), module


def test_each_room_says_what_belongs_there() -> None:
    inits = [path for path in MODULES.values() if path.name == "__init__.py"]
    assert inits and not [path for path in inits if not ast.get_docstring(ast.parse(path.read_text()))]


def test_places_of_changes_exist() -> None:
    """Files and names that CONTRIBUTING sends a change to, options apart."""
    text = (ROOT / "CONTRIBUTING.md").read_text().split("## Change what is no option")[1].split("\n## ")[0]
    for place in re.findall(r"`((?:commands|\w+)/[\w/]+\.py|\w+\.py)`", text):
        assert (PACKAGE / place).is_file() or (SRC / place).is_file() or "NAME" in place, place


def test_the_root_shows_the_loop() -> None:
    assert len({path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}) <= ROOTS


def test_files_are_short() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in MODULES.values()}
    assert {name for name, length in lengths.items() if length > LINES} == LONG.keys()
    assert len(LONG) <= EXCEPTIONS


def test_each_subcommand_lies_in_a_file_of_its_name() -> None:
    assert {path.stem for path in PACKAGE.glob("commands/*.py")} == {*COMMANDS, "exits", "__init__"}


def test_no_two_public_classes_have_one_name() -> None:
    sources = [path.read_text() for name, path in MODULES.items() if name.startswith("qerl_bench")]
    classes = Counter(name for text in sources for name in re.findall(r"(?m)^class ([A-Z]\w*)", text))
    assert [name for name, count in classes.items() if count > 1] == []
