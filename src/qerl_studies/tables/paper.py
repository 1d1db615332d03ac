"""Tables for a paper: LaTeX (booktabs), Markdown, or CSV, with a caption that says what the intervals are.

CSV has the numbers as they are, the others texts of a few digits; pandas writes LaTeX.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pandas as pd

from qerl_studies.tables.markdown import markdown_table

Format = Literal["latex", "markdown", "csv"]
ENDINGS: dict[Format, str] = {"latex": "tex", "markdown": "md", "csv": "csv"}
SIGNS = {"→": r"$\rightarrow$", "σ": r"$\sigma$", "×": r"$\times$", "±": r"$\pm$", "−": "$-$", "≤": r"$\leq$"}

LINE, LONG = 90, 20  # letters of a line of 5.5 in, and of a column that need not be wrapped
NUMERIC = set("0123456789+-.,[]e ×±%")


@dataclass(frozen=True)
class Table:
    """`numbers` for programs and `shown`, the same as texts, for people."""

    name: str  # of the file, and of the label in LaTeX
    numbers: pd.DataFrame
    shown: pd.DataFrame
    caption: str

    def text(self, kind: Format) -> str:
        if kind == "csv":
            return self.numbers.to_csv(index=False)
        if kind == "markdown":
            rows = self.shown.astype(str).to_numpy().tolist()
            return f"{markdown_table([*map(str, self.shown.columns)], rows)}\n\n{self.caption}\n"
        return _latex(self.shown, self.caption, self.name)


def add_format(parser: argparse.ArgumentParser, default: Format | None = "csv") -> None:
    """--format, of the table that the script writes."""
    also = f"default: {default}" if default else "none unless given"
    parser.add_argument("--format", choices=tuple(ENDINGS), default=default, help=f"of the table ({also})")


def write_table(table: Table, kind: Format, out: Path) -> Path:
    """Write OUT/NAME.tex, .md or .csv; returns its path."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"{table.name}.{ENDINGS[kind]}"
    file.write_text(table.text(kind))
    return file


def _latex(frame: pd.DataFrame, caption: str, label: str) -> str:
    """A floating table in small print; numbers are to the right, an interval is never broken in two."""
    style = frame.style.hide(axis="index").format(escape="latex")
    style.format_index(escape="latex", axis=1)
    text: str = style.to_latex(  # type: ignore  # pandas annotates format() with a base class
        hrules=True,
        position="t",
        position_float="centering",
        column_format="".join(_columns(frame)),
        caption=_escaped(caption),
        label=f"tab:{label}",
    )
    for sign, command in SIGNS.items():
        text = text.replace(sign, command)
    text = re.sub(r"(\[[^\] ]+,) ([^\] ]+\])", r"\1~\2", text)
    text = text.replace("\\centering\n", "\\centering\n\\footnotesize\n")
    return f"% needs \\usepackage{{array,booktabs}}\n{text}"


def _columns(frame: pd.DataFrame) -> list[str]:
    """The kind of each column; where lines are too long for a page, the longest columns are wrapped."""
    widths = {name: max(len(text) for text in [str(name), *frame[name].astype(str)]) for name in frame.columns}
    wrapped = {name for name, width in widths.items() if width > LONG and sum(widths.values()) > LINE}
    room = LINE - sum(widths[name] + 2 for name in widths.keys() - wrapped)
    parts = {
        name: widths[name] / sum(widths[each] for each in wrapped) * max(room, LINE // 2) / LINE for name in wrapped
    }
    return [
        rf">{{\raggedright\arraybackslash}}p{{{0.9 * parts[name]:.2f}\linewidth}}" if name in wrapped
        else "r" if all(set(text) <= NUMERIC for text in frame[name].astype(str)) else "l"
        for name in frame.columns
    ]  # fmt: skip


def _escaped(text: str) -> str:
    for letter in "&%#_":
        text = text.replace(letter, f"\\{letter}")
    return text
