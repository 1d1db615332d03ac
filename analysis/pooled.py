"""The effect of an arm over the bases of several studies.

python analysis/pooled.py studies/shortcut-2026-{again,doses} --arm nvfp4-noise --control nvfp4
"""

from qerl_bench.exits import guarded
from qerl_bench.gates.pooled import main

if __name__ == "__main__":
    guarded(main)
