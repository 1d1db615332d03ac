"""How noise goes into a model: the choices on which QeRL's paper, its released code and its readers differ.

One spec, the root key `inject`, for every schedule. `recipe=paper|repo|shipped` sets it together with a schedule.
Whether the norm scales are also *trained* (the released scripts do) is no matter of injection: see conf/lora.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from qerl_bench.errors import require

Item = TypeVar("Item")
CHOICES = {
    "norms": ("blocks", "blocks_final", "missed"),
    "cadence": ("run", "step", "batch", "group"),
    "site": ("sampler", "old", "trainer"),
    "accumulate": ("none", "final", "all"),
    "add_dtype": ("float32", "bfloat16"),
}


@dataclass(frozen=True, kw_only=True)
class Injection:
    """What each choice means is said once, in conf/run.yaml; docs/aqn.md says who chose what."""

    norms: str
    relative: bool
    cadence: str
    batch_prompts: int
    site: str
    accumulate: str
    add_dtype: str

    def __post_init__(self) -> None:
        for key, choices in CHOICES.items():
            value = getattr(self, key)
            require(value in choices, f"inject.{key} must be one of {', '.join(choices)}, got {value!r}")
        require(isinstance(self.relative, bool), f"inject.relative must be true or false, got {self.relative!r}")
        whole = isinstance(self.batch_prompts, int) and not isinstance(self.batch_prompts, bool)
        require(
            whole and self.batch_prompts >= 1,
            f"inject.batch_prompts must be a whole number of at least 1, got {self.batch_prompts!r}",
        )
        require(
            self.site == "sampler" or self.one_draw,
            f"inject.site={self.site} repeats the sampler's noise in training, whose micro-batches mix prompts: "
            f"it needs one draw for the whole step, but inject.cadence={self.cadence}. Use inject.cadence=step, or "
            "inject.site=sampler",
        )

        require(
            self.accumulate == "none" or self.cadence != "run",
            f"inject.cadence=run keeps one draw for the whole run, so nothing can accumulate: got "
            f"inject.accumulate={self.accumulate}. Use inject.accumulate=none",
        )

    @property
    def one_draw(self) -> bool:
        """Whether all prompts of a step share one draw, so that training can repeat it."""
        return self.cadence in ("run", "step")

    def draws(self, prompts: Sequence[Item], drawn: int) -> Iterator[tuple[int, list[Item]]]:
        """The prompts of one step, in order, cut into those that share a draw of noise, each with the draw's number.

        `drawn` draws have been made in this step before, for prompts that dynamic sampling replaces.
        """
        size = {"batch": self.batch_prompts, "group": 1}.get(self.cadence)
        if size is None:
            yield from [(0, list(prompts))] if prompts else []
            return
        for number, start in enumerate(range(0, len(prompts), size), start=drawn):
            yield number, list(prompts[start : start + size])
