"""How noise goes into a model: the choices on which QeRL's paper, its released code and its readers differ.

One spec, the root key `noise`, for every schedule. `recipe=paper|repo|as_released` sets it together with a schedule.
Whether the norm scales are also *trained* (the released scripts do) is no matter of injection: see conf/lora.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from qerl_bench.checks import require

Item = TypeVar("Item")
CHOICES = {
    "norms": ("blocks", "blocks_final", "missed"),
    "cadence": ("run", "step", "batch", "group"),
    "site": ("rollout", "rollout_and_old_logprobs", "rollout_and_training"),
    "accumulate": ("none", "final", "all"),
    "add_dtype": ("float32", "bfloat16"),
}


@dataclass(frozen=True, kw_only=True)
class NoiseSpec:
    """What each choice means is said once, in conf/run.yaml; docs/aqn.md says who chose what."""

    norms: str
    relative: bool
    cadence: str
    prompts_per_draw: int
    site: str
    accumulate: str
    add_dtype: str

    def __post_init__(self) -> None:
        for key, choices in CHOICES.items():
            value = getattr(self, key)
            require(value in choices, f"noise.{key} must be one of {', '.join(choices)}, got {value!r}")
        require(isinstance(self.relative, bool), f"noise.relative must be true or false, got {self.relative!r}")
        whole = isinstance(self.prompts_per_draw, int) and not isinstance(self.prompts_per_draw, bool)
        require(
            whole and self.prompts_per_draw >= 1,
            f"noise.prompts_per_draw must be a whole number of at least 1, got {self.prompts_per_draw!r}",
        )
        require(
            self.site == "rollout" or self.one_draw,
            f"noise.site={self.site} repeats the sampler's noise in training, whose micro-batches mix prompts: "
            f"it needs one draw for the whole step, but noise.cadence={self.cadence}. Use noise.cadence=step, or "
            "noise.site=rollout",
        )

        require(
            self.accumulate == "none" or self.cadence != "run",
            f"noise.cadence=run keeps one draw for the whole run, so nothing can accumulate: got "
            f"noise.accumulate={self.accumulate}. Use noise.accumulate=none",
        )

    @property
    def one_draw(self) -> bool:
        """Whether all prompts of a step share one draw, so that training can repeat it."""
        return self.cadence in ("run", "step")

    def draws(self, prompts: Sequence[Item], drawn: int) -> Iterator[tuple[int, list[Item]]]:
        """The prompts of one step, in order, cut into those that share a draw of noise, each with the draw's number.

        `drawn` draws have been made in this step before, for prompts that dynamic sampling replaces.
        """
        size = {"batch": self.prompts_per_draw, "group": 1}.get(self.cadence)
        if size is None:
            yield from [(0, list(prompts))] if prompts else []
            return
        for number, start in enumerate(range(0, len(prompts), size), start=drawn):
            yield number, list(prompts[start : start + size])
