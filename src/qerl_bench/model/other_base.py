"""A policy on a second base, in another weight format or by another quantizer: what it shares with the first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from qerl_bench.quantizer.rescaling import Rescaling
from qerl_core.checks import require

if TYPE_CHECKING:
    from qerl_bench.model.policy import Policy


def share_all_but_base(model: PreTrainedModel, like: Policy, rescaling: Rescaling) -> None:
    """Give `model`, whose base is another, what is trained in `like`, and its norms, embeddings and head.

    `rescaling` has the factors that lead from the base of `like` to this one. Norms and biases that have one stay those
    of this base, and the matrices of the adapter beside them are copies that fit it, made of those in `like` as they
    are now.
    """
    for name, norm in like.all_norms.items():  # the modules: noise takes the place of their parameters
        if name not in rescaling.outputs:
            model.set_submodule(name, norm)
    own = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in _on_other_base(like.model, rescaling):
        require(
            name in own or not parameter.requires_grad,
            f"the base in the other format has no place for {name} of the adapter. Use lora.experts=false, or one "
            "format",
        )
        if name in own and own[name].shape == parameter.shape and own[name].dtype == parameter.dtype:
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner)._parameters[leaf] = parameter


def _on_other_base(model: torch.nn.Module, rescaling: Rescaling) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters of `model` that fit a base with these factors; those of its base that do not are left out."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path, adapter, _ = name.partition(".lora_")
        layer = path if adapter else name.rpartition(".")[0].removesuffix(".base_layer")
        into, out_of = rescaling.inputs.get(layer), rescaling.outputs.get(layer)
        if ".lora_A." in name and into is not None:
            yield name, torch.nn.Parameter(parameter.detach() * into, requires_grad=parameter.requires_grad)
        elif ".lora_B." in name and out_of is not None:
            scaled = parameter.detach() / out_of.unsqueeze(1)
            yield name, torch.nn.Parameter(scaled, requires_grad=parameter.requires_grad)
        elif adapter or (into is None and out_of is None):
            yield name, parameter
