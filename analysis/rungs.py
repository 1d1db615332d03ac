"""Which numbers of operations of task=dag the bases of a design can learn from.

python analysis/rungs.py studies/dag-2026/rungs.yaml
"""

from qerl_bench.exits import guarded
from qerl_bench.gates.rungs import main

if __name__ == "__main__":
    guarded(main)
