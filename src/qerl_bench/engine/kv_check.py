"""Whether keys and values can be rounded as asked, seen in one short text before the first step.

A run is refused by name if a layer's keys never pass through the function that rounds them, if blocks do not divide
them, or if they are not finite, so that no scale is.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from qerl_bench.engine.hf_reference import prefill
from qerl_bench.model.keys_values import Seen
from qerl_bench.model.policy import Policy
from qerl_bench.model.structure import probe_ids
from qerl_bench.quant.base import NOT_ROUNDED
from qerl_bench.quant.kv_kinds import require_width
from qerl_core.checks import require

log = logging.getLogger(__name__)
TOKENS = 16


@torch.no_grad()
def kv_check(policy: Policy, where: str) -> dict[str, Any]:
    """How many layers have keys and values that are rounded, for preflight.json; nothing if none is to.

    Raises ConfigError, which names the option and the model `where`.
    """
    kinds = {f"{name}.kv": kind for name, kind in vars(policy.kv.kinds).items() if kind != NOT_ROUNDED}
    if not kinds:
        return {}
    ids = probe_ids(policy.model)[:TOKENS]
    with policy.kv.watching() as (_, trained):
        policy.model(input_ids=ids[None], use_cache=False)
    with policy.kv.watching() as (written, read), policy.kv.sampling(at_pages=True):
        prefill(policy, [ids.tolist()])
    layers = {seen.layer for seen in written}
    missed = layers - {seen.layer for seen in trained}
    other = sorted(
        {str(seen.layer) for seen in written for one in read if one.layer == seen.layer and not _equal(seen, one)}
    )
    for key, kind in kinds.items():
        require(
            bool(layers),
            f"{key}={kind} rounds keys and values where they are written, and {where} writes none: its layers keep "
            f"states. Use {key}=none, or another model",
        )
        require(
            not other,
            f"{key}={kind} rounds keys and values that layers attend to, after rotation, and {where} writes something "
            f"else, such as latents, in layers {', '.join(other)}. Use {key}=none, or another model",
        )
        require(
            key != "train.kv" or not missed,
            f"{key}={kind} rounds keys and values before training passes attend to them, and {len(missed)} of the "
            f"{len(layers)} layers of {where} that write some attend by a function of their own. Use {key}=none, or "
            "another model",
        )
        for seen in trained if key == "train.kv" else written:
            _check(key, kind, seen, where)
    said = ", ".join(f"{key}={kind}" for key, kind in kinds.items())
    log.info("keys and values of %d layers are rounded: %s", len(layers), said)
    return {"kv_layers": len(layers)}


def _equal(left: Seen, right: Seen) -> bool:
    return all(
        a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in ((left.key, right.key), (left.value, right.value))
    )


def _check(key: str, kind: str, seen: Seen, where: str) -> None:
    for name, x in (("keys", seen.key), ("values", seen.value)):
        what = f"the {name} of layer {seen.layer} of {where}"
        require_width(key, kind, what, x.shape[-1])
        require(
            bool(x.isfinite().all()),
            f"{key}={kind} needs a finite scale for each token and head, and {what} are NaN or infinite in a first "
            f"text. Use {key}=none or a model.dtype of wider range, or repair the checkpoint",
        )
