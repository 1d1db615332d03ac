"""The pages of the first look, from what was packed.

    python studies/real-2026/first_look.py

For each folder of first-look/data: probes.md and its figures, as `qerl-bench gates` writes them, and
answers.md, which asks what the first page could hide: few bad texts, answers that were cut off, the
limit of tokens.
"""

from __future__ import annotations

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
from qerl_bench.studies.probes.page import rows_of
from qerl_bench.studies.report.probe_page import figures, markdown, points, times

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
        write_atomically(out / "answers.md", answers_page(pd.read_parquet(folder / ANSWERS)))
        print(out)


def answers_page(answers: Any) -> str:
    sampled = answers[answers["temperature"] == 1]
    each = sampled["entropy"] / sampled["tokens"]
    parts = [
        "# Answers",
        "## Entropy at temperature 1, over that of BF16 on the same copy",
        rows_of(
            ["quant", "all answers", "finished ones", f"of at most {GARBLED:g} nat a token", "median answer"],
            [
                [quant, *(times(ratio(of, quant)) for of in (
                    by_token(sampled), by_token(sampled[sampled["finished"]]), by_token(sampled[each <= GARBLED]),
                    by_answer(sampled),
                ))]
                for quant in others(answers)
            ],
        ),
        "## Right, of finished answers",
        rows_of(
            ["quant", "temperature", "difference to BF16, points"],
            [
                [quant, f"{at:g}", points(gap(answers[answers["temperature"] == at], quant), 1, signed=True)]
                for quant in others(answers)
                for at in sorted(answers["temperature"].unique())
            ],
        ),
        "## Greedy BF16 answers that a limit of tokens would cut off",
        rows_of([f"{limit}" for limit in LIMITS], [[f"{cut_off(answers, limit):.1%}" for limit in LIMITS]]),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


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


def cut_off(answers: Any, limit: int) -> float:
    greedy = answers[(answers["temperature"] == 0) & (answers["quant"] == "bf16")]
    return float(((greedy["tokens"] > limit) | ~greedy["finished"]).mean())


if __name__ == "__main__":
    guarded(main)
