"""One thread in processes that are forked, whose threads do not outlive the fork."""

from __future__ import annotations

import torch


def one_thread() -> None:
    """Set it only where the environment has not. After `torch.set_num_threads` each new thread of a forked process sets
    it again, which failed twice in forks of forks ("pool INTERNAL ASSERT FAILED", PyTorch 2.13); why is not known."""
    if torch.get_num_threads() > 1:
        torch.set_num_threads(1)
