"""The table of docs/models.md: every architecture of `builds` in every weight format, by `cell.outcome`.

python -m tests.models.matrix                   # writes docs/models.csv and the table in docs/models.md
python -m tests.models.matrix gemma2 qwen3_moe  # shows these, writes nothing
python -m tests.models.matrix --check           # all cells against docs/models.csv; exit code 1 if one differs
"""

from __future__ import annotations

import csv
import os
import re
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import asdict, fields
from multiprocessing import get_context
from pathlib import Path

import torch
import transformers

from qerl_studies.tables.markdown import markdown_table
from tests.models import builds
from tests.models.cell import Outcome, outcome

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "models.csv"
PAGE = ROOT / "docs" / "models.md"
MARKS = ("<!-- table of python -m tests.models.matrix -->\n", "<!-- end of table -->")
FORMATS = ("nvfp4", "mxfp4", "nf4", "fp8", "mxfp8", "int8", "int4", "bf16")


def row(architecture: str) -> list[Outcome]:
    """The cells of one architecture, the slow part of the program."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        checkpoint = builds.build(architecture, Path(folder) / architecture)
        return [outcome(architecture, quant, checkpoint, Path(folder)) for quant in FORMATS]


def compute(architectures: list[str]) -> list[Outcome]:
    """All cells, a process per core."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn")) as pool:
        cells = []
        for found in pool.map(row, architectures):
            cells += found
            print(*("  ".join(filter(None, asdict(cell).values())) for cell in found), sep="\n", flush=True)
    return cells


def read() -> list[Outcome]:
    with open(TABLE, newline="") as file:
        return [Outcome(**record) for record in csv.DictReader(file)]


def comparable(cell: Outcome) -> dict[str, str]:
    """What must be equal on every machine: all but the numbers in a reason."""
    return asdict(cell) | {"reason": re.sub(r"\d[\d.e+-]*", "#", cell.reason)}


def write(cells: list[Outcome]) -> None:
    with open(TABLE, "w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Outcome)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(cell) for cell in cells)
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    PAGE.write_text(before + MARKS[0] + render(cells) + MARKS[1] + rest.partition(MARKS[1])[2])


def render(cells: list[Outcome]) -> str:
    """The table of docs/models.md: a line per architecture."""
    heads = ["architecture", *FORMATS, "noisy norms per block", "padding", "recorded decoding", "remark"]
    lines: list[list[str]] = []
    for architecture in dict.fromkeys(cell.architecture for cell in cells):
        of_format = {cell.quant: cell for cell in cells if cell.architecture == architecture}
        first = next((cell for cell in of_format.values() if cell.verdict == "works"), None)
        verdicts = [of_format[quant].verdict for quant in FORMATS]
        columns = ["", "", ""]
        if first is not None:
            norms, blocks = map(int, first.norms.split("/"))
            columns = [f"{norms / blocks:g}", first.padding, "yes" if first.decoding == "recorded" else "no"]
        remarks = dict.fromkeys(
            part
            for cell in of_format.values()
            for part in (cell.options and f"with `{cell.options}`", cell.reason)
            if part
        )
        lines.append([f"`{architecture}`", *verdicts, *columns, "; ".join(remarks)])
    return markdown_table(heads, lines) + "\n"


def main(words: list[str]) -> int:
    chosen = [word for word in words if word != "--check"]
    cells = compute(chosen or builds.known())
    if words == []:
        write(cells)
    if "--check" not in words:
        return 0
    committed = {(cell.architecture, cell.quant): comparable(cell) for cell in read()}
    different = [cell for cell in cells if comparable(cell) != committed.get((cell.architecture, cell.quant))]
    for cell in different:
        print(f"differs from {TABLE.name}: {cell}", file=sys.stderr)
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
