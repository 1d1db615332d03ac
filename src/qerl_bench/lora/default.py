"""lora=default: a LoRA adapter on the linear layers (PEFT)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qerl_bench.checks import check_fields, count, flag, number, positive, require

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """A low-rank adapter B A * alpha / rank on each target layer; the base stays frozen and is never merged with it."""

    name: str
    rank: int
    alpha: float
    dropout: float
    targets: list[str]
    train_norms: bool

    def __post_init__(self) -> None:
        require(
            self.rank != 0,
            "lora.rank must be at least 1, got 0; to train every weight instead of an adapter use lora=none",
        )
        check_fields(self, "lora", rank=count(), alpha=positive, dropout=number(0, below=1), train_norms=flag)
        require(
            isinstance(self.targets, list) and len(self.targets) > 0 and all(isinstance(t, str) for t in self.targets),
            f"lora.targets must list the names of layers, such as [q_proj, v_proj], got {self.targets!r}; to train "
            "without an adapter use lora=none",
        )

    def check_with(self, where: str, shape: Mapping[str, Any]) -> None:
        """Raise ConfigError if the rank is above a target's input width, where the sizes in `shape` tell it."""
        inputs = {target: "intermediate_size" if target == "down_proj" else "hidden_size" for target in self.targets}
        self._check_widths(where, {name: shape[key] for name, key in inputs.items() if key in shape})

    def check_targets(self, model: torch.nn.Module, where: str) -> None:
        """Raise ConfigError if a target is no linear layer of `model`, or narrower than the rank."""
        import torch

        widths: dict[str, int] = {}  # of the narrowest layer of each name
        for path, module in model.named_modules():
            if isinstance(module, torch.nn.Linear):
                name = path.rsplit(".", 1)[-1]
                widths[name] = min(widths.get(name, module.in_features), module.in_features)
        unknown = [target for target in self.targets if target not in widths]
        require(
            not unknown,
            f"lora.targets names {', '.join(unknown)}, but the linear layers of {where} are "
            f"{', '.join(sorted(widths))}",
        )
        self._check_widths(where, {name: widths[name] for name in self.targets})

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

        self.check_targets(model, where)
        model.requires_grad_(False)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            adapter = get_peft_model(model, self.peft_config())
        adapter.eval()
        assert isinstance(adapter, PeftModel)
        return adapter

    def peft_config(self) -> LoraConfig:
        import torch
        from peft import LoraConfig

        from qerl_bench.model.kernels import LoRALinear

        config = LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,  # type: ignore[arg-type]  # PEFT divides by the rank; fractions are fine
            lora_dropout=self.dropout,
            target_modules=list(self.targets),
            bias="none",
            task_type="CAUSAL_LM",
        )
        config._register_custom_module({torch.nn.Linear: LoRALinear})  # type: ignore[dict-item]
        return config
