"""`rollout.lag`: sampling with what was trained some steps ago, repeatable to the bit, as real asynchrony is not.

The engine samples as always. Only the numbers in the trained tensors are others meanwhile, put there in place, since
bases in other formats share the tensors and recordings know their addresses. Left out: stale noise; a step's noise is
its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

Numbers = list[torch.Tensor]  # of each trained tensor, in the order of `Policy.trainable`


class Lag:
    """What was in the tensors `trained` before each of the last `steps` steps, fewer at the beginning of a run."""

    def __init__(self, trained: Sequence[torch.Tensor], steps: int) -> None:
        self.trained, self.steps = trained, steps
        self.past: deque[Numbers] = deque(maxlen=steps)  # the oldest first

    @contextmanager
    def sampling(self) -> Iterator[dict[str, float]]:
        """Context, once in each step, in which the tensors have the numbers of `steps` steps ago, or the first ones.

        Gives the metrics LAGGED. Written past autograd, since no backward pass spans it.
        """
        if self.steps == 0:
            yield {}
            return
        present = [tensor.detach().clone() for tensor in self.trained]
        try:
            self._write(self.past[0] if self.past else present)
            yield {"rollout/lag": len(self.past)}
        finally:
            self._write(present)
        self.past.append(present)

    def state(self) -> list[Numbers]:
        """What the next steps sample with, for a checkpoint."""
        return list(self.past)

    def restore(self, state: Sequence[Numbers]) -> None:
        self.past.extend(state)

    def _write(self, numbers: Numbers) -> None:
        for tensor, value in zip(self.trained, numbers, strict=True):
            tensor.data.copy_(value)
