"""A trained policy as one plain checkpoint in 16 or 32 bits, which every program reads.

Each adapted layer gets W + s B A, with W the dequantized weight that the policy multiplies by. So no code is rounded
again, which would remove most of an adapter's update (`quant/packed_weight.py`); what is lost is the rounding to the
dtype of the checkpoint. Left out: experts, which checkpoints hold under other names.
"""

from __future__ import annotations

from pathlib import Path

import torch

from qerl_bench.model.policy import Policy
from qerl_bench.quant.experts import expert_modules
from qerl_bench.quant.export import write_model
from qerl_bench.quant.linear import PackedLinear
from qerl_bench.quant.packed_share import persistent_buffers
from qerl_core.checks import require
from qerl_core.rundir.durable import atomically, check_new_folder

BASE, ADAPTER = ".base_layer", ".lora_"  # what PEFT puts into names


def merged_tensors(policy: Policy, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], float]:
    """The weights of the trained policy by name, and what rounding them changed, as a share of the adapter's update.

    Raises ConfigError if the policy has no adapter, or experts.
    """
    model = policy.model
    require(policy.adapter is not None, "there is no adapter to add: checkpoints/step_*/model of this run is the model")
    require(
        not expert_modules(model),
        f"{type(model).__name__} has experts, which are not merged: serve base and adapter, docs/how-to/serve.md",
    )
    tensors = {
        name: tensor.detach() for name, tensor in [*model.named_parameters(), *persistent_buffers(model).items()]
    }
    tensors |= {f"{name}.weight": m.dequantized() for name, m in model.named_modules() if isinstance(m, PackedLinear)}
    tensors = {name.replace(BASE, ""): tensor for name, tensor in tensors.items() if ADAPTER not in name}
    update, lost = 0.0, 0.0
    for name, layer in policy.noise.adapters.items():
        key = f"{name.partition(ADAPTER)[0]}.weight"
        b, a = (matrix.get_parameter("weight").detach().float() for matrix in (layer.b, layer.a))
        change = layer.scaling * b @ a
        exact = tensors[key].float() + change
        tensors[key] = exact.to(dtype)
        update += float(change.square().sum())
        lost += float((tensors[key].float() - exact).square().sum())
    rounded = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    return rounded, (lost / update) ** 0.5 if update else 0.0


def export_merged(policy: Policy, dtype: torch.dtype, out: Path) -> float:
    """Write the merged policy and its tokenizer to the folder `out`; returns the share of `merged_tensors`.

    Raises ConfigError as that does, and unless `out` is new or empty.
    """
    check_new_folder(out)
    tensors, share = merged_tensors(policy, dtype)
    with atomically(out) as partial:
        partial.mkdir(parents=True)
        policy.tokenizer.save_pretrained(partial)
        policy.model.config.dtype = dtype
        write_model(policy.model, tensors, None, partial)
    return share
