"""How large the quantization error of the layers behind a norm is.

Noise of relative size s on a norm scale changes the weights of the layers that read it by s in the Frobenius norm:
||W diag(s z)|| = s ||W|| on average. A layer's relative quantization error is measured in the same way, so noise and
error can be compared and matched. No norm feeds o_proj and down_proj directly, so noise never reaches them. The final
norm feeds the head, which is not quantized.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from qerl_core.checks import require


@dataclass(frozen=True)
class NormErrors:
    """What a schedule may know of a model: which layers each norm feeds, and the quantization error of each layer."""

    consumers: Mapping[str, Sequence[str]]  # by norm of a block: the layers that read it, without routers
    final: str | None  # the norm before the head
    errors: Mapping[str, float]  # relative error by layer

    def error_per_norm(self) -> dict[str, float]:
        """For each norm of a block the root mean square of the errors of the layers that read it.

        Raises ConfigError if one of these layers has no error.
        """
        per_norm = {}
        for norm, layers in self.consumers.items():
            missing = [layer for layer in layers if layer not in self.errors]
            require(
                not missing,
                f"aqn follows the quantization error of the layers behind each norm, and none was measured for "
                f"{', '.join(missing)} behind {norm}. Use a schedule that needs none, such as aqn=exp",
            )
            per_norm[norm] = root_mean_square([self.errors[layer] for layer in layers])
        return per_norm

    def scale_by_error(self) -> tuple[float, dict[str, float]]:
        """The root mean square error of all norms, and each norm's error relative to it. The final norm has 0."""
        errors = self.error_per_norm()
        level = root_mean_square(errors.values())
        scales = {name: error / level if level else 0.0 for name, error in errors.items()}
        return level, scales if self.final is None else scales | {self.final: 0.0}


def root_mean_square(values: Iterable[float]) -> float:
    """0 for no values."""
    squares = [value * value for value in values]
    return (sum(squares) / max(1, len(squares))) ** 0.5
