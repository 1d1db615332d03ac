"""Gather runs, unfinished ones too, into a study that can be committed.

python analysis/collect.py runs/ --out figures/
"""

from qerl_bench.exits import guarded
from qerl_bench.study.command import main

if __name__ == "__main__":
    guarded(main)
