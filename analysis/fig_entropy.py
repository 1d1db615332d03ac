"""Entropy by training step, as sampled and with noise off: each weight format minus BF16, in pairs.

python analysis/fig_entropy.py runs/ --out figures/
"""

from qerl_bench.commands.exits import guarded
from qerl_bench.studies.figures.curves import CLEAN, ENTROPY, format_curves
from qerl_bench.studies.figures.script import read_study, write_figure


def main(arguments: list[str] | None = None) -> None:
    study, options = read_study(arguments, __doc__, ["quant.", "quantizer."], unfinished=True)
    noisy = any(run.option("aqn.name") != "none" for run in study.runs)  # without noise the two are the same
    write_figure(format_curves(study, [ENTROPY, CLEAN] if noisy else [ENTROPY]), options, "entropy")


if __name__ == "__main__":
    guarded(main)
