"""The untouched model: what `from_pretrained` makes of a checkpoint, in FP32, with the numbers of the policy.

Those are packed, or rounded to the dtype of the run: weights, and constants such as the scale of Gemma's embeddings.
Each weight is what transformers reads, so rounded; a policy that has another one is refused by its name. Of a model
whose copy would be large, the copy has the first blocks alone, as many as show every kind of block, and the policy is
cut to the same ones meanwhile. Where there is no checkpoint that transformers can load (random weights, packed files),
the copy has the weights of the policy, in modules of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from qerl_bench.model.lm_head import decoder_of
from qerl_bench.model.policy import Policy
from qerl_bench.quant.linear import PackedLinear
from qerl_bench.quant.matrices import PackedMatrices
from qerl_bench.quant.packed_config import quantization_config
from qerl_bench.quant.packed_share import decoder_blocks, persistent_buffers, weights_of
from qerl_core.checks import require
from qerl_core.process.out_of_memory import shortage

log = logging.getLogger(__name__)
MOST_BYTES = 4 * 2**30  # of a copy of the whole model
FEWEST_BLOCKS = 2  # of a smaller copy: the second reads what the first has written
SAME_ERROR = 0.02  # by which the rounding error of a layer may differ from the one that was measured when it was packed


class Origin(NamedTuple):
    """Where transformers would read the model of a policy."""

    folder: Path | None  # None: there is no checkpoint
    trust_remote_code: bool
    rescaled: bool  # a quantizer has moved scales between the policy's layers


def blocks_to_compare(policy: Policy) -> int | None:
    """How many of the first blocks a copy should have; None for all of them."""
    path, blocks = decoder_blocks(policy.model)
    packed = sum(map(weights_of, policy.model.modules()))
    held = packed + sum(p.numel() for p in policy.model.parameters())
    if held * torch.float32.itemsize <= MOST_BYTES:
        return None
    lists = [value for value in vars(decoder_of(policy.model).config).values() if _is_list_of(value, len(blocks))]
    kinds = [(repr(block), *(str(entries[i]) for entries in lists)) for i, block in enumerate(blocks)]
    count = max(FEWEST_BLOCKS, 1 + max(map(kinds.index, kinds)))
    if count >= len(blocks):
        return None
    log.debug("%s: the first %d of %d blocks show every kind of block", path, count, len(blocks))
    return count


@contextmanager
def first_blocks(policy: Policy, count: int | None) -> Iterator[None]:
    """Context in which `policy` has only its first `count` blocks; all of them for None."""
    if count is None:
        yield
        return
    path, blocks = decoder_blocks(policy.model)
    parent, _, leaf = path.rpartition(".")
    owner, model = policy.model.get_submodule(parent), policy.model
    configs = {id(c): c for c in (model.config, model.config.get_text_config(), decoder_of(model).config)}
    with ExitStack() as stack:
        for config in configs.values():
            stack.callback(config.__dict__.update, dict(config.__dict__))
            cut(config, len(blocks), count)
        stack.callback(owner._modules.__setitem__, leaf, blocks)
        owner._modules[leaf] = torch.nn.ModuleList(list(blocks)[:count])
        yield


def cut(config: Any, total: int, count: int) -> None:
    """Let a config of `total` blocks describe a model of the first `count` of them."""
    for key, value in list(vars(config).items()):
        if _is_list_of(value, total):
            setattr(config, key, value[:count])
    if config.num_hidden_layers != count:  # it may be the length of such a list
        config.num_hidden_layers = count


def _is_list_of(value: object, count: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == count


def stock_model(policy: Policy, source: Origin, count: int | None, where: str) -> PreTrainedModel:
    """The copy on the policy's device, in FP32 and with eager attention; of its first `count` blocks, if given.

    For use inside `first_blocks`. Raises ConfigError, which names the weight of the model `where`, if transformers
    reads another one.
    """
    with _quiet():
        model = _loaded(source, count, policy.device)
        if model is None:
            model = _with_weights_of(policy)
        else:
            _put_weights(model, policy, source.rescaled, where)
        _put_constants(model, policy)
    model.generation_config = GenerationConfig()  # neither stop tokens nor penalties of the model's own
    return model.to(policy.device).eval()  # type: ignore[arg-type]


def _loaded(source: Origin, count: int | None, device: torch.device) -> PreTrainedModel | None:
    """What `from_pretrained` makes of the source; None if it has no checkpoint that transformers loads by itself."""
    folder, trust = source.folder, source.trust_remote_code
    if folder is None or quantization_config(folder) is not None:
        return None
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
        text = config.get_text_config(decoder=True)
        if count is not None:
            cut(text, text.num_hidden_layers, count)
        words: dict[str, Any] = {"trust_remote_code": trust, "dtype": torch.float32, "attn_implementation": "eager"}
        if device.type == "cuda":
            words["device_map"] = {"": device}
        return AutoModelForCausalLM.from_pretrained(folder, config=config, **words)
    except Exception as error:  # foreign files can break a reader anyhow
        if shortage(error):
            raise
        reason = str(error).strip().partition("\n")[0]
        log.warning("transformers alone cannot load %s, so its weights are compared with none: %s", folder, reason)
        return None


def _with_weights_of(policy: Policy) -> PreTrainedModel:
    from accelerate import init_empty_weights

    config = deepcopy(policy.model.config)
    config._attn_implementation = "eager"
    with init_empty_weights(include_buffers=False):
        kind: Any = type(policy.model)
        model = kind(config)
    for name, tensor in weights(policy):
        _set(model, name, tensor)
    for name, buffer in persistent_buffers(policy.model).items():
        owner, _, leaf = name.replace(".base_layer", "").rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = buffer.clone()
    model.tie_weights()
    return model


def _put_weights(model: PreTrainedModel, policy: Policy, rescaled: bool, where: str) -> None:
    """Compare each weight of the policy with that of `model`, and put those that are not equal in its place."""
    blocks, name_of = f"{decoder_blocks(policy.model)[0]}.", _names(model, policy)
    errors = {name: report.relative_error for name, report in policy.layers.items()}
    for name, tensor in weights(policy):
        there = name_of(name)
        read = model.get_parameter(there).detach().to(tensor.device)
        packed = next((errors[key] for key in (name, name.removesuffix(".weight")) if key in errors), None)
        if not (rescaled and name.startswith(blocks)):
            off, limit = _distance(tensor, read), 0.0
            if packed is not None:
                off, limit = abs(off - packed), SAME_ERROR
            require(
                off <= limit,
                f"{name} of {where} is not what transformers reads as {there}: {off:.1%} of its size apart, beyond "
                f"what packing explains (limit {limit:.0%}). config.json and the files say different things of it, or "
                "it was read wrongly: write the checkpoint again with save_pretrained, or use another model",
            )
        if not torch.equal(tensor.to(read.dtype), read):
            _set(model, there, tensor)
    model.tie_weights()


def _put_constants(model: PreTrainedModel, policy: Policy) -> None:
    """Put the 16-bit buffers of the policy in the place of the numbers that they round."""
    name_of, buffers = _names(model, policy), dict(model.named_buffers())
    for path, module in policy.model.named_modules():
        for leaf, ours in module.named_buffers(recurse=False):
            read = buffers.get(name_of(f"{path}.{leaf}".replace(".base_layer", "")))
            if read is not None and ours.dtype in (torch.bfloat16, torch.float16) and _distance(ours, read) == 0:
                read.copy_(ours)


def _names(model: PreTrainedModel, policy: Policy) -> Callable[[str], str]:
    """What `model` calls the tensor of a name in the policy: its decoder may lie elsewhere."""
    theirs, ours = (f"{decoder_blocks(one)[0].rpartition('.')[0]}." for one in (model, policy.model))
    return lambda name: theirs + name.removeprefix(ours) if name.startswith(ours) else name


def _distance(ours: torch.Tensor, read: torch.Tensor) -> float:
    """||ours - read|| / ||read||, once `read` is in the dtype of the other; infinite where the shapes differ."""
    if ours.shape != read.shape:
        return torch.inf
    read = read.to(ours).float()
    return ((ours.float() - read).norm() / read.norm().clamp(min=torch.finfo(torch.float32).tiny)).item()


def weights(policy: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight of the base by the name that transformers has for it, packed ones dequantized to FP32."""
    for path, module in policy.model.named_modules():
        name = path.replace(".base_layer", "")
        if isinstance(module, PackedLinear):
            yield f"{name}.weight", module.dequantized().float()
        elif isinstance(module, PackedMatrices):
            experts = torch.stack([module.dequantized(expert) for expert in range(module.experts)]).float()  # (E, N, K)
            yield name, experts.mT.contiguous() if module.transposed else experts
        if ".lora_" not in f".{path}.":
            for leaf, parameter in module.named_parameters(recurse=False):
                yield f"{name}.{leaf}", parameter.detach()


def _set(model: PreTrainedModel, name: str, tensor: torch.Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    old = model.get_parameter(name)
    copy = tensor.detach().to(torch.float32, copy=True)
    if not old.is_meta:
        copy = copy.to(old.device)
    model.get_submodule(owner)._parameters[leaf] = torch.nn.Parameter(copy, requires_grad=False)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' words on what a cut copy leaves out of the files."""
    before, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
        if bars:
            transformers_logging.enable_progress_bar()
