"""Builds the documentation site with Zensical: `make docs`, or `python docs/site.py` where Zensical is installed.

The site shows the Markdown files as they lie in the repository, so that a link between any two of them holds on GitHub
and on the site. Zensical wants all pages below one folder: they are copied to site/pages, with every file that a page
links to. The menu is docs/README.md: a section for each heading, an entry for each link of its tables.
Broken links and anchors are errors. Pages load nothing from a server: docs/worker.js takes the place of the one script
that Zensical's own would.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INDEX = ROOT / "docs" / "README.md"
LINK = re.compile(r"\]\(([^)\s#]+)[^)\s]*\)")
SHIM = re.compile(r'<script src="https://unpkg\.com/iframe-worker/shim"[^>]*>')
ENTRY = re.compile(r"^\| \[([^\]]+)\]\(([^)]+)\)", flags=re.MULTILINE)


@cache
def pages() -> list[Path]:
    """README.md and every page that links lead to from there."""
    found, new = [], [ROOT / "README.md"]
    while new:
        page = new.pop()
        found.append(page)
        new += [file for file in linked(page) if file.suffix == ".md" and file not in (*found, *new)]
    return sorted(found)


def linked(page: Path) -> list[Path]:
    """The files of the repository to which a page links, pictures included."""
    targets = [(page.parent / link).resolve() for link in LINK.findall(page.read_text()) if ":" not in link]
    return sorted({target for target in targets if target.is_file()})


def menu() -> list[dict[str, object]]:
    """The entries of docs/README.md, as Zensical's `nav`."""
    nav: list[dict[str, object]] = [{"Home": "README.md"}]
    for section in INDEX.read_text().split("\n## ")[1:]:
        entries = [{name: str(_place(link))} for name, link in ENTRY.findall(section)]
        nav.append({section.partition("\n")[0]: [*_children(entries)]})
    return nav


def _place(link: str) -> Path:
    return (INDEX.parent / link).resolve().relative_to(ROOT)


def _children(entries: list[dict[str, str]]) -> Iterator[dict[str, object]]:
    """An entry for the README.md of a folder becomes a group: its other pages, and the README.md of folders in it."""
    for entry in entries:
        ((name, place),) = entry.items()
        folder = (ROOT / place).parent
        inside = [page for page in pages() if _is_listed(page, folder) and page != ROOT / place]
        if Path(place).name != "README.md" or not inside:
            yield {name: place}
        else:
            titles = {page: page.read_text().partition("\n")[0].lstrip("# ") for page in inside}
            others = [{title: str(page.relative_to(ROOT))} for page, title in titles.items()]
            yield {name: [place, *others]}


def _is_listed(page: Path, folder: Path) -> bool:
    return page.parent == folder or (page.parent.parent == folder and page.name == "README.md")


def build(folder: Path) -> int:
    """Write the pages and the settings to `folder`, and the site to `folder`/html; returns Zensical's exit code."""
    shutil.rmtree(folder, ignore_errors=True)
    linked_to = {file for page in pages() for file in linked(page)}
    for file in {*pages(), *linked_to, ROOT / "docs" / "site.css"}:
        place = folder / "pages" / file.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)
    settings = (ROOT / "docs" / "zensical.toml").read_text()
    (folder / "zensical.toml").write_text(settings.replace("nav = []", f"nav = {_toml(menu())}"))
    code = subprocess.run([sys.executable, "-m", "zensical", "build", "--strict"], cwd=folder).returncode
    worker = f"<script>{(ROOT / 'docs' / 'worker.js').read_text()}"
    for page in (folder / "html").rglob("*.html"):
        page.write_text(SHIM.sub(lambda _: worker, page.read_text()))
    return code


def _toml(value: object) -> str:
    """A list of tables, and tables in lists, in TOML."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{json.dumps(key)} = {_toml(inner)}' for key, inner in value.items())} }}"
    return f"[{', '.join(map(_toml, value))}]" if isinstance(value, list) else json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    sys.exit(build(ROOT / "site"))
