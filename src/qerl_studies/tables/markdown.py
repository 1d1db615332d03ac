"""Tables of pages in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The lines of a table, without a line break at its end. In cells / stands for |, which would end them."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
