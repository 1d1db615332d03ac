"""Gather runs, unfinished ones too, into a study that can be committed.

python analysis/collect.py runs/ --out figures/
"""

from qerl_bench.study.command import main
from qerl_bench.study.script import guarded

if __name__ == "__main__":
    guarded(main)
