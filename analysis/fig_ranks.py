"""Reward and held-out accuracy against LoRA rank, and what each rank does minus rank 32 in the same format, in pairs.

python analysis/fig_ranks.py runs/ --out figures/
"""

from matplotlib.figure import Figure

from qerl_bench.figures.against import against, same_but
from qerl_bench.figures.paired import REWARD_MEAN, SAMPLED
from qerl_bench.study.load import Run
from qerl_bench.study.naming import format_rows
from qerl_bench.study.script import draw_figure, guarded
from qerl_bench.study.select import arms

KEY, USUAL = "lora.rank", 32


def main(arguments: list[str] | None = None) -> None:
    draw_figure(arguments, __doc__, "ranks", ["quant.", "quantizer.", "lora.rank", "lora.alpha"], draw)


def draw(runs: list[Run]) -> Figure:
    rows = format_rows(arms(runs, ["quant.name", "aqn.name", KEY, "lora.alpha"]), axis=KEY)
    control = same_but(rows, KEY, USUAL, "label")
    alphas = {row["lora.alpha"] for row in rows}
    alpha = (
        f"LoRA alpha {alphas.pop():g}." if len(alphas) == 1 else "LoRA alpha differs with the rank, and so the step."
    )
    return against(rows, KEY, [REWARD_MEAN, SAMPLED], "LoRA rank", control, f"minus rank {USUAL}", alpha)


if __name__ == "__main__":
    guarded(main)
