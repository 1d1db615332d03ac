"""Noise minus none, in pairs: reward and entropy by training step, one column per weight format.

python analysis/fig_aqn.py runs/ --out figures/
"""

from qerl_bench.commands.exits import guarded
from qerl_bench.studies.figures.curves import ENTROPY, REWARD, noise_curves
from qerl_bench.studies.figures.script import read_study, write_figure


def main(arguments: list[str] | None = None) -> None:
    study, options = read_study(arguments, __doc__, ["quant.", "quantizer.", "aqn.name"], unfinished=True)
    write_figure(noise_curves(study.with_one_schedule(), [REWARD, ENTROPY]), options, "aqn")


if __name__ == "__main__":
    guarded(main)
