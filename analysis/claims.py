"""Report what finished runs say about each claim of the QeRL paper.

python analysis/claims.py runs/ --out figures/
"""

from qerl_bench.commands.claims import main
from qerl_bench.commands.exits import guarded

if __name__ == "__main__":
    guarded(main)
