"""lora=default: a LoRA adapter on the linear layers (PEFT)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qerl_core.checks import MAX_ALPHA, check_fields, count, flag, number, require
from qerl_core.process.hidden_packages import hidden_packages

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """A low-rank adapter B A * alpha / rank on each target layer; the base stays frozen.

    `targets` is `all`, the linear layers of the blocks, or a list of their names.
    """

    name: str
    rank: int
    alpha: float
    dropout: float
    targets: str | list[str]
    experts: bool
    train_norms: bool

    def __post_init__(self) -> None:
        require(
            self.rank != 0,
            "lora.rank must be at least 1, got 0; to train every weight instead of an adapter use lora=none",
        )
        check_fields(
            self,
            "lora",
            rank=count(),
            alpha=number(above=0, most=MAX_ALPHA),
            dropout=number(0, below=1),
            experts=flag,
            train_norms=flag,
        )
        names = self.targets if isinstance(self.targets, list) else []
        require(
            self.targets == "all" or (len(names) > 0 and all(isinstance(name, str) for name in names)),
            "lora.targets must be all, or a list of names of layers, such as [q_proj, v_proj], got "
            f"{self.targets!r}; to train without an adapter use lora=none",
        )
        require(
            not self.experts or self.dropout == 0,
            f"lora.experts=true has no dropout, as in PEFT, got lora.dropout={self.dropout}; use lora.dropout=0",
        )

    def check_with(self, where: str, shape: Mapping[str, Any]) -> None:
        """Raise ConfigError if the rank is above a target's input width, where the sizes in `shape` tell it."""
        targets = ["q_proj", "down_proj"] if isinstance(self.targets, str) else self.targets
        inputs = {target: "intermediate_size" if target == "down_proj" else "hidden_size" for target in targets}
        self._check_widths(where, {name: shape[key] for name, key in inputs.items() if key in shape})

    def target_modules(self, model: torch.nn.Module, where: str) -> list[str]:
        """What PEFT calls so. Raises ConfigError if a target is no linear layer, or narrower than the rank."""
        import torch

        from qerl_bench.model.adapters import block_linears, shortest_names

        linears = {path: module for path, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
        if isinstance(self.targets, str):
            chosen = block_linears(model)
            require(len(chosen) > 0, f"lora.targets=all finds no linear layer in blocks of {where}; use another model")
        else:
            leaves = {path: path.rpartition(".")[2] for path in linears}
            unknown = [target for target in self.targets if target not in leaves.values()]
            require(
                not unknown,
                f"lora.targets names {', '.join(unknown)}, but the linear layers of {where} are "
                f"{', '.join(sorted(set(leaves.values())))}",
            )
            chosen = {path: module for path, module in linears.items() if leaves[path] in self.targets}
        by_width = sorted(chosen, key=lambda path: linears[path].in_features, reverse=True)
        self._check_widths(where, {path.rpartition(".")[2]: linears[path].in_features for path in by_width})
        return shortest_names(model, chosen)

    def _check_widths(self, where: str, widths: Mapping[str, int]) -> None:
        narrowest = min(widths, key=lambda name: widths[name], default=None)
        require(
            narrowest is None or self.rank <= widths[narrowest],
            f"lora.rank must be at most the input width of the layers it adapts, and {narrowest} of {where} has "
            f"{widths.get(narrowest or '')}, got {self.rank}; a larger rank adds parameters and no freedom. Use a "
            "smaller one, or lora=none to train the weights themselves",
        )

    def attach(self, model: PreTrainedModel, where: str, seed: int) -> PeftModel:
        """Freeze `model` and attach a fresh adapter to its target layers; `seed` decides its initial weights."""
        import torch
        from peft import PeftModel, get_peft_model

        from qerl_bench.model.adapters import (
            adapt_packed_experts,
            experts_targets,
            has_packed_experts,
            names_taken_as_they_are,
        )

        config = self.peft_config(self.target_modules(model, where))
        experts = experts_targets(model) if self.experts else []
        require(
            bool(experts) or not self.experts,
            f"lora.experts=true adapts experts, and {where} has none that can be adapted; use lora.experts=false",
        )
        model.requires_grad_(False)
        with torch.random.fork_rng(), names_taken_as_they_are():
            torch.manual_seed(seed)
            config.target_parameters = None if has_packed_experts(model) else experts or None
            with hidden_packages(), warnings.catch_warnings():  # PEFT asks for the packages at each layer
                warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
                adapter = get_peft_model(model, config)  # 0.21 reads what transformers 5.24 has renamed
            assert isinstance(adapter, PeftModel)
            if experts and not config.target_parameters:
                config.target_parameters = experts
                adapt_packed_experts(adapter, config)
        adapter.eval()
        return adapter

    def peft_config(self, targets: list[str]) -> LoraConfig:
        import torch
        from peft import LoraConfig

        from qerl_bench.model.kernels import LoRALinear

        config = LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,  # type: ignore[arg-type]  # PEFT divides by the rank; fractions are fine
            lora_dropout=self.dropout,
            target_modules=targets,
            bias="none",
            task_type="CAUSAL_LM",
        )
        config._register_custom_module({torch.nn.Linear: LoRALinear})  # type: ignore[dict-item]
        return config
