"""The policy: a packed base model, its adapter and its noise in one object.

The same weights serve sampling and training. Adapters are never merged into the base: rounding to 4 bits would remove
almost the whole update.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qerl_bench.aqn.injector import NoiseInjector, block_norms, keep_input_dtype
from qerl_bench.model.kernels import choose_kernels, why_not_fused
from qerl_bench.model.lm_head import TokenStats, token_stats
from qerl_bench.model.packing import enable_packing
from qerl_bench.quant.error_decomposition import LayerReport
from qerl_bench.records import Message, Prompt
from qerl_bench.task.prompts import render_prompt

log = logging.getLogger(__name__)


class Policy:
    """A causal LM with a packed base. `model` includes the adapter's modules; `adapter` is PEFT's wrapper, or None.

    `layers` reports on the packing of each layer, and `kernels` names the kernel each of them runs. `fused` tells
    whether loss head and sampling run fused kernels.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        layers: dict[str, LayerReport],
        noise: NoiseInjector,
        adapter: PeftModel | None,
        *,
        kernel: str,
        packing: bool,
        train_norms: bool,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.layers = layers
        self.noise = noise
        self.adapter = adapter
        self.packing = packing
        if packing:
            enable_packing(model)
        self.norms = block_norms(model, model.config.num_hidden_layers)
        self.base_scales = _trainable_copies(self.norms.values()) if train_norms else []  # the scales of the base
        self.device = next(model.parameters()).device
        self.stop_ids = stop_ids(model, tokenizer)
        pad_id = tokenizer.pad_token_id
        self.pad_id = pad_id if isinstance(pad_id, int) else min(self.stop_ids)
        self.kernels = choose_kernels(model, layers, kernel)
        reason = why_not_fused(kernel, self.device)
        self.fused = reason is None
        log.info("kernel of the loss head and of sampling: %s", "triton" if reason is None else f"torch ({reason})")

    @property
    def trainable(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def prompt_text(self, messages: tuple[Message, ...]) -> str:
        """The prompt in the tokenizer's chat format, ready for the completion to follow."""
        return render_prompt(self.tokenizer, messages)

    def prompt_ids(self, messages: tuple[Message, ...]) -> list[int]:
        """Token ids of `prompt_text`."""
        return self.tokenizer(self.prompt_text(messages), add_special_tokens=False)["input_ids"]  # type: ignore[return-value]

    def ids_of(self, prompt: Prompt) -> list[int]:
        """Token ids that the prompt brings along, or those of its messages."""
        return self.prompt_ids(prompt.messages) if prompt.token_ids is None else list(prompt.token_ids)

    def completion_ids(self, text: str) -> list[int]:
        """Token ids of a whole completion, its stop token included."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [*ids, self.tokenizer.eos_token_id]  # type: ignore[misc]

    def train_mode(self, on: bool) -> None:
        """Switch the adapter's dropout on for the training pass, and off for everything else."""
        self.model.train(on)

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Context in which the model is its frozen base, norm scales included."""
        if self.adapter is None:
            yield
            return
        trained = [norm.weight for norm in self.norms.values()]
        try:
            for norm, scale in zip(self.norms.values(), self.base_scales or trained, strict=True):
                norm.weight = scale
            with self.adapter.disable_adapter():
                yield
        finally:
            for norm, scale in zip(self.norms.values(), trained, strict=True):
                norm.weight = scale

    def token_stats(
        self, input_ids: torch.Tensor, mask: torch.Tensor, temperature: float, entropy_gradient: bool = False
    ) -> TokenStats:
        """`lm_head.token_stats` of this policy as it is now, with its adapter and noise."""
        return token_stats(self.model, input_ids, mask, temperature, entropy_gradient, self.packing, self.fused)

    def save(self, folder: Path) -> None:
        """Write what is trained: `adapter/` in PEFT's format and trained norms, or the whole model to `model/`."""
        if self.adapter is not None:
            self.adapter.save_pretrained(str(folder / "adapter"), save_embedding_layers=False)
            if self.base_scales:
                scales = {f"{name}.weight": norm.get_parameter("weight").detach() for name, norm in self.norms.items()}
                save_file(scales, folder / "norms.safetensors")
        else:
            self.model.save_pretrained(str(folder / "model"))
            self.tokenizer.save_pretrained(str(folder / "model"))

    def load(self, folder: Path) -> None:
        """Read back what `save` wrote."""
        if self.adapter is not None:
            state = load_file(folder / "adapter" / "adapter_model.safetensors")
            # PEFT silently skips tensors that do not fit, which would leave the fresh adapter in place.
            assert state.keys() == self.adapter_state().keys(), f"{folder} holds the adapter of other layers"
            set_peft_model_state_dict(self.adapter, state)
            if self.base_scales:
                scales = load_file(folder / "norms.safetensors")
                with torch.no_grad():
                    for name, norm in self.norms.items():
                        norm.weight.copy_(scales[f"{name}.weight"])  # type: ignore[operator]
        else:
            shards = sorted((folder / "model").glob("*.safetensors"))  # one file, or several for a large model
            state = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
            missing, unexpected = self.model.load_state_dict(state, strict=False)
            assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)

    def adapter_state(self) -> dict[str, torch.Tensor]:
        """The adapter's tensors under PEFT's names; empty where there is no adapter."""
        # By default PEFT asks the hub at every call whether the vocabulary has grown.
        return {} if self.adapter is None else get_peft_model_state_dict(self.adapter, save_embedding_layers=False)


def _trainable_copies(norms: Iterable[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """Give each norm a trainable FP32 copy of its scale, since RL steps are lost in 16 bits; return the originals."""
    originals = []
    for norm in norms:
        originals.append(norm.weight)
        norm.weight = torch.nn.Parameter(norm.weight.detach().float().clone())  # type: ignore[operator]
        norm.register_forward_hook(keep_input_dtype)
    return originals


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that end a completion: the tokenizer's own, and those in the model's generation config."""
    listed = model.generation_config.eos_token_id if model.generation_config is not None else None
    named = [tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])]
    ids = frozenset(token for token in named if isinstance(token, int))
    assert ids, "the model names no end-of-text token"
    return ids
