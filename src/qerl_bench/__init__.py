"""QeRL-Bench: does quantization noise help reinforcement learning of language models, and what does it cost?"""

__version__ = "0.1.0"
