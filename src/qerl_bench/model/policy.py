"""What is being trained: a packed base, its adapter and its noise sites as one object.

The same weights serve sampling and training. Adapters are never merged: a merge into 4-bit weights would round almost
all of the update away.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qerl_bench.aqn.injector import NoiseInjector, NoiseReport, block_norms, keep_input_dtype, noise_sites, perturbed
from qerl_bench.checks import require
from qerl_bench.config import Experiment
from qerl_bench.lora.default import LoRA
from qerl_bench.model.kernels import choose_kernels, why_not_fused
from qerl_bench.model.lm_head import token_scores
from qerl_bench.model.load import load_packed
from qerl_bench.model.packing import Packing, enable, packed_hidden
from qerl_bench.quant.error_decomposition import LayerReport
from qerl_bench.records import Message, Prompt
from qerl_bench.seeding import derive
from qerl_bench.task.prompts import rendered

log = logging.getLogger(__name__)


@dataclass
class TokenStats:
    """Per-token numbers of the policy at given tokens, each (B, T) in FP32 and 0 where the mask is false."""

    logprobs: torch.Tensor  # with gradient
    entropy: torch.Tensor  # nats, full vocabulary, at the rollout temperature; with gradient only where asked for
    entropy_t1: torch.Tensor  # the same at temperature 1
    likeliest: torch.Tensor  # 1 where greedy decoding would have chosen the token


class Policy:
    """A causal LM with a packed base. `model` holds the adapter modules; `adapter` is PEFT's handle on them, or None.

    `noise` is the noise of the run that the policy was built for.
    """

    noise: NoiseInjector
    kernels: Mapping[str, str]  # by layer, as chosen when the policy was built
    fused = False  # whether the loss head and the draw of tokens use fused kernels

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        adapter: PeftModel | None,
        layers: dict[str, LayerReport],
        packing: bool,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.adapter = adapter
        self.layers = layers
        self.packing = packing
        if packing:
            enable(model)
        self.norms = block_norms(model, model.config.num_hidden_layers)
        self.base_scales: list[torch.nn.Parameter] = []  # of `norms`, where training changes them
        self.device = next(model.parameters()).device
        self.stop_ids = stop_ids(model, tokenizer)
        pad_id = tokenizer.pad_token_id
        self.pad_id = pad_id if isinstance(pad_id, int) else min(self.stop_ids)

    @classmethod
    def build(cls, experiment: Experiment, base: Path | None, device: str) -> Policy:
        """Load the base, pack it in the run's format, and attach a fresh adapter seeded by the run's seed."""
        model, tokenizer, layers = load_packed(experiment, base, device)
        model.eval()
        if experiment.train.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        adapter = None
        if experiment.lora.rank > 0:
            check_targets(model, experiment.lora, f"model={experiment.model.name}")
            model.requires_grad_(False)
            with torch.random.fork_rng():
                torch.manual_seed(derive(experiment.seed, "adapter"))
                adapter = get_peft_model(model, experiment.lora.peft_config())
            adapter.eval()
            assert isinstance(adapter, PeftModel)
        policy = cls(model, tokenizer, adapter, layers, experiment.train.packing)
        if experiment.lora.train_norms:
            policy.train_norms()
        policy.noise = policy.noise_of(experiment)
        policy.kernels = choose_kernels(model, layers, experiment.kernel)
        reason = why_not_fused(experiment.kernel, policy.device)
        policy.fused = reason is None
        log.info("kernel of the loss head and of sampling: %s", "triton" if reason is None else f"torch ({reason})")
        return policy

    def train_norms(self) -> None:
        """Let the norm scales of the blocks learn too, in FP32: steps of RL are too small for 16 bits."""
        for norm in self.norms.values():
            self.base_scales.append(norm.weight)  # type: ignore[arg-type]
            norm.weight = torch.nn.Parameter(norm.weight.detach().float().clone())  # type: ignore[union-attr]
            norm.register_forward_hook(keep_input_dtype)

    @property
    def trainable(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def prompt_text(self, messages: tuple[Message, ...]) -> str:
        """The prompt as the model reads it, ready for the completion to follow."""
        return rendered(self.tokenizer, messages)

    def prompt_ids(self, messages: tuple[Message, ...]) -> list[int]:
        """Token ids of `prompt_text`."""
        return self.tokenizer(self.prompt_text(messages), add_special_tokens=False)["input_ids"]  # type: ignore[return-value]

    def ids_of(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: its own, or those of its messages."""
        return self.prompt_ids(prompt.messages) if prompt.token_ids is None else list(prompt.token_ids)

    def completion_ids(self, text: str) -> list[int]:
        """Token ids of a whole completion, its stop token included."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [*ids, self.tokenizer.eos_token_id]  # type: ignore[misc]

    def train_mode(self, on: bool) -> None:
        """Switch dropout (of the adapter) on for the training pass, off for everything else."""
        self.model.train(on)

    def perturbed(self, sigma: float, seed: int) -> AbstractContextManager[NoiseReport]:
        """Context in which the norm scales carry one draw of noise of standard deviation `sigma`."""
        return perturbed(self.norms, sigma, seed)

    def noise_of(self, experiment: Experiment) -> NoiseInjector:
        """The noise of a whole run: its schedule at work, injected the way the run asks for."""
        sites = noise_sites(self.model, self.model.config.num_hidden_layers, experiment.noise.norms)
        return NoiseInjector(
            experiment.noise, experiment.aqn.controller(self, experiment.steps), sites, experiment.seed
        )

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
        """Log-probability and entropy of each masked token of right-padded `input_ids` (B, T) given those before it.

        Padding sits behind every real token, so causal attention alone keeps it out; with packing it is not even
        computed. The vocabulary projection runs only where `mask` (B, T) is true, a few tokens at a time.
        """
        predicts = mask.roll(-1, dims=1)  # (B, T) position t predicts token t + 1; column 0 of `mask` is never true
        if self.packing:
            packing = Packing.of(mask)
            hidden = packed_hidden(self.model, input_ids, packing)[packing.pack(predicts)]  # (M, H)
        else:
            trunk: torch.nn.Module = self.model.get_submodule("model")
            hidden = trunk(input_ids=input_ids, use_cache=False).last_hidden_state[predicts]  # (M, H)
        vocabulary = self.model.config.vocab_size
        head = self.model.lm_head
        scores = token_scores(
            head, hidden, input_ids[mask], temperature, vocabulary, entropy_gradient, fused=self.fused
        )

        def spread(values: torch.Tensor) -> torch.Tensor:
            return torch.zeros(mask.shape, dtype=torch.float32, device=mask.device).masked_scatter(mask, values)

        return TokenStats(*(spread(score) for score in scores))

    def save(self, folder: Path) -> None:
        """Write the trained part: `adapter/` in PEFT's format, and the norms if trained; or `model/`, all of it."""
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
            # PEFT skips what does not fit, and an adapter of zeros looks like one that is not trained yet.
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
        # By default PEFT asks the hub, at every call, whether the vocabulary has grown.
        return {} if self.adapter is None else get_peft_model_state_dict(self.adapter, save_embedding_layers=False)


def check_targets(model: torch.nn.Module, lora: LoRA, where: str) -> None:
    """Raise ConfigError if a name in lora.targets is not that of a linear layer of the model, or the rank is too large."""
    widths: dict[str, int] = {}  # of the narrowest layer of each name
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            name = path.rsplit(".", 1)[-1]
            widths[name] = min(widths.get(name, module.in_features), module.in_features)
    unknown = [target for target in lora.targets if target not in widths]
    require(
        not unknown,
        f"lora.targets names {', '.join(unknown)}, but the linear layers of this model are {', '.join(sorted(widths))}",
    )
    lora.check_widths(where, {name: widths[name] for name in lora.targets})


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every token that ends a completion: the tokenizer's, and those that the model's generation config adds."""
    listed = model.generation_config.eos_token_id if model.generation_config is not None else None
    named = [tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])]
    ids = frozenset(token for token in named if isinstance(token, int))
    assert ids, "the model names no end-of-text token"
    return ids
