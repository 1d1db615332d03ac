"""The rule by which free memory becomes the tokens of a micro-batch; `memory_plan.py` measures what it needs, and
`estimate/memory.py` counts it. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_TOKENS = 32_768  # four times what keeps a large GPU busy
USABLE = 0.85  # of the free memory; the rest is for fragments and for an estimate that is too low
RECORDED_PASS = 12 * 2**30  # bytes: of the largest model that is recorded, 8,192 tokens, which keep an H100 busy
POOL_SPARE = 0.125  # of the largest recorded pass, so that one a little larger needs no new pool
ADAM_BYTES = 8  # of each trained number: both moments in FP32
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What was measured, in bytes, and the tokens of a micro-batch that follow from it."""

    free: int  # on the GPU, before the first update, as far as it is this run's share
    fixed: int  # a pass of no tokens: gradients, buffers, and the optimizer's states if they are still to be made
    per_token: int
    micro_batch_tokens: int
    recorded: bool

    @classmethod
    def of(cls, peaks: dict[int, int], free: int, states: int, least: int | None = None) -> MemoryPlan:
        """From the peaks (bytes) of two passes by their tokens, the free memory, and the states still to be made.

        `least` are the tokens of the smallest pass that can be recorded, None if none can. A recording needs its pool,
        and beside it a pass that warms up, or one of a shape that is not recorded.
        """
        (few, low), (many, high) = sorted(peaks.items())
        per_token = max(1, (high - low) // (many - few))
        fixed = max(0, low - few * per_token) + states
        room = USABLE * free - fixed
        recordable = int(min(room / (2 + POOL_SPARE), RECORDED_PASS) // per_token)
        recorded = least is not None and recordable >= least
        fits = recordable if recorded else int(room // per_token)
        tokens = min(MOST_TOKENS, fits // 1024 * 1024 if fits > 1024 else max(1, fits))
        if recorded and least is not None:
            tokens = max(tokens, least)
        return cls(free=free, fixed=fixed, per_token=per_token, micro_batch_tokens=tokens, recorded=recorded)

    def used(self, tokens: float) -> float:
        """Bytes of micro-batches of so many tokens."""
        return self.fixed + (2 + POOL_SPARE if self.recorded else 1) * self.per_token * tokens

    def __str__(self) -> str:
        times = 2 + POOL_SPARE if self.recorded else 1
        used = self.used(self.micro_batch_tokens)
        twice = f", {times:g} times where passes are recorded," if self.recorded else ""
        return (
            f"micro-batches of {self.micro_batch_tokens:,} tokens: {self.per_token / 2**20:.2f} MiB a token{twice} and "
            f"{self.fixed / GIB:.2f} GiB make {used / GIB:.2f} GiB of {self.free / GIB:.2f} GiB free"
        )
