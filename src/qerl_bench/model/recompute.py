"""What the backward pass computes again: `train.recompute`, decided here for the whole model.

none keeps every activation. full keeps the inputs of the blocks and repeats whole blocks. selective repeats them too,
but keeps the outputs of the matmuls with frozen weights, which are nearly all of a block's arithmetic: norms, rotary
embeddings, attention, SwiGLU and the adapters' own small matmuls are redone. All three give the same gradient, on a CPU
to the bit. Left out: activations moved to the host, and attention that is kept, which at 4,096 tokens is 6 % of the
arithmetic of a 7B model.
"""

from __future__ import annotations

import logging
from collections import deque
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from qerl_bench.model.kernels import LoRALinear
from qerl_bench.quant.experts import expert_modules
from qerl_bench.quant.linear import PackedLinear
from qerl_core.checks import require
from qerl_kernels.training_linear import Kept, keeping, reusing

log = logging.getLogger(__name__)


def recompute_blocks(model: PreTrainedModel, mode: str) -> None:
    """Let the blocks of `model` be computed again in the backward pass, as `mode`, a value of train.recompute, says.

    Call it before the adapter is attached. Raises ConfigError if the architecture cannot.
    """
    if mode == "none":
        return
    name = type(model).__name__
    require(
        model.supports_gradient_checkpointing
        and any(isinstance(module, GradientCheckpointingLayer) for module in model.modules()),
        f"train.recompute={mode} repeats blocks in the backward pass, and those of {name} in transformers cannot be "
        "repeated. Use train.recompute=none and a smaller train.micro_batch_tokens",
    )
    require(
        mode == "full" or not expert_modules(model),
        f"train.recompute=selective keeps the outputs of linear layers, and most of {name} are experts, which are not. "
        "Use train.recompute=full",
    )
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = matmuls_kept
    old, new = "gradient_checkpointing_enable", "activation_checkpointing_enable"  # from transformers 5.24 on
    getattr(model, new, getattr(model, old))(options)


def matmuls_kept() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts for the forward pass of a block and for its repetition, in which frozen matmuls are not repeated."""
    outputs: Kept = deque()
    return keeping(outputs), reusing(outputs)


def keep_matmuls(model: torch.nn.Module) -> None:
    """Let adapted layers take the path whose base matmul `matmuls_kept` keeps. Raises ConfigError if there are none."""
    layers = [module for module in model.modules() if isinstance(module, LoRALinear)]
    require(
        len(layers) > 0,
        "train.recompute=selective keeps the matmuls with frozen weights, and this model is trained without an "
        "adapter. Use train.recompute=full, or lora=default",
    )
    for layer in layers:
        base = layer.get_base_layer()
        require(
            not (isinstance(base, PackedLinear) and base.uses_bitsandbytes),
            "train.recompute=selective does not keep the matmuls of bitsandbytes (quant.backend=bitsandbytes). Use "
            "train.recompute=full",
        )
        layer.fused = True  # if the base rounds its input, PEFT's forward pass takes that path for it alone
    log.info("recompute: the outputs of %d frozen matmuls are kept, the rest of each block is redone", len(layers))
