"""Adds noise to the norm scales of a model, and restores them bit for bit.

QeRL perturbs the two RMSNorm scales of each block, w + Z with Z ~ N(0, sigma^2). RMSNorm multiplies by w just before a
linear layer, so this equals multiplicative noise 1 + Z / w on the columns of that layer's weights, and needs no tensor
of the size of the weights. In BF16, rounding removes a small Z. The noisy scale is therefore kept in FP32 while it is
in use, unless `noise.add_dtype` asks for the rounding.

Left out: a new draw for every forward pass, that is for every sampled token. One sentence of the paper says so; its
Algorithm 1 and its code draw once per step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from qerl_bench.aqn.base import SigmaController
from qerl_bench.aqn.norm_consumers import BLOCK_NORMS, FINAL_NORM
from qerl_bench.aqn.spec import NoiseSpec
from qerl_bench.checks import TrainingStopped
from qerl_bench.seeding import derive

log = logging.getLogger(__name__)
Value = TypeVar("Value")
Norms = Mapping[str, torch.nn.Module]  # by their names in the model
Scales = dict[str, torch.Tensor]  # by the norms' names; scales, or noise of the same shapes


@dataclass(frozen=True)
class NoiseReport:
    """What one draw asked for, and how it really changed the scales."""

    sigma: float  # asked for
    sigma_realised: float  # root mean square of (noisy - clean) over all scales, as stored; over |clean| if relative
    norms_perturbed: int  # norms in which at least one scale changed
    scales_changed: float  # share of the scales that changed


def block_norms(model: torch.nn.Module, layers: int) -> dict[str, torch.nn.Module]:
    """The two norms of each transformer block, by name: the one before attention and the one before the MLP.

    Raises AssertionError unless there are exactly 2 * `layers` of them, so that noise never misses a layer in silence.
    """
    norms = {name: module for name, module in model.named_modules() if name.rsplit(".", 1)[-1] in BLOCK_NORMS}
    assert len(norms) == 2 * layers, (
        f"found {len(norms)} block norms in {type(model).__name__}, expected {2 * layers} "
        f"(two in each of {layers} blocks, named {' and '.join(BLOCK_NORMS)})"
    )
    return norms


def norms_to_perturb(model: torch.nn.Module, layers: int, choice: str) -> dict[str, torch.nn.Module]:
    """The norms that `noise.norms` = `choice` perturbs, block norms first."""
    if choice == "missed":
        return {}
    final = {FINAL_NORM: model.get_submodule(FINAL_NORM)} if choice == "blocks_final" else {}
    return block_norms(model, layers) | final


class NoiseInjector:
    """Draws the noise of one run and puts it into the norms.

    Run seed, step and number of the draw within the step decide a draw. It is made on the CPU, in the order of the
    norms, so every device and process gets the same noise.
    """

    def __init__(self, spec: NoiseSpec, controller: SigmaController, norms: Norms, seed: int) -> None:
        self.spec = spec
        self.controller = controller
        self.norms = norms
        self.seed = seed
        self.latest_draw = (0, 0)  # step and number within the step
        self.noise: Scales = {}  # of the latest draw
        self.accumulated: Scales = {}  # noisy scales that keep the noise of earlier draws (noise.accumulate)
        if spec.norms == "missed":
            log.warning(
                "noise.norms=missed: no norm gets noise, as in QeRL's released code; aqn/sigma is never put into effect"
            )

    def for_rollout(self, step: int, draw: int) -> AbstractContextManager[NoiseReport]:
        """Context in which the norms have draw `draw` of step `step`; the same draw can be used several times.

        The draw is made and checked by the call. Raises TrainingStopped if it leaves a norm unchanged in FP32.
        """
        sigma = self.controller.sigma(step)
        if (step, draw) != self.latest_draw:
            self.latest_draw = (step, draw)
            self._draw(sigma, derive(self.seed, "noise", "run" if self.spec.cadence == "run" else step, draw))
        noisy = self._noisy_scales()
        report = noise_report(self.norms, noisy, sigma, self.spec.relative)
        if self.spec.add_dtype == "float32" and report.norms_perturbed < len(self.noise):
            raise TrainingStopped(
                f"noise of sigma {sigma:g} changed {report.norms_perturbed} of {len(self.noise)} norms: rounding of "
                "their FP32 scales removed it. Use a larger sigma, or aqn=none"
            )
        return _scales_replaced(self.norms, noisy, report)

    @property
    def present(self) -> bool:
        """Whether the scales of the latest rollout differ from the clean ones."""
        return bool(self.noise or self.accumulated)

    def for_training(self) -> AbstractContextManager[None]:
        """Context in which the norms have the noise of the latest rollout; norm scales in training get gradients."""
        return _scales_replaced(self.norms, self._noisy_scales(), None)

    def state(self) -> dict[str, Any]:
        """What the next step's noise depends on besides its seed, as plain numbers and tensors."""
        return {"held": dict(self.accumulated), "controller": self.controller.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.accumulated = dict(state["held"])
        self.controller.restore(state["controller"])

    def _draw(self, sigma: float, seed: int) -> None:
        self.noise = {}
        if sigma > 0:
            self.noise = draw_noise(self.norms, sigma, seed, self.spec.relative, self.controller.per_norm_scale)
        accumulating = {"none": set(), "final": {FINAL_NORM}, "all": set(self.norms)}[self.spec.accumulate]
        for name in self.noise.keys() & accumulating:
            before = self.accumulated.get(name, scale_of(self.norms[name]).detach())
            self.accumulated[name] = add_noise(before, self.noise[name], self.spec.add_dtype)

    def _noisy_scales(self) -> Scales:
        """The scales of the norms that have noise now."""
        fresh = {
            name: add_noise(scale_of(self.norms[name]), noise, self.spec.add_dtype)
            for name, noise in self.noise.items()
            if name not in self.accumulated
        }
        return fresh | self.accumulated


def scale_of(norm: torch.nn.Module) -> torch.Tensor:
    """The vector that the norm multiplies by."""
    weight = norm.weight
    assert isinstance(weight, torch.Tensor)
    return weight


def draw_noise(norms: Norms, sigma: float, seed: int, relative: bool, per_norm_scale: Mapping[str, float]) -> Scales:
    """Normal FP32 noise for each norm, of standard deviation `sigma` times the norm's factor (1 if not named).

    `relative` multiplies it by |scale|. Norms with factor 0 get none. One transfer to the device for all of them.
    """
    scales = {name: scale_of(norm).detach() for name, norm in norms.items()}
    if not scales:
        return {}
    sizes = [scale.numel() for scale in scales.values()]
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(sum(sizes), generator=generator, dtype=torch.float32).to(next(iter(scales.values())).device)
    noise = {}
    for (name, scale), z in zip(scales.items(), normal.split(sizes), strict=True):
        factor = per_norm_scale.get(name, 1.0)
        if factor > 0:
            scaled = sigma * factor * z.view(scale.shape)
            noise[name] = scaled * scale.float().abs() if relative else scaled
    return noise


def add_noise(scale: torch.Tensor, noise: torch.Tensor, add_dtype: str) -> torch.Tensor:
    """Scale plus noise: added and kept in FP32, or both rounded to BF16 and added there, as in the released code."""
    if add_dtype == "bfloat16":
        return (scale.bfloat16() + noise.bfloat16()).to(scale.dtype)
    return scale.float() + noise


@torch.no_grad()
def noise_report(norms: Norms, noisy: Scales, sigma: float, relative: bool) -> NoiseReport:
    """Compare the scales `noisy` with each norm's own. One transfer from the device for all of them."""
    if not noisy:
        return NoiseReport(sigma, 0.0, 0, 0.0)
    counts, squares = [], []
    for name, scale in noisy.items():
        clean = scale_of(norms[name]).double()
        change = scale.double() - clean
        counts.append((change != 0).sum().double())
        size = change / clean.abs() if relative else change
        squares.append(torch.where(change != 0, size, 0.0).square().sum())
    *changed, square = torch.stack([*counts, torch.stack(squares).sum()]).tolist()
    scales = sum(scale_of(norm).numel() for norm in norms.values())
    return NoiseReport(sigma, (square / scales) ** 0.5, sum(count > 0 for count in changed), sum(changed) / scales)


@contextmanager
def _scales_replaced(norms: Norms, scales: Scales, value: Value) -> Iterator[Value]:
    """Inside the context, which gives `value`, the norms named in `scales` multiply by those tensors.

    The noisy scale takes the parameter's place, so the forward pass needs no extra tensor. Other readers of
    `norm.weight`, such as an engine that copies weights, see the noisy scale too.
    """
    clean = {name: norms[name]._parameters["weight"] for name in scales}
    hooks = []
    try:
        for name, scale in scales.items():
            norms[name]._parameters["weight"] = scale  # type: ignore[assignment]  # a tensor: gradients flow on
            if scale.dtype != clean[name].dtype:  # type: ignore[union-attr]
                hooks.append(norms[name].register_forward_hook(keep_input_dtype))
        yield value
    finally:
        for hook in hooks:
            hook.remove()
        for name, parameter in clean.items():
            norms[name]._parameters["weight"] = parameter


def noise_metrics(reports: list[NoiseReport]) -> dict[str, float]:
    """The metrics of a step from the reports of its draws: root mean square of the sizes, minimum of the counts."""
    return {
        "aqn/sigma": reports[0].sigma,
        "aqn/sigma_realised": (sum(report.sigma_realised**2 for report in reports) / len(reports)) ** 0.5,
        "aqn/norms_perturbed": min(report.norms_perturbed for report in reports),
        "aqn/scales_changed": min(report.scales_changed for report in reports),
    }


def keep_input_dtype(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    """Forward hook for a norm whose scale is more precise than the activations: cast the output back."""
    return output.to(inputs[0].dtype)
