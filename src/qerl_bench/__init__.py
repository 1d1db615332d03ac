"""QeRL-Bench: does quantization noise help reinforcement learning of language models, and what does it cost?"""

from qerl_core import __version__

__all__ = ["__version__"]
