"""How noise enters a model, the options `noise.*`: QeRL's paper, its released code and later readings differ on them.

The same options serve every schedule. `recipe=paper|repo|as_released` sets them together with a schedule. Whether the
norm scales are also *trained*, as in the released scripts, is an option of the adapter (conf/lora).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from qerl_core.checks import check_fields, count, flag, one_of, require

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class NoiseSpec:
    """conf/run.yaml explains each choice; docs/aqn.md says which source makes it."""

    where: str
    norms: str
    routers: bool
    relative: bool
    cadence: str
    prompts_per_draw: int
    site: str
    accumulate: str
    add_dtype: str

    def __post_init__(self) -> None:
        check_fields(
            self,
            "noise",
            where=one_of("norms", "adapters"),
            norms=one_of("blocks", "blocks_final", "missed"),
            routers=flag,
            relative=flag,
            cadence=one_of("run", "step", "batch", "group"),
            prompts_per_draw=count(),
            site=one_of("rollout", "rollout_and_old_logprobs", "rollout_and_training"),
            accumulate=one_of("none", "final", "all"),
            add_dtype=one_of("float32", "bfloat16"),
        )
        about_norms = {"norms": "blocks", "routers": True, "relative": False, "accumulate": "none"}
        changed = [key for key, default in about_norms.items() if getattr(self, key) != default]
        require(
            self.where == "norms" or not changed,
            "noise.where=adapters leaves norms as they are, got "
            f"{', '.join(f'noise.{key}={getattr(self, key)}' for key in changed)}, which is about norms. Leave "
            f"{', '.join(f'noise.{key}' for key in changed)} out, or use noise.where=norms",
        )
        require(
            self.site == "rollout" or self.one_draw,
            f"noise.site={self.site} repeats the rollout's noise in training, whose micro-batches mix prompts: "
            f"it needs one draw for the whole step, but noise.cadence={self.cadence}. Use noise.cadence=step, or "
            "noise.site=rollout",
        )
        require(
            self.accumulate == "none" or self.cadence != "run",
            f"noise.cadence=run keeps one draw for the whole run, so nothing can accumulate: got "
            f"noise.accumulate={self.accumulate}. Use noise.accumulate=none",
        )

    def require_norms(self, schedule: str) -> None:
        """Raise ConfigError unless the noise of `schedule`, which divides it among norms, goes there."""
        require(
            self.where == "norms",
            f"aqn={schedule} divides its noise among norms, got noise.where={self.where}. Use noise.where=norms, or "
            "another schedule",
        )

    @property
    def one_draw(self) -> bool:
        """Whether all prompts of a step share one draw, so that training can repeat it."""
        return self.cadence in ("run", "step")

    def draws(self, prompts: Sequence[Item], first: int) -> Iterator[tuple[int, list[Item]]]:
        """Split one step's prompts, in order, by the draw of noise they share; yield each draw's number and prompts.

        `first` is the number of draws this step has made before, for prompts that dynamic sampling replaced.
        """
        size = {"batch": self.prompts_per_draw, "group": 1}.get(self.cadence)
        if size is None:
            yield from [(0, list(prompts))] if prompts else []
            return
        for draw, start in enumerate(range(0, len(prompts), size), start=first):
            yield draw, list(prompts[start : start + size])
