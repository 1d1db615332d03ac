"""The pages of the first look, from what was packed.

    python studies/real-2026/first_look.py

For each folder of first-look/data: probes.md and its figures, as `qerl-bench gates` writes them, and
answers.md, which asks what the first page could hide: few bad texts, answers that were cut off, the
limit of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from qerl_bench.commands.exits import guarded
from qerl_bench.process.arguments import KeyValueParser
from qerl_bench.rundir.run_dir import write_atomically
from qerl_bench.statistics import Estimate, mean_ci
from qerl_bench.studies.conduct.packing import ANSWERS
from qerl_bench.studies.design.sessions import read_probes
from qerl_bench.studies.figures.style import save
from qerl_bench.studies.probes.numbers import PARTS
from qerl_bench.studies.probes.over_units import Record, entropy_of_part, measured_in
from qerl_bench.studies.probes.page import rows_of
from qerl_bench.studies.report.probe_page import bracketed, figures, markdown, points, times

HERE = Path(__file__).resolve().parent / "first-look"
LIMITS = (512, 640, 768)  # tokens
GARBLED = 1.0  # nats a token, in the mean of an answer


def main(arguments: list[str] | None = None) -> None:
    KeyValueParser(__doc__).parse_args(arguments)
    for folder in sorted((HERE / "data").iterdir()):
        out = HERE / "results" / folder.name
        out.mkdir(parents=True, exist_ok=True)
        probes = read_probes(folder)
        write_atomically(out / "probes.md", markdown(probes) or "")
        for name, figure in figures(probes).items():
            save(figure, out / name)
        write_atomically(out / "answers.md", answers_page(pd.read_parquet(folder / ANSWERS), probes))
        print(out)


def answers_page(answers: Any, probes: Sequence[Record]) -> str:
    sampled = answers[answers["temperature"] == 1]
    each = sampled["entropy"] / sampled["tokens"]
    cuts = {
        "all answers": by_token(sampled),
        "right ones": by_token(sampled[sampled["correct"]]),
        "wrong ones": by_token(sampled[~sampled["correct"]]),
        "finished ones": by_token(sampled[sampled["finished"]]),
        f"of at most {GARBLED:g} nat a token": by_token(sampled[each <= GARBLED]),
        "median answer": by_answer(sampled),
    }
    temperatures = sorted(answers["temperature"].unique())
    parts = [
        "# Answers",
        "## Entropy at temperature 1, over that of BF16 on the same copy",
        rows_of(
            ["quant", *cuts], [[quant, *(times(ratio(of, quant)) for of in cuts.values())] for quant in others(answers)]
        ),
        "## Entropy at temperature 1 by tenth of a completion, minus that of BF16, nats a token",
        rows_of(
            ["quant", *(f"tenth {part + 1}" for part in range(PARTS)), "last minus first"],
            [[quant, *in_nats(probes, quant)] for quant in others(answers)],
        ),
        "## Right, of finished answers",
        rows_of(
            ["quant", "temperature", "difference to BF16, points"],
            [
                [quant, f"{at:g}", points(gap(answers[answers["temperature"] == at], quant), 1, signed=True)]
                for quant in others(answers)
                for at in temperatures
            ],
        ),
        "## Greedy answers that a limit of tokens would cut off",
        rows_of(
            ["quant", *(f"{limit}" for limit in LIMITS)],
            [
                [quant, *(f"{cut_off(answers, quant, limit):.1%}" for limit in LIMITS)]
                for quant in ("bf16", *others(answers))
            ],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def in_nats(probes: Sequence[Record], quant: str) -> list[str]:
    """The rise in each tenth, and how much larger it is in the last than in the first."""
    units = measured_in(quant, probes)
    rises = np.array(
        [
            [entropy_of_part(part)(one, quant) - entropy_of_part(part)(one, "bf16") for part in range(PARTS)]
            for one in units
        ]
    )  # (copies, tenths)
    slope = mean_ci((rises[:, -1] - rises[:, 0]).tolist())
    return [*(f"{rise:+.3f}" for rise in rises.mean(0)), bracketed(slope, "{:+.3f}")]


def others(answers: Any) -> list[str]:
    return [quant for quant in answers["quant"].unique() if quant != "bf16"]


def by_token(answers: Any) -> Any:
    """Nats a token, (copies, formats)."""
    sums = answers.groupby(["base", "quant"])[["entropy", "tokens"]].sum()
    return (sums["entropy"] / sums["tokens"]).unstack()


def by_answer(answers: Any) -> Any:
    """The median answer's nats a token, (copies, formats)."""
    each = answers.assign(each=answers["entropy"] / answers["tokens"])
    return each.groupby(["base", "quant"])["each"].median().unstack()


def ratio(of: Any, quant: str) -> Estimate:
    pairs = of[[quant, "bf16"]].dropna()
    return mean_ci(np.log(pairs[quant] / pairs["bf16"]).tolist())


def gap(answers: Any, quant: str) -> Estimate:
    right = answers[answers["finished"]].groupby(["base", "quant"])["correct"].mean().unstack()
    pairs = right[[quant, "bf16"]].dropna()
    return mean_ci((pairs[quant] - pairs["bf16"]).tolist())


def cut_off(answers: Any, quant: str, limit: int) -> float:
    greedy = answers[(answers["temperature"] == 0) & (answers["quant"] == quant)]
    return float(((greedy["tokens"] > limit) | ~greedy["finished"]).mean())


if __name__ == "__main__":
    guarded(main)
