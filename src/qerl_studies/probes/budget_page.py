"""The page of a precision budget: what was asked, the shares of each part in tables, and one figure."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from typing import Any

from matplotlib.figure import Figure

from qerl_core.statistics import Estimate
from qerl_studies.figures.probe import ProbePanel, in_panels
from qerl_studies.probes.budget import MEASURES, NOTHING, alone, last, measures_of, over_copies, shapley, whole
from qerl_studies.tables.markdown import markdown_table

DRAWN = ("texts_kl", "texts_entropy", "own_kl", "own_entropy")  # measures of the figure
COLUMNS = ("copy", "cell", *MEASURES, "tokens")  # of budget.csv


def markdown(record: Mapping[str, Any]) -> str:
    """The page; `record` is what budget.json holds."""
    lines = [f"# Precision budget of {record['model']}", asked(record), "## The whole", markdown_table(*ends(record))]
    for measure, title in measures_of(record["copies"]).items():
        lines += [f"## {title[0].upper()}{title[1:]}", markdown_table(*shares(record, measure))]
    return "\n\n".join(lines) + "\n"


def asked(record: Mapping[str, Any]) -> str:
    """What was measured, of what, and what the numbers are."""
    copies = len(record["copies"])
    several = f"Intervals are 95 % over {copies} copies of the file." if copies > 1 else "One copy: no intervals."
    environment, (plain, few) = record["environment"], record["formats"]
    return (
        f"{2 ** len(record['parts'])} cells: each of {', '.join(record['parts'])} in {plain} or {few}. "
        f"{record['questions']} questions of task={record['task']}, {record['samples']} samples "
        f"each at temperature 1, at most {record['max_completion_tokens']} tokens, on "
        f"{environment['gpu'] or environment['cpu']}. The texts are the samples of the cell in which nothing is "
        "rounded. KL on the texts is from it to a cell, on own samples from the cell to it; both, and entropies, are "
        f"in nats a token, over the whole vocabulary; acceptance is of one token that a cell drafts for it. {several}"
    )


def ends(record: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """A row for each measure: nothing rounded, everything rounded, the rise."""
    lines = []
    for measure, title in measures_of(record["copies"]).items():
        rise = whole(record, measure)
        start = sum(cells[NOTHING][measure] for cells in record["copies"].values()) / len(record["copies"])
        lines.append([title, f"{start:.4f}", f"{start + rise.value:.4f}", said(rise)])
    return ["", "nothing rounded", "everything rounded", "rise"], lines


def shares(record: Mapping[str, Any], measure: str) -> tuple[list[str], list[list[str]]]:
    """A row for each part, the largest share of the rise or fall first, and one of their sum."""
    found = {of: over_copies(record, of, measure) for of in (shapley, alone, last)}
    rise = whole(record, measure)
    order = sorted(record["parts"], key=lambda part: found[shapley][part].value, reverse=rise.value >= 0)
    lines = []
    for part in order:
        share = found[shapley][part]
        per_cent = f"{share.value / rise.value:.0%}" if rise.value else "-"
        lines.append([part, said(share), per_cent, said(found[alone][part]), said(found[last][part])])
    sums = [f"{sum(one.value for one in found[of].values()):+.4f}" for of in (shapley, alone, last)]
    lines.append(["sum", sums[0], "100%" if rise.value else "-", *sums[1:]])
    return ["part", "Shapley share", "of the rise or fall", "alone", "last"], lines


def figure(record: Mapping[str, Any]) -> Figure:
    """The Shapley shares of four measures, part by part."""
    parts, name = record["parts"], record["formats"][1]
    panels = [
        ProbePanel(
            title=MEASURES[measure][0].upper() + MEASURES[measure][1:],
            axis="",
            at=parts,
            lines={name: [(one.value, one.low, one.high) for one in over_copies(record, shapley, measure).values()]},
            label="nats a token",
            apart=len(parts),
        )
        for measure in DRAWN
    ]
    copies = len(record["copies"])
    note = f"Shapley shares, with 95 % intervals over {copies} copies." if copies > 1 else "Shapley shares of one copy."
    return in_panels(panels, note)


def table(record: Mapping[str, Any]) -> str:
    """budget.csv: a row for each cell of each copy."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_rows(record))
    return text.getvalue()


def _rows(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for copy, cells in record["copies"].items():
        for cell, numbers in cells.items():
            yield {"copy": copy, "cell": cell, **{name: f"{numbers[name]:.6g}" for name in COLUMNS[2:]}}


def read_table(text: str) -> dict[str, dict[str, dict[str, float]]]:
    """`copies` of a record, from budget.csv, which earlier had no acceptance."""
    copies: dict[str, dict[str, dict[str, float]]] = {}
    for row in csv.DictReader(io.StringIO(text)):
        numbers = {name: float(row[name]) for name in COLUMNS[2:] if name in row}
        copies.setdefault(row["copy"], {})[row["cell"]] = numbers
    return copies


def said(one: Estimate) -> str:
    """A number with its sign, and its interval if copies differ."""
    return one.text("{:+.4f}".format)
