"""aqn=format_error: constant Gaussian noise as large as the error that a format would make on the same weights.

A control that separates "4-bit weights" from "perturbed weights": an unquantized model with noise on its norms, as
large as the format's relative error, norm by norm. If quantization helps only because it perturbs the policy, this
noise helps as much. The two perturbations differ in structure: the noise scales whole columns, not single weights, and
does not reach o_proj and down_proj.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.aqn.base import OpenLoop, Schedule, SigmaController
from qerl_bench.aqn.constant import Constant
from qerl_bench.aqn.norm_errors import NormErrors
from qerl_bench.quant.base import BlockFormat, WeightFormat
from qerl_core.checks import require

if TYPE_CHECKING:
    import torch

    from qerl_bench.aqn.spec import NoiseSpec


@dataclass(frozen=True, kw_only=True)
class FormatError(Schedule):
    """Sigma of a norm is the relative error of packing its consumers in `format`, measured when the run starts."""

    name: str
    format: WeightFormat

    def __post_init__(self) -> None:
        require(
            self.format.bits_per_weight is not None,
            f"aqn.format={self.format.name} makes no error; choose a 4-bit format, for example quant@aqn.format=nvfp4",
        )
        whole = not isinstance(self.format, BlockFormat) or self.format.weights_alone
        require(
            whole,
            "aqn=format_error imitates the error of weights in all blocks; leave aqn.format.activations, "
            "aqn.format.keep_first and aqn.format.keep_last out",
        )

    @property
    def error_format(self) -> WeightFormat:
        return self.format

    def check_with(self, quant: WeightFormat, noise: NoiseSpec) -> None:
        noise.require_norms("format_error")
        require(
            quant.bits_per_weight is None,
            f"aqn=format_error imitates a format's error on unquantized weights, but quant={quant.name} makes an error "
            "of its own. Use quant=bf16, or aqn=layerwise, which follows the error of a 4-bit base",
        )
        require(
            noise.relative,
            "aqn=format_error measures an error relative to the weights: it needs noise.relative=true",
        )

    def controller(self, norm_errors: NormErrors, total_steps: int) -> SigmaController:
        level, per_norm_scale = norm_errors.scale_by_error()
        return OpenLoop(Constant(name=self.name, level=level), total_steps, per_norm_scale)


def packing_errors(model: torch.nn.Module, layers: Iterable[str], weight_format: WeightFormat) -> dict[str, float]:
    """Relative error ||W - Q|| / ||W|| that packing in `weight_format` would make, by layer; `model` stays as it is.

    A layer is a linear layer, or a parameter with the matrices of all experts.
    """
    import torch

    from qerl_bench.quant.linear import PackedLinear, pack_linear

    errors = {}
    with torch.no_grad():
        for name in layers:
            gaps, sizes = [], []
            for linear in _linears(model, name):
                weight = linear.weight.detach().float()
                packed = pack_linear(name, linear, weight_format)
                assert isinstance(packed, PackedLinear), name
                gaps.append(float((packed.dequantized() - weight).norm()))
                sizes.append(float(weight.norm()))
            errors[name] = float(torch.tensor(math.hypot(*gaps)) / torch.tensor(math.hypot(*sizes)).clamp(min=1e-30))
    return errors


def _linears(model: torch.nn.Module, name: str) -> Iterator[torch.nn.Linear]:
    import torch

    from qerl_bench.quant.experts import matrices_of

    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    layer = getattr(module, leaf)
    if isinstance(layer, torch.nn.Module):
        linear = getattr(layer, "base_layer", layer)  # PEFT's layer keeps the original one there
        assert isinstance(linear, torch.nn.Linear), name
        yield linear
        return
    for matrix in matrices_of(module, layer):
        linear = torch.nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, device="meta")
        linear.weight = torch.nn.Parameter(matrix, requires_grad=False)
        yield linear
