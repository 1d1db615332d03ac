"""aqn=format_error: constant Gaussian noise as large as the error that a format would make on these very weights.

The control that separates "4-bit weights" from "perturbed weights": an unquantized model whose norms carry noise of the
relative size of the format's error, layer by layer. If quantization helps only because it perturbs, this helps as much.
It is not the same error: it acts on columns instead of single weights, and spares o_proj and down_proj.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.aqn.base import OpenLoop, Schedule, SigmaController
from qerl_bench.aqn.constant import Constant
from qerl_bench.aqn.norm_consumers import error_of_norms, root_mean_square
from qerl_bench.checks import require
from qerl_bench.quant.base import WeightFormat

if TYPE_CHECKING:
    from qerl_bench.aqn.spec import NoiseSpec
    from qerl_bench.model.policy import Policy


@dataclass(frozen=True, kw_only=True)
class FormatError(Schedule):
    """sigma of a norm is the relative error of packing the weights it feeds in `format`, measured as the run starts."""

    name: str
    format: WeightFormat

    def __post_init__(self) -> None:
        require(
            self.format.bits_per_weight is not None,
            f"aqn.format={self.format.name} makes no error; choose a 4-bit format, for example quant@aqn.format=nvfp4",
        )

    def check_with(self, quant: WeightFormat, injection: NoiseSpec) -> None:
        require(
            quant.bits_per_weight is None,
            f"aqn=format_error stands in for a format's error on unquantized weights, but quant={quant.name} makes its "
            "own. Use quant=bf16; aqn=layerwise follows the error of a 4-bit base",
        )
        require(
            injection.relative,
            "aqn=format_error measures an error relative to the weights: it needs noise.relative=true",
        )

    def controller(self, policy: Policy, total_steps: int) -> SigmaController:
        import torch

        from qerl_bench.quant.linear import PackedLinear, pack_linear

        errors = {}
        with torch.no_grad():
            for name in policy.layers:
                module = policy.model.get_submodule(name)
                linear = getattr(module, "base_layer", module)  # beside an adapter
                assert isinstance(linear, torch.nn.Linear), name
                weight = linear.weight.detach().float()
                packed = pack_linear(name, linear, self.format)
                assert isinstance(packed, PackedLinear), name
                errors[name] = float((packed.dequantized() - weight).norm() / weight.norm().clamp(min=1e-30))
        of_norms = error_of_norms(policy.norms, errors)
        level = root_mean_square(of_norms.values())
        factors = {name: error / level for name, error in of_norms.items()}
        return OpenLoop(Constant(name=self.name, level=level), total_steps, {"model.norm": 0.0} | factors)
