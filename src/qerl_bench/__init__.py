"""QeRL-Bench: does quantization noise help reinforcement learning of language models, and what does it cost?"""

from qerl_bench.api import claims, effects, figure, load_runs, run
from qerl_core import __version__

__all__ = ["__version__", "claims", "effects", "figure", "load_runs", "run"]
