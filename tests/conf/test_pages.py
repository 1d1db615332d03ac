"""The pages of docs/ that say what the code does: generated ones are current, the others name what exists."""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

from qerl_bench.config import build, compose
from qerl_core.checks import ConfigError
from qerl_core.process.installation import CONF_DIR
from qerl_studies.claims.registry import QERL, claims_of
from qerl_studies.figures.named import FIGURES

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = claims_of(QERL)
DOCS = ROOT / "docs"


def script(path: Path) -> ModuleType:
    """A Python file of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(page: str) -> list[list[str]]:
    """The cells of the rows of all tables of a page, without their headings."""
    tables = re.findall(r"^\|---.*\n((?:\|.*\n)+)", (DOCS / page).read_text(), flags=re.MULTILINE)
    lines = [line for table in tables for line in table.splitlines()]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


# --- reference -------------------------------------------------------------------------------------------------------

WRITE = script(DOCS / "reference" / "write.py")


@pytest.mark.parametrize("file", WRITE.FILES)
def test_the_reference_is_current(file: str) -> None:
    assert (DOCS / "reference" / file).read_text() == WRITE.FILES[file](), "run: python docs/reference/write.py"


def test_what_a_field_allows_is_read_from_its_class() -> None:
    optim = WRITE.allowed("qerl_bench.train.spec.OptimSpec")
    assert optim["schedule"] == "one of constant, linear, cosine" and "warmup_steps" in optim
    assert WRITE.allowed("qerl_bench.train.spec.TrainSpec")["updates_per_batch"].endswith("at most 1,000")
    inherited = WRITE.allowed("qerl_bench.algo.grpo.GRPO")
    assert "advantage_eps" in inherited and "epsilon_low" in inherited
    assert WRITE.allowed("")["device"] == "one of auto, cpu, cuda"


# --- errors ----------------------------------------------------------------------------------------------------------


@cache
def texts_of_the_code() -> str:
    """Every string of the package, f-strings with … in place of their values, one per line."""
    found = []
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
                )
    return "\n".join(text.replace("\n", " ") for text in found)


def pattern(message: str) -> re.Pattern[str]:
    """`…` stands for anything within one message."""
    return re.compile(".*".join(map(re.escape, re.split(r"\s*…\s*", message.strip("`")))))


ERRORS = rows("errors.md")
PROVOKED = {message: words.strip("`") for message, words, *_ in ERRORS if words}


def test_every_error_has_cause_and_remedy() -> None:
    assert len(ERRORS) >= 30 and all(len(row) == 4 and row[2] and row[3] for row in ERRORS)
    assert len(PROVOKED) >= 15


@pytest.mark.parametrize("message", PROVOKED)
def test_the_example_gets_this_message(message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        build(compose(PROVOKED[message].split()))
    assert pattern(message).search(str(refused.value)), refused.value


@pytest.mark.parametrize("message", [message for message, words, *_ in ERRORS if not words])
def test_the_message_is_in_the_code(message: str) -> None:
    assert pattern(message).search(texts_of_the_code())


# --- the paper -------------------------------------------------------------------------------------------------------


def test_the_paper_index_names_what_exists_and_misses_no_study() -> None:
    figures = [row for row in rows("paper.md") if len(row) == 5]
    named = set()
    for _, _, studies, names, claims in figures:
        named |= set(re.findall(r"`(paper/\w+)`", studies))
        scripts_of_studies = {path.stem for path in ROOT.glob("studies/*/*.py")}
        assert FIGURES.keys() | scripts_of_studies >= {*re.findall(r"`(\w+)`", names)}
        assert all(1 <= int(number) <= len(CLAIMS) for number in claims.split(", "))
    shared = {"paper/gsm8k", "paper/bigmath", "paper/speed"}
    studies = {f"paper/{file.stem}" for file in (CONF_DIR / "experiment" / "paper").glob("*.yaml")}
    assert named == studies - shared


def test_the_paper_index_agrees_with_the_commands_of_the_claims() -> None:
    """Each claim stands beside the study that its own command at scale runs, and beside its command here."""
    tables = rows("paper.md")
    for number, claim in enumerate(CLAIMS, 1):
        for command in (claim.command, claim.at_scale):
            for study in re.findall(r"experiment=(\S+)", command):
                beside = [row[-1] if len(row) == 5 else row[0] for row in tables if f"`{study}`" in " ".join(row)]
                assert str(number) in ", ".join(beside).split(", "), (number, study)


# --- pictures and site -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_pictures_are_what_their_script_draws(tmp_path: Path) -> None:
    folder = DOCS / "pictures"
    drawn_by = re.findall(r"Matplotlib v([\d.]+)", (folder / "loop.svg").read_text())
    if drawn_by != [version("matplotlib")]:
        pytest.skip(f"drawn by Matplotlib {drawn_by}; another version draws the same in other bytes")
    script(folder / "draw.py").main(tmp_path)
    names = sorted(file.name for file in folder.glob("*.svg"))
    assert names == sorted(file.name for file in tmp_path.iterdir())
    changed = [name for name in names if (folder / name).read_bytes() != (tmp_path / name).read_bytes()]
    assert changed == [], "run: python docs/pictures/draw.py"


SITE = script(DOCS / "site.py")


def test_every_page_of_docs_and_studies_is_on_the_site() -> None:
    pages = [*DOCS.rglob("*.md"), *(ROOT / "studies").rglob("*.md")]
    assert [page for page in pages if page not in SITE.pages()] == []


def test_the_menu_has_groups_for_folders() -> None:
    sections = {name: entries for section in SITE.menu() for name, entries in section.items()}
    assert [*sections][:2] == ["Home", "Start"]
    (algorithms,) = (entry["Algorithms"] for entry in sections["How it works"] if "Algorithms" in entry)
    assert algorithms[0] == "docs/algorithms/README.md" and {"GRPO": "docs/algorithms/grpo.md"} in algorithms


LOADED = re.compile(
    r'<(?:script|img|iframe|source|object)\b[^>]*?\b(?:src|data)="?([^"\s>]+)|<link\b[^>]*?\bhref="?([^"\s>]+)'
)


def elsewhere(text: str) -> list[str]:
    """What a page loads from a server: scripts, pictures, styles and fonts; links to follow are not loaded."""
    found = [script or style for script, style in LOADED.findall(text)]
    return [address for address in found if re.match(r"(?:\w+:)?//", address)]


def test_what_a_page_loads_from_elsewhere_is_found() -> None:
    loads = '<script async src="https://a/b.js"></script><img alt="" src=//c/d.png><link rel="x" href="http://e/f.css">'
    assert elsewhere(loads) == ["https://a/b.js", "//c/d.png", "http://e/f.css"]
    assert elsewhere('<a href="https://a/b"> <script src="assets/a.js"> <link rel="icon" href="../a.png">') == []


def test_the_site_has_no_broken_link_and_loads_nothing_from_elsewhere(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("zensical", reason="extra docs")
    assert SITE.build(tmp_path / "site") == 0, capfd.readouterr()
    built = tmp_path / "site" / "html"
    for link in ("docs/pictures/loop.svg", "docs/reference/values.html", "studies/tiny/results/claims.html"):
        assert (built / link).is_file(), link
    texts = {page.relative_to(built): page.read_text() for page in built.rglob("*.html")}
    assert {page: found for page, text in texts.items() if (found := elsewhere(text))} == {}
    drawn_by_a_server = 'class="(?:mermaid|arithmatex)'  # the theme fetches Mermaid for it
    assert [page for page, text in texts.items() if re.search(drawn_by_a_server, text)] == []
