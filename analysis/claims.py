"""Report what finished runs say about each claim of the QeRL paper.

python analysis/claims.py runs/ --out figures/
"""

from qerl_bench.claims.command import main
from qerl_bench.exits import guarded

if __name__ == "__main__":
    guarded(main)
