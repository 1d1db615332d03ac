"""The policy: a packed base model, its adapter and its noise in one object.

The same weights serve sampling and training. Adapters stay apart from the base, since rounding to 4 bits removes almost
the whole of a small update, unless `merging` asks for that.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer

from qerl_bench.aqn.injector import NoiseInjector, compute_in_float32
from qerl_bench.model.attention import enable_attention
from qerl_bench.model.block import fuse_blocks
from qerl_bench.model.cut_tensors import own_parts
from qerl_bench.model.kernels import choose_kernels, rounds, why_not_fused, why_not_fused_blocks
from qerl_bench.model.keys_values import KVRounding
from qerl_bench.model.lm_head import TokenStats, decoder_of, head_of, token_stats
from qerl_bench.model.merging import REASON as MERGED
from qerl_bench.model.merging import Merging
from qerl_bench.model.packing import Packing, why_not_packed
from qerl_bench.model.routing import chosen_experts
from qerl_bench.model.sharing import why_not_shared
from qerl_bench.model.structure import Structure, routed_experts
from qerl_bench.model.token_ids import padding, require_rows, stop_ids, with_rows
from qerl_bench.quant.activations import REASON as ROUNDED
from qerl_bench.quant.activations import Rounding
from qerl_bench.quant.error_decomposition import LayerReport
from qerl_bench.quant.kv_kinds import Kinds
from qerl_bench.quant.packed_share import packed_share
from qerl_bench.quantizer.rescaling import Rescaling
from qerl_bench.task.chat_template import (
    Keywords,
    demonstration_ids,
    prompt_ids,
    render_prompt,
    texts_of,
    thinking_opened,
)
from qerl_core.checks import ConfigError, naming, require
from qerl_core.records import Demonstration, Message, Prompt

log = logging.getLogger(__name__)
CARD = "---\nlibrary_name: peft\n---\nA LoRA adapter, trained by qerl-bench on {base}.\n"


class Policy:
    """A causal LM with a packed base. `model` includes the adapter's modules; `adapter` is PEFT's wrapper, or None.

    `layers` reports on the packing of each layer, and `kernels` names the kernel each of them runs. `fused` tells
    whether loss head and sampling run fused kernels. `rounding` is that of the inputs of packed layers, `kv` that of
    keys and values, `merging` that of base and adapter together.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        layers: Mapping[str, LayerReport],
        structure: Structure,
        noise: NoiseInjector,
        adapter: PeftModel | None,
        *,
        kernel: str,
        packing: bool,
        train_norms: bool,
        template: Keywords | None,
        rounding: Rounding | None = None,
        merging: Merging | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.template: Mapping[str, Any] | None = template
        self.layers = layers
        self.structure = structure
        self.noise = noise
        self.rounding, self.merging = rounding, merging
        self.adapter = adapter
        self.head = head_of(model)
        self.packing = prepare_attention(decoder_of(model)) and packing
        self.norms: Mapping[str, torch.nn.Module] = {
            site.name: model.get_submodule(site.name) for site in structure.sites
        }
        require(
            len(self.norms) > 0 or not train_norms,
            "lora.train_norms=true trains the norms whose output is the input of linear layers, and "
            f"{type(model).__name__} has none. Use lora.train_norms=false",
        )
        self.experts = routed_experts(model, structure)
        self.rescaling = Rescaling()  # what the quantizer moved between layers of the base
        self.calibration: Mapping[str, Any] | None = None  # the text that it ran through the model
        self.base = "a base without a name"
        self.digest: str | None = None  # of its weights
        self.folder: Path | None = None  # where these are; None for weights made from a seed
        self.is_sharded = False  # or will be: `model/sharding.py`
        self.base_scales = _trainable_copies(self.norms.values()) if train_norms else []  # the scales of the base
        self.packed_share = packed_share(model)
        self.device = next(model.parameters()).device
        self.kv = KVRounding(Kinds(), self.device)
        self.rows = model.get_input_embeddings().get_parameter("weight").shape[0]
        self.stop_ids = with_rows(stop_ids(model, tokenizer, template), self.rows, type(model).__name__)
        self.pad_id = padding(tokenizer.pad_token_id, self.stop_ids, self.rows)
        self.kernels: Mapping[str, str] = choose_kernels(model, layers, kernel)
        reason = why_not_fused(kernel, self.device)
        self.fused = reason is None
        log.info("kernel of the loss head and of sampling: %s", "triton" if reason is None else f"torch ({reason})")
        reason = reason or (ROUNDED if any(map(rounds, model.modules())) else MERGED if merging else None)
        reason = reason or why_not_fused_blocks(kernel, model) or fuse_blocks(decoder_of(model))
        log.info("blocks in training: %s", "triton" if reason is None else f"modules of transformers ({reason})")
        reason = why_not_shared(decoder_of(model), self.packing, bool(self.experts))
        self.shares_prompts = reason is None
        log.info("prompts in training: %s", "once a group" if reason is None else f"once a completion ({reason})")

    @property
    def all_norms(self) -> Mapping[str, torch.nn.Module]:
        """The norms that noise or training may change, by name: those of blocks, and the one before the head."""
        final = self.structure.final
        return self.norms if final is None else {**self.norms, final.name: self.model.get_submodule(final.name)}

    @property
    def trainable(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def prompt_text(self, messages: tuple[Message, ...]) -> str:
        """The prompt in the tokenizer's chat format, ready for the completion to follow."""
        with naming(str(self.folder or self.base)):
            return render_prompt(self.tokenizer, messages, self.template)

    def prompt_ids(self, messages: tuple[Message, ...]) -> list[int]:
        """Token ids of `prompt_text`."""
        return prompt_ids(self.tokenizer, [messages], [self.prompt_text(messages)])[0]

    def ids_of(self, prompt: Prompt) -> list[int]:
        """Token ids that the prompt brings along, or those of its messages. Raises ConfigError if one has no row."""
        return self.ids_of_each([prompt])[0]

    def ids_of_each(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """`ids_of` each prompt, in one call of the tokenizer: a call costs as much as hundreds of texts."""
        conversations = [prompt.messages for prompt in prompts if prompt.token_ids is None]
        texts = [self.prompt_text(messages) for messages in conversations]
        encoded = iter(prompt_ids(self.tokenizer, conversations, texts))
        sequences = [next(encoded) if prompt.token_ids is None else list(prompt.token_ids) for prompt in prompts]
        with naming(str(self.folder or self.base)):
            for prompt, ids in zip(prompts, sequences, strict=True):
                require_rows(self.tokenizer, [ids], self.rows, f"the prompt {prompt.id}")
        return sequences

    def text_of(self, prompt: Prompt) -> str:
        """What the model reads of a prompt, special tokens included."""
        if prompt.token_ids is None:
            return self.prompt_text(prompt.messages)
        return str(self.tokenizer.decode(list(prompt.token_ids)))

    def demonstration_ids(self, demonstrations: Sequence[Demonstration]) -> tuple[list[list[int]], list[list[int]]]:
        """Token ids of the prompts and of the whole completions, their stop tokens included."""
        with naming(str(self.folder or self.base)):
            prompts, completions = demonstration_ids(self.tokenizer, demonstrations, self.template)
            require_rows(self.tokenizer, [*prompts, *completions], self.rows, "a demonstration")
        return prompts, completions

    def completion_texts(self, prompt_ids: Sequence[list[int]], ids: Sequence[list[int]]) -> list[str]:
        """Completions as they are graded: each after the <think> that its prompt ends with, if it does."""
        ends = [tuple(prompt[-16:]) for prompt in prompt_ids]
        opened = {end: thinking_opened(str(self.tokenizer.decode([*end]))) for end in {*ends}}
        return [opened[end] + text for end, text in zip(ends, texts_of(self.tokenizer, ids), strict=True)]

    def train_mode(self, on: bool) -> None:
        """Switch the adapter's dropout on for the training pass, and off for everything else.

        Nothing random of the base is ever on: the sampler has none of it. Blocks need the flag to checkpoint gradients.
        """
        for module in self.model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.training = on and module.gradient_checkpointing
            elif isinstance(module, LoraLayer):
                module.training = on
                module.lora_dropout.train(on)

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
        self,
        input_ids: torch.Tensor,
        mask: torch.Tensor,
        temperature: float,
        entropy_gradient: bool = False,
        layout: Packing | None = None,
    ) -> TokenStats:
        """`lm_head.token_stats` of this policy as it is now, with its adapter and noise."""
        return token_stats(
            self.model, self.head, input_ids, mask, temperature, entropy_gradient, self.packing, self.fused, layout
        )

    def routing(self, mask: torch.Tensor, layout: Packing | None = None) -> AbstractContextManager[list[torch.Tensor]]:
        """`chosen_experts` of a forward pass for tokens where `mask` (B, T) is true; nothing without experts."""
        if not self.experts:
            return nullcontext([])
        layout = Packing.from_mask(mask) if layout is None else layout
        return chosen_experts(self.experts, layout.places if self.packing else layout.scored)

    def name_base(self, name: str, digest: str | None, folder: Path | None) -> None:
        """Say of which base the adapter is: `name`, a hub id or the name of a model, with its weights in `folder`."""
        self.base, self.digest, self.folder = f"{name} ({digest or 'weights unknown'})", digest, folder
        if self.adapter is not None:
            self.adapter.peft_config["default"].base_model_name_or_path = name

    def save(self, folder: Path, weights: dict[str, torch.Tensor] | None = None) -> None:
        """Write what is trained: `adapter/` in PEFT's format and trained norms, or the model to `model/`."""
        if self.adapter is not None:
            self.adapter.save_pretrained(str(folder / "adapter"), save_embedding_layers=False)
            (folder / "adapter" / "README.md").write_text(CARD.format(base=self.base))  # PEFT's says no more
            if self.base_scales:
                scales = {f"{name}.weight": norm.get_parameter("weight").detach() for name, norm in self.norms.items()}
                save_file(scales, folder / "norms.safetensors")
        else:
            # Under the model's own names, which `load` reads back; a checkpoint's may differ.
            self.model.save_pretrained(str(folder / "model"), state_dict=weights, save_original_format=False)
            self.tokenizer.save_pretrained(str(folder / "model"))

    def load(self, folder: Path) -> None:
        """Read back what `save` wrote. Raises ConfigError if something else is there."""
        if self.adapter is not None:
            state = _tensors(folder / "adapter" / "adapter_model.safetensors")
            # PEFT silently skips tensors that do not fit, which would leave the fresh adapter in place.
            there, here = ({name: t.shape for name, t in of.items()} for of in (state, self.adapter_state()))
            require(there == here, f"{folder} holds the adapter of other layers, or of another rank; delete it")
            set_peft_model_state_dict(self.adapter, state)
            if self.base_scales:
                scales = _tensors(folder / "norms.safetensors")
                lacking = sorted(f"{name}.weight" for name in self.norms if f"{name}.weight" not in scales)
                require(not lacking, f"{folder / 'norms.safetensors'} lacks {', '.join(lacking[:3])}; delete {folder}")
                with torch.no_grad():
                    for name, norm in self.norms.items():
                        norm.weight.copy_(scales[f"{name}.weight"])  # type: ignore[operator]
        else:
            shards = sorted((folder / "model").glob("*.safetensors"))  # one file, or several for a large model
            state = {name: tensor for shard in shards for name, tensor in _tensors(shard).items()}
            missing, unexpected = self.model.load_state_dict(own_parts(state, self.model.state_dict()), strict=False)
            wrong = [*unexpected, *sorted({*missing} - {"lm_head.weight"})]
            require(not wrong, f"{folder / 'model'} has not the tensors of this model ({', '.join(wrong[:3])})")

    def adapter_state(self) -> dict[str, torch.Tensor]:
        """The adapter's tensors under PEFT's names; empty where there is no adapter."""
        # By default PEFT asks the hub at every call whether the vocabulary has grown.
        return {} if self.adapter is None else get_peft_model_state_dict(self.adapter, save_embedding_layers=False)


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint's file. Raises ConfigError if it is missing or none of safetensors."""
    require(file.is_file(), f"{file} is missing, and must hold the trained weights of this checkpoint")
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} must be a file of safetensors: {error}") from error


def prepare_attention(decoder: PreTrainedModel) -> bool:
    """Give `decoder` the attention of attention.py; returns whether it can be trained without padding."""
    reason = enable_attention(decoder) or why_not_packed(decoder)
    if reason is not None:
        log.info("%s is trained with padding, whatever train.packing: %s", type(decoder).__name__, reason)
    return reason is None


def _trainable_copies(norms: Iterable[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """Give each norm a trainable FP32 copy of its scale, since RL steps are lost in 16 bits; return the originals."""
    originals = []
    for norm in norms:
        compute_in_float32(norm)
        scale = norm.get_parameter("weight").detach()
        has_bias = norm._parameters.get("bias") is not None  # then the original must be in FP32 too
        originals.append(torch.nn.Parameter(scale.float(), requires_grad=False) if has_bias else norm.weight)
        norm.weight = torch.nn.Parameter(scale.float().clone())
    return originals
