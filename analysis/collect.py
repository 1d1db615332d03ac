"""Gather runs into a study that can be committed; the same as `qerl-bench collect`.

python analysis/collect.py runs/ --out figures/
"""

from qerl_bench.study.command import main
from qerl_bench.study.script import guarded

if __name__ == "__main__":
    guarded(main)
