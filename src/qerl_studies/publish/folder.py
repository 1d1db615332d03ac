"""What both kinds of published folders share: who and where, a search for private things, pages, a list of files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

from qerl_core.checks import ConfigError, require
from qerl_studies.runs.private import Private
from qerl_studies.tables.templates import templates

HOMEPAGE = "https://arxiv.org/abs/2510.11696"  # what the numbers are about; the project itself is named, not linked
TEXT_FILES = (".json", ".jsonl", ".yaml", ".md", ".csv")


@dataclass(frozen=True)
class Names:
    """How the publication is called, who made it, under which licence, and its place at the hub, if it has one."""

    name: str
    author: str
    license: str | None
    repo: str | None


def check_target(out: Path, source: Path) -> None:
    """Raise ConfigError unless `out` is free and apart from what is published."""
    require(not out.exists(), f"{out} exists: choose another folder, out=DIR, or delete it")
    inside = source.resolve() in (out.resolve(), *out.resolve().parents)
    require(not inside, f"{out} lies in {source}, whose runs it would be counted among: choose another folder, out=DIR")


def check_private(folder: Path, private: Private) -> None:
    """Raise ConfigError, naming file and kind, if a path, a name or a key is left in a file of `folder`."""
    for path in sorted(folder.rglob("*")):
        if path.suffix in TEXT_FILES:
            kinds = private.found(_text(path))
        elif path.suffix == ".parquet":
            kinds = [kind for text in _texts(path) for kind in private.found(text)]
        else:
            continue
        if kinds:
            raise ConfigError(
                f"{path.relative_to(folder)} would show {', '.join(dict.fromkeys(kinds))}, which nothing here could "
                "take out. Nothing was written. Leave the run out, or repeat it without that value"
            )


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text in UTF-8, which its name says: leave it out, or make it again") from error


def _texts(path: Path) -> list[str]:
    """The distinct texts of a table."""
    table = parquet.read_table(path)
    columns = [table.column(name).combine_chunks() for name in table.column_names]
    texts: set[str] = set()
    for column in columns:
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
            texts |= {text for text in column.unique().cast(pa.string()).to_pylist() if text}
    return sorted(texts)


def rendered(template: str, **values: Any) -> str:
    """A page of templates/."""
    return templates("qerl_studies.publish").get_template(template).render(values)


def listing(folder: Path) -> list[str]:
    """The files of a folder with their sizes."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = [f"{path.stat().st_size:>12,} bytes  {path.relative_to(folder)}" for path in files]
    return [f"{folder}:", *lines]
