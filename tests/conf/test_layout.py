"""conf/<axis>/x.yaml belongs to qerl_bench/<axis>/x.py; packages import one way, and rooms within them in no circle."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from qerl_bench.__main__ import COMMANDS, READERS
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


SRC, KERNELS = ROOT / "src", ROOT / "kernels"
PACKAGE = SRC / "qerl_bench"
MAY_IMPORT = {  # of ours: one way down
    "qerl_kernels": set(),
    "qerl_core": {"qerl_kernels"},
    "qerl_studies": {"qerl_core"},
    "qerl_bench": {"qerl_kernels", "qerl_core", "qerl_studies"},
    "hydra_plugins": {"qerl_core", "qerl_bench"},
}
PUBLIC = ("qerl_bench.checks", "qerl_bench.records")  # what options of one's own import, by the names of docs/how-to
LINES, ROOTS, EXCEPTIONS = 300, 12, 1  # at most: of a file, of modules that lie in no room, and of files in LONG
LONG = {
    "benchmarks/training.py": "the cases of every kernel of training, one after the other",
}


def modules() -> dict[str, Path]:
    """Every module of the program and of the kernels, by name."""
    found = {}
    for root in (SRC, KERNELS):
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


def package_of(module: str) -> str:
    return module.split(".")[0]


def room(module: str) -> str:
    """The folder of a module in its package; the module itself if that lies in none."""
    package, *inner = module.split(".")
    return "/".join([package, *inner[:1]]) if package in ("qerl_core", "qerl_studies", "qerl_bench") else package


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


def test_packages_import_one_way() -> None:
    assert {package_of(name) for name in MODULES} == MAY_IMPORT.keys() | {"run"}
    for module, others in imports().items():
        if (package := package_of(module)) != "run":
            assert {package_of(other) for other in others} - {package} <= MAY_IMPORT[package], module


def test_neither_files_nor_rooms_import_in_a_circle() -> None:
    assert circle(imports()) == []
    assert circle(between_rooms()) == []


def rows() -> dict[str, int]:
    """The row of docs/architecture.md in which each room stands, counted from the top through all packages."""
    text = (ROOT / "docs" / "architecture.md").read_text().split("## Packages")[1].split("\n## ")[0]
    found: dict[str, int] = {}
    for package, block in re.findall(r"### (\w+)\n\n((?:    .*\n)+)", text):
        for row in re.findall(r"    \S.*\n(?:     .*\n)*", block.replace("(hydra_plugins/)", "")):
            number = 1 + max(found.values(), default=0)
            found |= {f"{package}/{name}": number for name in re.findall(r"(\w+)(?:\.py|/)(?=[,\s]|$)", row)}
    return found


def test_every_package_and_room_is_in_architecture_md() -> None:
    assert rows().keys() == {room(name) for name in MODULES if room(name).count("/")} - {
        name.replace(".", "/") for name in PUBLIC
    }


def test_rooms_import_from_their_row_or_below() -> None:
    row = rows()
    arrows = {(one, other) for one, others in between_rooms().items() for other in others if {one, other} <= {*row}}
    assert arrows and {(one, other) for one, other in arrows if row[other] < row[one]} == set()


def test_public_names_are_those_of_the_core_and_nothing_of_ours_uses_them() -> None:
    for name in PUBLIC:
        text = MODULES[name].read_text()
        assert f"from {name.replace('qerl_bench', 'qerl_core')} import *" in text and len(text.splitlines()) < 5
        assert not [module for module, others in imports().items() if name in others]


# In front of the path of a program: whoever imports one of these fails.
FORBIDDEN = ("torch", "transformers", "peft", "safetensors")
ALL_OF_STUDIES = [name for name in sorted(MODULES) if package_of(name) == "qerl_studies"]


@pytest.fixture(scope="module")
def forbidding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forbidding")
    for name in FORBIDDEN:
        (folder / f"{name}.py").write_text(f"raise AssertionError('{name} is imported')\n")
    return folder


def run_without_torch(folder: Path, code: str, *words: str) -> subprocess.CompletedProcess[str]:
    start = f"import sys; sys.path[:0] = {[str(folder), str(SRC), str(KERNELS)]!r}\n{code}"
    return subprocess.run([sys.executable, "-c", start, *words], cwd=ROOT, capture_output=True, text=True)


def test_what_reads_runs_imports_neither_torch_nor_its_libraries(forbidding: Path) -> None:
    done = run_without_torch(forbidding, f"for name in {ALL_OF_STUDIES!r}: __import__(name)")
    assert done.returncode == 0, done.stderr
    assert run_without_torch(forbidding, "import qerl_bench.experiment").returncode == 1


RUNS = "tests/assets/runs"
READING = [  # each with rc 0
    ["claims", RUNS, "out={out}/claims"],
    ["collect", RUNS, "out={out}/study"],
    ["report", RUNS, "out={out}/report"],
    ["compare", f"{RUNS}/nvfp4-exp-grpo-r32-s0-a101d16e", f"{RUNS}/nvfp4-none-grpo-r32-s0-d8a0f9b2"],
    ["status", RUNS],
    ["matrix", "{out}/study", "out={out}/matrix.md"],
    ["plan", "{out}/study"],
    ["check", "community/example-smoke"],
    ["figure", "reward", RUNS, "out={out}"],
    ["verdicts", "studies/fp16", "out={out}/verdicts"],
    ["publish", "community/example-smoke", "out={out}/published"],
    ["import", "csv", "studies/reported/trl-eight-seeds/reported.csv", "out={out}/reported"],
    ["conform", "studies/real-2026/15b-again", "reference=qwen2.5-coder-1.5b-gsm8k"],
    ["register", "{claim}", "out={out}/registered", "units=8"],
    ["run", "--explain", "optim.lr"],
    ["run", "--help"],
]


EACH = """
import json
from qerl_bench.__main__ import main
for words in json.loads(sys.argv[1]):
    try:
        code = main(words)
    except SystemExit as exit:
        code = exit.code
    assert not code, words
"""


def test_commands_that_read_runs_need_no_torch(forbidding: Path, tmp_path: Path) -> None:
    """In one process, which would import it once and never again."""
    assert {name for name, *_ in READING} >= READERS
    claim = tmp_path / "claim" / "mine.yaml"
    claim.parent.mkdir()
    claim.write_text((CONF / "claim" / "jet-rl.yaml").read_text())
    commands = [[word.format(out=tmp_path, claim=claim) for word in words] for words in READING]
    done = run_without_torch(forbidding, EACH, json.dumps(commands))
    assert done.returncode == 0, done.stderr


def test_each_room_says_what_belongs_there() -> None:
    inits = [path for path in MODULES.values() if path.name == "__init__.py"]
    assert inits and not [path for path in inits if not ast.get_docstring(ast.parse(path.read_text()))]


def test_places_of_changes_exist() -> None:
    """Files and names that CONTRIBUTING sends a change to, options apart."""
    text = (ROOT / "CONTRIBUTING.md").read_text().split("## Change what is no option")[1].split("\n## ")[0]
    places = re.findall(r"`((?:\w+/)*[\w]+\.py)`", text)
    assert places
    for place in places:
        assert (PACKAGE / place).is_file() or (SRC / place).is_file() or "NAME" in place, place


def test_the_root_shows_the_loop() -> None:
    named = {name.split(".")[1] for name in PUBLIC}
    assert len({path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__", *named}) <= ROOTS


def test_files_are_short() -> None:
    files = [*MODULES.values(), *(ROOT / "benchmarks").rglob("*.py")]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert {name for name, length in lengths.items() if length > LINES} == LONG.keys()
    assert len(LONG) <= EXCEPTIONS


def test_each_subcommand_lies_in_a_file_of_its_name() -> None:
    reading = {path.stem for path in SRC.glob("qerl_studies/commands/*.py")} - {"__init__"}
    making = {path.stem for path in SRC.glob("qerl_bench/commands/*.py")} - {"__init__"}
    assert reading == READERS and making == COMMANDS.keys() - READERS


def test_no_two_public_classes_have_one_name() -> None:
    sources = [path.read_text() for name, path in MODULES.items() if room(name).count("/")]
    classes = Counter(name for text in sources for name in re.findall(r"(?m)^class ([A-Z]\w*)", text))
    assert [name for name, count in classes.items() if count > 1] == []
