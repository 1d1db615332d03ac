"""Adds noise to the norm scales of a model, or to its adapter, and restores them bit for bit.

QeRL perturbs the two RMSNorm scales of each block, w + Z with Z ~ N(0, sigma^2). RMSNorm multiplies by w just before a
linear layer, so this equals multiplicative noise 1 + Z / w on the columns of that layer's weights, and needs no tensor
of the size of the weights. Norms that store w and multiply by 1 + w get the same Z, and 1 + w counts as their scale. In
BF16, rounding removes a small Z. The noisy scale is therefore kept in FP32 while it is in use, unless `noise.add_dtype`
asks for the rounding. Noise on adapters (`noise.where`): `adapted_layer.py`.

Left out: a new draw for every forward pass, that is for every sampled token. One sentence of the paper says so; its
Algorithm 1 and its code draw once per step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from qerl_bench.aqn.adapted_layer import AdaptedLayer
from qerl_bench.aqn.base import SigmaController
from qerl_bench.aqn.spec import NoiseSpec
from qerl_core.checks import TrainingStopped
from qerl_core.seeding import derive

log = logging.getLogger(__name__)
Value = TypeVar("Value")
Norms = Mapping[str, torch.nn.Module]  # by their names in the model; the matrices B of adapters are treated alike
Scales = dict[str, torch.Tensor]  # by the norms' names; stored scales, or noise of the same shapes
Offsets = Mapping[str, float]  # by the norms' names: 1.0 for those that multiply by 1 + w, not by the stored w


@dataclass(frozen=True)
class NoiseReport:
    """What one draw asked for, and how it really changed the scales."""

    sigma: float  # asked for
    sigma_realised: float  # root mean square of (noisy - clean) over all scales, as stored, in the unit of sigma
    norms_perturbed: int  # norms, or adapters, in which at least one number changed
    scales_changed: float  # share of the scales that changed


class NoiseInjector:
    """Draws the noise of one run and puts it into the norms, or into `adapters`, as `spec.where` says.

    Run seed, step and number of the draw within the step decide a draw. It is made on the CPU, in the order of the
    norms, so every device and process gets the same noise. `final` is the norm before the head.
    """

    def __init__(
        self,
        spec: NoiseSpec,
        controller: SigmaController,
        norms: Norms,
        offsets: Offsets,
        final: str | None,
        seed: int,
        adapters: Mapping[str, AdaptedLayer] | None = None,
    ) -> None:
        self.spec = spec
        self.controller = controller
        self.norms = norms
        self.offsets = offsets
        self.final = final
        self.seed = seed
        self.adapters = adapters or {}
        self.latest_draw = (0, 0)  # step and number within the step
        self.noise: Scales = {}  # of the latest draw
        self.accumulated: Scales = {}  # noisy scales that keep the noise of earlier draws (noise.accumulate)
        if spec.norms == "missed":
            log.warning(
                "noise.norms=missed: no norm gets noise, as in QeRL's released code; aqn/sigma is never put into effect"
            )

    @property
    def noisy(self) -> Norms:
        """What the noise goes to."""
        on_adapters = self.spec.where == "adapters"
        return {name: layer.b for name, layer in self.adapters.items()} if on_adapters else self.norms

    def for_rollout(self, step: int, draw: int) -> AbstractContextManager[NoiseReport]:
        """Context in which the norms have draw `draw` of step `step`; the same draw can be used several times.

        The draw is made and checked by the call. Raises TrainingStopped if it leaves a norm unchanged in FP32.
        """
        sigma = self.controller.sigma(step)
        if (step, draw) != self.latest_draw:
            self.latest_draw = (step, draw)
            self._draw(sigma, derive(self.seed, "noise", "run" if self.spec.cadence == "run" else step, draw))
        scales = self._noisy_scales()
        report = noise_report(self.noisy, scales, sigma, self._units())
        if self.spec.add_dtype == "float32" and report.norms_perturbed < len(self.noise):
            raise TrainingStopped(
                f"noise of sigma {sigma:g} changed {report.norms_perturbed} of {len(self.noise)} {self.spec.where}: "
                "rounding of their FP32 numbers removed it. Use a larger sigma, or aqn=none"
            )
        return self._in_place_of_clean(scales, report)

    @property
    def present(self) -> bool:
        """Whether the scales of the latest rollout differ from the clean ones."""
        return bool(self.noise or self.accumulated)

    def for_training(self) -> AbstractContextManager[None]:
        """Context in which the norms have the noise of the latest rollout; norm scales in training get gradients."""
        return self._in_place_of_clean(self._noisy_scales(), None)

    def median_scale(self) -> float | None:
        """The median size of the scales that get noise, which sigma is compared with; None on adapters."""
        if self.spec.where == "adapters" or not self.norms:
            return None
        return 1.0 if self.spec.relative else float(torch.cat([*self._sizes().values()]).median())

    def scale_share(self) -> dict[str, float]:
        """The latest sigma over the median scale, as metric; none on adapters, nor where sigma differs by norm."""
        median = None if self.controller.per_norm_scale else self.median_scale()
        return {} if median is None else {"aqn/sigma_share": self.controller.sigma(self.latest_draw[0]) / median}

    def state(self) -> dict[str, Any]:
        """What the next step's noise depends on besides its seed, as plain numbers and tensors."""
        return {"held": dict(self.accumulated), "controller": self.controller.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.accumulated = dict(state["held"])
        self.controller.restore(state["controller"])

    def _draw(self, sigma: float, seed: int) -> None:
        self.noise = {}
        if sigma > 0:
            self.noise = draw_noise(self.noisy, sigma, seed, self._units(), self.controller.per_norm_scale)
        accumulating = {"none": set(), "final": {self.final}, "all": set(self.norms)}[self.spec.accumulate]
        for name in self.noise.keys() & accumulating:
            before = self.accumulated.get(name, scale_of(self.norms[name]).detach())
            self.accumulated[name] = add_noise(before, self.noise[name], self.spec.add_dtype)

    def _noisy_scales(self) -> Scales:
        """The scales of the norms that have noise now."""
        noisy = self.noisy
        fresh = {
            name: add_noise(scale_of(noisy[name]), noise, self.spec.add_dtype)
            for name, noise in self.noise.items()
            if name not in self.accumulated
        }
        return fresh | self.accumulated

    def _units(self) -> Scales | None:
        """What sigma is multiplied by for each scale or matrix, in its shape or one for all; None for 1."""
        if self.spec.where == "adapters":
            return {name: layer.unit() for name, layer in self.adapters.items()}
        if not self.spec.relative:
            return None
        return self._sizes()

    def _sizes(self) -> Scales:
        """The size of each number that the norms multiply by, without its sign."""
        return {name: (self.offsets[name] + scale_of(norm).detach().float()).abs() for name, norm in self.norms.items()}

    def _in_place_of_clean(self, scales: Scales, value: Value) -> AbstractContextManager[Value]:
        used = _matrices_overwritten if self.spec.where == "adapters" else _scales_replaced
        return used(self.noisy, scales, value)


def scale_of(norm: torch.nn.Module) -> torch.Tensor:
    """The vector that the norm stores: it multiplies by it, or by 1 + it."""
    weight = norm.weight
    assert isinstance(weight, torch.Tensor)
    return weight


def draw_noise(
    norms: Norms, sigma: float, seed: int, units: Scales | None, per_norm_scale: Mapping[str, float]
) -> Scales:
    """Normal FP32 noise for each norm, of standard deviation `sigma` times the norm's factor (1 if not named).

    With `units` it is relative: multiplied by them. Norms with factor 0 get none. One transfer to the device for all of
    them.
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
            noise[name] = scaled if units is None else scaled * units[name]
    return noise


def add_noise(scale: torch.Tensor, noise: torch.Tensor, add_dtype: str) -> torch.Tensor:
    """Scale plus noise: added and kept in FP32, or both rounded to BF16 and added there, as in the released code."""
    if add_dtype == "bfloat16":
        return (scale.bfloat16() + noise.bfloat16()).to(scale.dtype)
    return scale.float() + noise


@torch.no_grad()
def noise_report(norms: Norms, noisy: Scales, sigma: float, units: Scales | None) -> NoiseReport:
    """Compare the scales `noisy` with each norm's own, relative to `units` if they are given.

    One transfer from the device for all of them.
    """
    if not noisy:
        return NoiseReport(sigma, 0.0, 0, 0.0)
    counts, squares = [], []
    for name, scale in noisy.items():
        clean = scale_of(norms[name]).double()
        change = scale.double() - clean
        counts.append((change != 0).sum().double())
        size = change if units is None else change / units[name].double()
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
    with ExitStack() as stack:
        for name, scale in scales.items():
            stack.enter_context(_scale_replaced(norms[name], scale))
        yield value


@contextmanager
def _scale_replaced(norm: torch.nn.Module, scale: torch.Tensor) -> Iterator[None]:
    clean = dict(norm._parameters)
    hooks: list[RemovableHandle] = []
    try:
        if scale.dtype != scale_of(norm).dtype:
            hooks = compute_in_float32(norm)
        norm._parameters["weight"] = scale  # type: ignore[assignment]  # a tensor: gradients flow on
        yield
    finally:
        for hook in hooks:
            hook.remove()
        norm._parameters.update(clean)


@contextmanager
def _matrices_overwritten(modules: Norms, matrices: Scales, value: Value) -> Iterator[Value]:
    """Inside the context, which gives `value`, the weights of the modules named in `matrices` hold those numbers.

    The parameters stay where they are: a base in another format shares them, and recordings know their addresses.
    Written past autograd, since a backward pass in a later context finds the same numbers again.
    """
    clean = {name: scale_of(modules[name]).detach().clone() for name in matrices}
    try:
        for name, matrix in matrices.items():
            scale_of(modules[name]).data.copy_(matrix)
        yield value
    finally:
        for name, matrix in clean.items():
            scale_of(modules[name]).data.copy_(matrix)


def noise_metrics(reports: list[NoiseReport]) -> dict[str, float]:
    """The metrics of a step from the reports of its draws: root mean square of the sizes, minimum of the counts."""
    return {
        "aqn/sigma": reports[0].sigma,
        "aqn/sigma_realised": (sum(report.sigma_realised**2 for report in reports) / len(reports)) ** 0.5,
        "aqn/norms_perturbed": min(report.norms_perturbed for report in reports),
        "aqn/scales_changed": min(report.scales_changed for report in reports),
    }


def compute_in_float32(norm: torch.nn.Module) -> list[RemovableHandle]:
    """Hooks for a norm whose scale becomes more precise than the activations: its output is cast back to their dtype.

    RMSNorms of transformers take such a scale. PyTorch's LayerNorm wants one dtype throughout, so a norm with a bias
    gets it in FP32, and its input too.
    """
    bias, dtype = norm._parameters.get("bias"), scale_of(norm).dtype
    if bias is None:
        return [norm.register_forward_hook(keep_input_dtype)]
    norm._parameters["bias"] = torch.nn.Parameter(bias.detach().float(), requires_grad=False)
    return [
        norm.register_forward_pre_hook(lambda module, inputs: (inputs[0].float(), *inputs[1:])),
        norm.register_forward_hook(lambda module, inputs, output: output.to(dtype)),
    ]


def keep_input_dtype(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    """Forward hook that casts the output of a norm back to the dtype of its input."""
    return output.to(inputs[0].dtype)
