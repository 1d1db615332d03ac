"""The page of the precision budgets of three released models: shares of each part, with and without rounded keys.

    python studies/budget-2026/budget.py

Reads data/NAME/record.json and data/NAME/budget.csv, what `qerl-bench probe ... budget=` wrote of a model (budget.json
without its cells, and the cells), and data/NAME/keys.csv, what key_biases.py printed; writes results/shares.md and
results/shares.svg.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from qerl_core.checks import require
from qerl_core.exits import guarded
from qerl_core.process.arguments import KeyValueParser
from qerl_core.rundir.durable import write_atomically
from qerl_core.statistics import Estimate, mean_ci
from qerl_studies.figures.probe import ProbePanel, in_panels
from qerl_studies.figures.style import save
from qerl_studies.probes.budget import NAMES, NOTHING, Cells, alone, cell_name, measures_of, over_copies, shapley, whole
from qerl_studies.probes.budget_page import read_table
from qerl_studies.tables.markdown import markdown_table

HERE = Path(__file__).resolve().parent
MODELS = {  # folders of data/, and what the page calls them
    "smollm2": "SmolLM2-135M",
    "05b": "Qwen2.5-Coder-0.5B",
    "05b-gptq": "Qwen2.5-Coder-0.5B, GPTQ",
    "15b": "Qwen2.5-Coder-1.5B",
    "15b-four-six": "Qwen2.5-Coder-1.5B, four-six",
}
WITHOUT_KEYS = tuple(name for name in NAMES if name != "keys")
DRAWN = ("smollm2", "05b", "15b")  # GPTQ differs in its weights alone
SETTINGS = (("All parts", NAMES), ("Keys in 16 bits", WITHOUT_KEYS))


def main(arguments: list[str] | None = None) -> None:
    KeyValueParser(__doc__).parse_args(arguments)
    records = {name: read(HERE / "data" / name) for name in MODELS}
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    write_atomically(results / "shares.md", page(records))
    save(figure({name: records[name] for name in DRAWN}), results / "shares")
    print(results / "shares.md", results / "shares.svg", sep="\n")


def read(folder: Path) -> dict[str, Any]:
    """A record with its cells. Raises ConfigError unless each copy has all of them."""
    record = json.loads((folder / "record.json").read_text())
    copies = read_table((folder / "budget.csv").read_text())
    count = 2 ** len(record["parts"])
    lacking = [copy for copy, cells in copies.items() if len(cells) != count]
    require(bool(copies) and not lacking, f"{folder}: copies {', '.join(lacking)} have not {count} cells: measure on")
    return {**record, "copies": copies}


def page(records: Mapping[str, Mapping[str, Any]]) -> str:
    lines = ["# Shares of each part, in nats a token (right answers: of 1)", "Brackets are 95 % intervals over copies."]
    for measure, title in measures_of(next(iter(records.values()))["copies"]).items():
        lines.append(f"## {title[0].upper()}{title[1:]}")
        for setting, parts in SETTINGS:
            lines += [f"{setting}:", table(records, parts, measure)]
    lines += ["## KL on the texts, each part alone", singles(records)]
    lines += ["## KL of rounded keys with their biases, and with these kept apart", key_biases()]
    return "\n\n".join(lines) + "\n"


def table(records: Mapping[str, Mapping[str, Any]], parts: Sequence[str], measure: str) -> str:
    """A row for each model: with nothing rounded, the rise where all of `parts` are, and their Shapley shares."""
    rows = []
    for name, record in records.items():
        before = mean_ci([one[NOTHING][measure] for one in record["copies"].values()])
        shares = over_copies(record, shapley, measure, parts).values()
        rows.append([MODELS[name], before.text("{:.3f}".format), *map(said, (whole(record, measure, parts), *shares))])
    return markdown_table(["", "nothing rounded", "rise", *parts], rows)


def singles(records: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for each model: KL with one part rounded and nothing else."""
    rows = []
    for name, record in records.items():
        rows.append([MODELS[name], *map(said, over_copies(record, alone, "texts_kl", NAMES).values())])
    return markdown_table(["", *NAMES], rows)


def key_biases() -> str:
    """A row for each model, kind and part: KL over copies, and in keys how many times less it is with biases apart."""
    rows = []
    for file in sorted((HERE / "data").glob("*/keys.csv")):
        kl = pd.read_csv(file).pivot(index="copy", columns=["kind", "rounded"], values="kl")
        for kind, part in kl.columns:
            ratio = "-"
            if part.endswith("apart"):
                times = mean_ci(np.log(kl[kind, "keys"] / kl[kind, part]))
                ratio = "{:,.0f} [{:,.0f}, {:,.0f}]".format(*np.exp([times.value, times.low, times.high]))
            rows.append([MODELS[file.parent.name], kind, part, mean_ci(kl[kind, part]).text("{:.2g}".format), ratio])
    return markdown_table(["", "kind", "rounded", "KL", "times less with biases apart"], rows)


def in_per_cent(cells: Cells, parts: Sequence[str], measure: str) -> dict[str, float]:
    """Shapley shares in per cent of the rise of this copy."""
    rise = cells[cell_name(parts)][measure] - cells[NOTHING][measure]
    return {part: 100 * share / rise for part, share in shapley(cells, parts, measure).items()}


def figure(records: Mapping[str, Mapping[str, Any]]) -> Any:
    panels = []
    for title, parts in SETTINGS:
        lines = {}
        for name, record in records.items():
            shares = over_copies(record, in_per_cent, "texts_kl", parts)
            lines[MODELS[name]] = [(one.value, one.low, one.high) for one in shares.values()]
        panels.append(ProbePanel(title=title, axis="", at=parts, lines=lines, label="% of the KL", apart=len(parts)))
    drawn = in_panels(
        panels, "Shapley shares of KL on the texts, each of the whole of its copy; 95 % over three copies."
    )
    reach = [ax.get_ylim() for ax in drawn.axes[: len(panels)]]
    for ax in drawn.axes[: len(panels)]:  # equal heights are equal shares
        ax.set_ylim(min(low for low, _ in reach), max(high for _, high in reach))
    return drawn


def said(one: Estimate) -> str:
    return one.text("{:+.3f}".format)


if __name__ == "__main__":
    guarded(main)
