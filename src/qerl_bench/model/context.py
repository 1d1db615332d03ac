"""How long a sequence may be, so that trainer, sampler and transformers compute the same numbers for it.

That is the model's context. With rotary factors that depend on the length of the sequence (longrope: Phi-3.5,
Phi-4-mini) it is the length at which they change: transformers takes those of the longest sequence of a call for all of
them, and reads a sequence anew when it grows beyond. Left out: sequences on the far side of such a switch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from qerl_core.checks import require

SWITCHED = ("longrope", "su")  # types of rotary embedding with two sets of factors; su is what Phi-3 first called it
NAMES = ("max_position_embeddings", "max_seq_len")  # of the limit in a config
ORIGINAL = "original_max_position_embeddings"


def rope_switch(config: Mapping[str, Any]) -> int | None:
    """The longest sequence, in tokens, with the first set of rotary factors; None for a model that has only one.

    `config` is a config.json of any age, or that of transformers.
    """
    ropes = config.get("rope_parameters") or config.get("rope_scaling") or {}
    of_layers = [rope for rope in ropes.values() if isinstance(rope, Mapping)] or [ropes]
    kinds = [(rope.get("rope_type") or rope.get("type"), rope.get(ORIGINAL)) for rope in of_layers]
    switches = [config.get(ORIGINAL) or original for kind, original in kinds if kind in SWITCHED]
    return min((int(switch) for switch in switches if switch), default=None)


def context_of(config: Mapping[str, Any]) -> int | None:
    """The longest sequence in tokens; None without a limit, as in a model that has no positions."""
    limits = [*(config.get(name) for name in NAMES), rope_switch(config)]
    return min((limit for limit in limits if isinstance(limit, int)), default=None)


def longest_context(model: Any) -> int | None:
    """`context_of` of the text part of a loaded model."""
    config = model.config.get_text_config(decoder=True)
    named = {name: getattr(config, name, None) for name in NAMES}  # some call the first n_positions
    return context_of(config.to_dict() | named)


def require_one_rope(model: Any, lengths: Iterable[int], what: str) -> None:
    """Raise ConfigError if a sequence of `what` is beyond the switch of the rotary factors."""
    config = model.config.get_text_config(decoder=True)
    switch, longest = rope_switch(config.to_dict()), max(lengths, default=0)
    require(
        switch is None or longest <= switch,
        f"{what} has {longest} tokens, and above {switch} ({ORIGINAL}) {type(model).__name__} takes other rotary "
        "factors, for all sequences of a call. Leave long texts out, or use another model",
    )
