"""Which linear layers read a norm's output, and how large their quantization error is.

Noise of relative size s on a norm scale changes the weights of the layers that read it by s in the Frobenius norm:
||W diag(s z)|| = s ||W|| on average. A layer's relative quantization error is measured in the same way, so noise and
error can be compared and matched. No norm feeds o_proj and down_proj directly, so noise never reaches them. The final
norm feeds lm_head, which is not quantized.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

CONSUMERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
BLOCK_NORMS = tuple(CONSUMERS)
FINAL_NORM = "model.norm"


@dataclass(frozen=True)
class NormSites:
    """What a schedule may know of a model: its block norms and the quantization error of each linear layer."""

    names: Collection[str]  # of the block norms, in the model
    errors: Mapping[str, float]  # relative error by layer name

    def error_per_norm(self) -> dict[str, float]:
        """For each norm the root mean square of the errors of the layers that read it, 0 if none does.

        Raises AssertionError if one of these layers has no error.
        """
        per_norm = {}
        for norm in self.names:
            block, _, leaf = norm.rpartition(".")
            layers = [f"{block}.{layer}" for layer in CONSUMERS.get(leaf, ())]
            missing = [layer for layer in layers if layer not in self.errors]
            assert not missing, f"{norm} should feed {', '.join(missing)}, for which no quantization error was measured"
            per_norm[norm] = root_mean_square([self.errors[layer] for layer in layers])
        return per_norm

    def scale_by_error(self) -> tuple[float, dict[str, float]]:
        """The root mean square error of all norms, and each norm's error relative to it. The final norm has 0."""
        errors = self.error_per_norm()
        level = root_mean_square(errors.values())
        return level, {FINAL_NORM: 0.0} | {name: error / level if level else 0.0 for name, error in errors.items()}


def root_mean_square(values: Iterable[float]) -> float:
    """0 for no values."""
    squares = [value * value for value in values]
    return (sum(squares) / max(1, len(squares))) ** 0.5
