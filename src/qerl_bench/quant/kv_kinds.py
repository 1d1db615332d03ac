"""Which formats keys and values are rounded to, and whether that can be: `rollout.kv`, `train.kv`, `eval.kv`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from qerl_bench.quant.base import ACTIVATIONS, NOT_ROUNDED
from qerl_core.checks import require

WIDTH = {"head_dim", "hidden_size", "num_attention_heads"}  # keys of config.json


@dataclass(frozen=True)
class Kinds:
    """What keys and values are rounded to in passes of training, by what samples, and in evaluations."""

    train: str = NOT_ROUNDED
    rollout: str = NOT_ROUNDED
    eval: str = NOT_ROUNDED

    @property
    def rounds(self) -> bool:
        return {self.train, self.rollout, self.eval} != {NOT_ROUNDED}

    @property
    def samples_rounded(self) -> bool:
        return {self.rollout, self.eval} != {NOT_ROUNDED}

    def check(self, engine: str, formats: Collection[str], shape: Mapping[str, Any], model: str) -> None:
        """Raise ConfigError unless `engine` writes these `formats`, and blocks divide the heads of `model`.

        `shape` is the model's config.json as far as it is known.
        """
        named = {"train.kv": self.train, "rollout.kv": self.rollout, "eval.kv": self.eval}
        for key, kind in list(named.items())[1:]:
            require(
                kind in formats,
                f"{key}={kind} rounds keys and values as they are written, and engine={engine} writes "
                f"{', '.join(formats)}. Use engine=hf, or {key} with one of these",
            )
        require(
            self.rollout == self.eval or engine == "hf",
            f"rollout.kv={self.rollout} and eval.kv={self.eval} are two kinds of cache, and engine={engine} has one. "
            "Give both the same value, or use engine=hf; a finished run can be evaluated with any: qerl-bench eval "
            f"RUN eval.kv={self.eval}",
        )
        head = shape.get("head_dim")
        if head is None and shape.keys() >= WIDTH - {"head_dim"}:
            head = shape["hidden_size"] // shape["num_attention_heads"]
        for key, kind in named.items():
            require_width(key, kind, f"the heads of model={model}", head)


def kinds_of(experiment: Any) -> Kinds:
    """Those of the specs of a run. Rollouts and evaluations that say nothing have what training has."""
    train, rollout, evaluator = experiment.train, experiment.rollout, experiment.eval
    return Kinds(train.kv, rollout.kv or train.kv, getattr(evaluator, "kv", None) or train.kv)


def require_width(key: str, kind: str, what: str, width: int | None) -> None:
    """Raise ConfigError, naming `key`, unless blocks of `kind` divide the `width` of `what`, if it is known."""
    require(
        width is None or width % ACTIVATIONS[kind] == 0,
        f"{key}={kind} rounds blocks of {ACTIVATIONS[kind]} numbers, which do not divide {what}, {width} wide. Use "
        f"{key}=fp8 or int8, with a scale for each token and head, or none",
    )


def kv_record(**kinds: str) -> dict[str, Any]:
    """What a record says of keys and values; nothing if none of `kinds`, by pass, rounds."""
    return {"kv": kinds} if {*kinds.values()} != {NOT_ROUNDED} else {}
