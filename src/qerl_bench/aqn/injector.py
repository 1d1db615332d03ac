"""Adding noise to the norm scales of a model, and taking it out again bit for bit.

QeRL perturbs the two RMSNorm scales of each block, w + Z with Z ~ N(0, sigma^2). Since RMSNorm multiplies by w just
before a linear layer, this equals row-wise multiplicative noise on that layer's weights, 1 + Z / w, and needs no tensor
of its own. In BF16 the sum rounds small Z away, so the noisy scale is kept in FP32 while it is in use, unless
`noise.add_dtype` asks for the rounding.

Left out: a new draw for every forward pass, that is for every token while sampling (one sentence of the paper; its
Algorithm 1 and its code draw once per step).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from qerl_bench.aqn.base import SigmaController
from qerl_bench.aqn.spec import NoiseSpec
from qerl_bench.checks import TrainingStopped
from qerl_bench.seeding import derive

log = logging.getLogger(__name__)
Norms = Mapping[str, torch.nn.Module]  # by their names in the model
Tensors = dict[str, torch.Tensor]  # the same names; each in the shape of the norm's scale
BLOCK_NORMS = ("input_layernorm", "post_attention_layernorm")
FINAL_NORM = "model.norm"


@dataclass(frozen=True)
class NoiseReport:
    """What was asked for and what really happened to the scales in one draw."""

    sigma: float  # asked for
    sigma_realised: float  # root mean square of (noisy - clean) over all scales, as stored; over |clean| if relative
    norms_perturbed: int  # norms in which at least one scale changed
    scales_changed: float  # share of the scales that changed


def block_norms(model: torch.nn.Module, layers: int) -> dict[str, torch.nn.Module]:
    """The two norms of each transformer block, by name: the one before attention and the one before the MLP.

    Raises AssertionError unless exactly 2 * `layers` are found: noise that silently misses layers is the defect that
    this harness exists to avoid.
    """
    norms = {name: module for name, module in model.named_modules() if name.rsplit(".", 1)[-1] in BLOCK_NORMS}
    assert len(norms) == 2 * layers, (
        f"found {len(norms)} block norms in {type(model).__name__}, expected {2 * layers} "
        f"(two in each of {layers} blocks, named {' and '.join(BLOCK_NORMS)})"
    )
    return norms


def noise_sites(model: torch.nn.Module, layers: int, choice: str) -> dict[str, torch.nn.Module]:
    """The norms that `noise.norms` = `choice` perturbs, block norms first."""
    if choice == "missed":
        return {}
    final = {FINAL_NORM: model.get_submodule(FINAL_NORM)} if choice == "blocks_final" else {}
    return block_norms(model, layers) | final


class NoiseInjector:
    """The noise of one run: when, how much, where, and the random numbers behind it.

    A draw is decided by (run seed, step, number of the draw within the step) alone and made on the CPU in the order of
    the norms, so every device and process sees the same noise.
    """

    def __init__(self, injection: NoiseSpec, controller: SigmaController, norms: Norms, seed: int) -> None:
        self.injection = injection
        self.controller = controller
        self.norms = norms
        self.seed = seed
        self.latest = (0, 0)  # step and number of the latest draw
        self.added: Tensors = {}  # what it added
        self.held: Tensors = {}  # noisy copies that are never refreshed from the clean scale (noise.accumulate)
        if injection.norms == "missed":
            log.warning(
                "noise.norms=missed: noise reaches no norm, as in QeRL's released code; aqn/sigma is only asked for"
            )

    def sampler(self, step: int, draw: int) -> AbstractContextManager[NoiseReport]:
        """Context in which the policy samples with draw number `draw` of step `step`; again for the same draw."""
        sigma = self.controller.sigma(step)
        if (step, draw) != self.latest:
            self.latest = (step, draw)
            self._draw(sigma, derive(self.seed, "noise", "run" if self.injection.cadence == "run" else step, draw))
        noisy = self._noisy()
        report = compared(self.norms, noisy, sigma, self.injection.relative)
        if self.injection.add_dtype == "float32":
            require_reached(report, len(self.added))
        return _reporting(self.norms, noisy, report)

    @property
    def present(self) -> bool:
        """Whether the sampler's latest scales differ from the clean ones."""
        return bool(self.added or self.held)

    def trainer(self) -> AbstractContextManager[None]:
        """Context in which the trainer computes with the sampler's latest noise; trained scales get gradients."""
        return installed(self.norms, self._noisy())

    def state(self) -> dict[str, Any]:
        """What the next step's noise depends on besides its seed; plain numbers and tensors."""
        return {"held": dict(self.held), "controller": self.controller.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.held = dict(state["held"])
        self.controller.restore(state["controller"])

    def _draw(self, sigma: float, seed: int) -> None:
        self.added = {}
        if sigma > 0:
            self.added = drawn(self.norms, sigma, seed, self.injection.relative, self.controller.factors)
        for name in self.added.keys() & self._accumulating():
            before = self.held.get(name, scale_of(self.norms[name]).detach())
            self.held[name] = summed(before, self.added[name], self.injection.add_dtype)

    def _accumulating(self) -> set[str]:
        """The norms whose noisy copy is never refreshed."""
        return {"none": set(), "final": {FINAL_NORM}, "all": set(self.norms)}[self.injection.accumulate]

    def _noisy(self) -> Tensors:
        """The scales to compute with, for the norms that carry noise now."""
        fresh = {
            name: summed(scale_of(self.norms[name]), added, self.injection.add_dtype)
            for name, added in self.added.items()
            if name not in self.held
        }
        return fresh | self.held


def scale_of(norm: torch.nn.Module) -> torch.Tensor:
    """What the norm multiplies by."""
    weight = norm.weight
    assert isinstance(weight, torch.Tensor)
    return weight


def perturbed(norms: Norms, sigma: float, seed: int) -> AbstractContextManager[NoiseReport]:
    """Inside the context every norm's scale w is w + sigma * z in FP32; afterwards it is the very tensor it was.

    One draw without a run around it. Raises TrainingStopped if a norm stays as it was.
    """
    noisy = {}
    if sigma > 0:
        noisy = {name: summed(scale_of(norms[name]), z, "float32") for name, z in drawn(norms, sigma, seed).items()}
    report = compared(norms, noisy, sigma)
    require_reached(report, len(noisy))
    return _reporting(norms, noisy, report)


def drawn(
    norms: Norms, sigma: float, seed: int, relative: bool = False, factors: Mapping[str, float] | None = None
) -> Tensors:
    """FP32 noise for each norm's scale: normal, of standard deviation `sigma` times the norm's factor (1 if not named).

    `relative` multiplies it by |scale|. Norms of factor 0 are left out. One transfer to the device for all of them.
    """
    factors = factors or {}
    weights = {name: scale_of(norm).detach() for name, norm in norms.items()}
    if not weights:
        return {}
    sizes = [weight.numel() for weight in weights.values()]
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(sum(sizes), generator=generator, dtype=torch.float32).to(next(iter(weights.values())).device)
    noise = {}
    for (name, weight), z in zip(weights.items(), normal.split(sizes), strict=True):
        scaled = sigma * factors.get(name, 1.0) * z.view(weight.shape)
        noise[name] = scaled * weight.float().abs() if relative else scaled
    return {name: z for name, z in noise.items() if factors.get(name, 1.0) > 0}


def summed(scale: torch.Tensor, noise: torch.Tensor, add_dtype: str) -> torch.Tensor:
    """Scale plus noise: in FP32 and left in FP32, or, like the released code, both rounded to BF16 and added there."""
    if add_dtype == "bfloat16":
        return (scale.bfloat16() + noise.bfloat16()).to(scale.dtype)
    return scale.float() + noise


@torch.no_grad()
def compared(norms: Norms, noisy: Tensors, sigma: float, relative: bool = False) -> NoiseReport:
    """What became of the scales: `noisy` against each norm's own. One transfer from the device for all of them."""
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


def require_reached(report: NoiseReport, norms: int) -> None:
    """Raise TrainingStopped for noise that silently does nothing, the defect that this harness exists to avoid."""
    reached = report.norms_perturbed
    if reached < norms:
        raise TrainingStopped(
            f"noise of sigma {report.sigma:g} changed {reached} of {norms} norms: it is lost in the rounding of their "
            "FP32 scales. Use a larger sigma, or aqn=none"
        )


@contextmanager
def installed(norms: Norms, scales: Tensors) -> Iterator[None]:
    """Inside the context each norm named in `scales` multiplies by that tensor; afterwards by its own parameter again.

    The forward pass holds no tensor more than before: the noisy scale stands where the parameter stood. Others who read
    `norm.weight`, such as an engine that copies weights, see the noisy scale too.
    """
    clean = {name: norms[name]._parameters["weight"] for name in scales}
    hooks = []
    try:
        for name, scale in scales.items():
            norms[name]._parameters["weight"] = scale  # type: ignore[assignment]  # a tensor: gradients flow on
            if scale.dtype != clean[name].dtype:  # type: ignore[union-attr]
                hooks.append(norms[name].register_forward_hook(keep_input_dtype))
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for name, parameter in clean.items():
            norms[name]._parameters["weight"] = parameter


@contextmanager
def _reporting(norms: Norms, noisy: Tensors, report: NoiseReport) -> Iterator[NoiseReport]:
    with installed(norms, noisy):
        yield report


def combined(reports: list[NoiseReport]) -> dict[str, float]:
    """The metrics of a step from the reports of its draws: sizes as root mean square, counts as the least of them."""
    return {
        "aqn/sigma": reports[0].sigma,
        "aqn/sigma_realised": (sum(report.sigma_realised**2 for report in reports) / len(reports)) ** 0.5,
        "aqn/norms_perturbed": min(report.norms_perturbed for report in reports),
        "aqn/scales_changed": min(report.scales_changed for report in reports),
    }


def keep_input_dtype(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    """Forward hook of a norm whose scale is more precise than the activations."""
    return output.to(inputs[0].dtype)
