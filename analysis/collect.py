"""Gather runs, unfinished ones too, into a study that can be committed.

python analysis/collect.py runs/ --out figures/
"""

from qerl_bench.commands.collect import main
from qerl_bench.commands.exits import guarded

if __name__ == "__main__":
    guarded(main)
