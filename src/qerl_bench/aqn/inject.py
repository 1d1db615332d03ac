"""Adding noise to the norm scales of a model, and taking it out again bit for bit.

QeRL perturbs the two RMSNorm scales of each block, w + Z with Z ~ N(0, sigma^2). Since RMSNorm multiplies by w just
before a linear layer, this equals row-wise multiplicative noise on that layer's weights, 1 + Z / w, and needs no tensor
of its own. In BF16 the sum rounds small Z away, so the noisy scale is kept in FP32 while it is in use, unless
`inject.add_dtype` asks for the rounding.

Left out: a new draw for every forward pass, that is for every token while sampling (one sentence of the paper; its
Algorithm 1 and its code draw once per step).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from qerl_bench.aqn.base import Steering
from qerl_bench.aqn.injection import Injection
from qerl_bench.seeding import derive

log = logging.getLogger(__name__)
Tensors = dict[str, torch.Tensor]
BLOCK_NORMS = ("input_layernorm", "post_attention_layernorm")
FINAL_NORM = "model.norm"


@dataclass(frozen=True)
class NoiseReport:
    """What was asked for and what really happened to the scales in one draw."""

    sigma: float  # asked for
    sigma_realised: float  # root mean square of (noisy - clean) over all scales, as stored; over |clean| if relative
    norms_perturbed: int  # norms in which at least one scale changed
    scales_changed: float  # share of the scales that changed


NO_NOISE = NoiseReport(0.0, 0.0, 0, 0.0)


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
    """The norms that `inject.norms` = `choice` perturbs, block norms first."""
    if choice == "missed":
        return {}
    final = {FINAL_NORM: model.get_submodule(FINAL_NORM)} if choice == "blocks_final" else {}
    return block_norms(model, layers) | final


class Noise:
    """The noise of one run: when, how much, where, and the random numbers behind it.

    A draw is decided by (run seed, step, number of the draw within the step) alone and made on the CPU in the order of
    the norms, so every device and process sees the same noise.
    """

    def __init__(self, injection: Injection, steering: Steering, norms: dict[str, torch.nn.Module], seed: int) -> None:
        self.injection = injection
        self.steering = steering
        self.norms = norms
        self.seed = seed
        self.added: Tensors = {}  # the sampler's latest draw, FP32, each norm's in the shape of its scale
        self.held: Tensors = {}  # noisy copies that are never refreshed from the clean scale (inject.accumulate)
        if injection.norms == "missed":
            log.warning("inject.norms=missed: the noise reaches no norm, as in QeRL's released code; aqn/sigma is what it asks for")

    def sampler(self, step: int, draw: int) -> AbstractContextManager[NoiseReport]:
        """Context in which the policy samples with draw number `draw` of step `step`."""
        sigma = self.steering.sigma(step)
        if not self.norms:
            return nullcontext(NoiseReport(sigma, 0.0, 0, 0.0))
        self.added = self._draw(sigma, derive(self.seed, "noise", step, draw)) if sigma > 0 else {}
        for name in self.added:
            if self._accumulates(name):
                before = self.held.get(name, self.norms[name].weight)
                self.held[name] = self._sum(before, self.added[name]).detach()
        noisy = self._noisy()
        if not noisy:
            return nullcontext(NO_NOISE)
        return self._reporting(noisy, self._report(sigma, noisy))

    def trainer(self) -> AbstractContextManager[None]:
        """Context in which the trainer computes with the sampler's latest noise; scales that are trained get gradients."""
        return installed(self.norms, self._noisy())

    def state(self) -> dict[str, Any]:
        """What the next step's noise depends on besides its seed; plain numbers and tensors."""
        return {"held": dict(self.held), "steering": self.steering.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.held = dict(state["held"])
        self.steering.restore(state["steering"])

    def _draw(self, sigma: float, seed: int) -> Tensors:
        """Noise of standard deviation `sigma` times each norm's factor, relative to |scale| if asked for."""
        weights = {name: norm.weight.detach() for name, norm in self.norms.items()}
        sizes = [weight.numel() for weight in weights.values()]
        generator = torch.Generator().manual_seed(seed)
        device = next(iter(weights.values())).device
        flat = torch.randn(sum(sizes), generator=generator, dtype=torch.float32).to(device)
        drawn: Tensors = {}
        for (name, weight), normal in zip(weights.items(), flat.split(sizes), strict=True):
            unit = weight.float().abs() if self.injection.relative else 1.0
            factor = self.steering.factors.get(name, 1.0)
            if factor > 0:
                drawn[name] = sigma * factor * unit * normal.view(weight.shape)
        return drawn

    def _sum(self, scale: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        """Scale plus noise in the precision asked for; FP32 sums stay FP32 whatever the dtype of the scale."""
        if self.injection.add_dtype == "bfloat16":
            return (scale.bfloat16() + added.bfloat16()).to(scale.dtype)
        return scale.float() + added

    def _noisy(self) -> Tensors:
        """The scales to compute with; empty without noise."""
        fresh = {n: self._sum(self.norms[n].weight, added) for n, added in self.added.items() if n not in self.held}
        return {name: (fresh | self.held)[name] for name in self.norms if name in fresh or name in self.held}

    def _accumulates(self, name: str) -> bool:
        return self.injection.accumulate == "all" or (self.injection.accumulate == "final" and name == FINAL_NORM)

    @contextmanager
    def _reporting(self, noisy: Tensors, report: NoiseReport) -> Iterator[NoiseReport]:
        with installed(self.norms, noisy):
            yield report

    @torch.no_grad()
    def _report(self, sigma: float, noisy: Tensors) -> NoiseReport:
        """Compare every scale with its clean self; one transfer from the device for all of them."""
        clean = {name: self.norms[name].weight for name in self.norms}
        change = {name: noisy[name].double() - clean[name].double() if name in noisy else None for name in clean}
        changed = torch.stack([(d != 0).sum() for d in change.values() if d is not None])
        squares = []
        for name, difference in change.items():
            if difference is not None:
                unit = clean[name].double().abs() if self.injection.relative else torch.ones_like(difference)
                squares.append(torch.where(unit > 0, difference / unit, 0.0).square().sum())
        count = sum(weight.numel() for weight in clean.values())
        totals = torch.cat([changed.double(), torch.stack(squares).sum()[None]]).tolist()
        *changes, square = totals
        perturbed = sum(number > 0 for number in changes)
        if self.injection.add_dtype == "float32" and sigma > 0:
            expected = len(self.added)
            assert perturbed >= expected, f"noise of sigma {sigma} changed {perturbed} of {expected} norms"
        return NoiseReport(sigma, (square / count) ** 0.5, perturbed, sum(changes) / count)


@contextmanager
def installed(norms: dict[str, torch.nn.Module], scales: Tensors) -> Iterator[None]:
    """Inside the context each norm named in `scales` multiplies by that tensor; afterwards by its own parameter again.

    The forward pass holds no tensor more than before: the noisy scale stands where the parameter stood. Other readers of
    `norm.weight`, such as an engine that copies weights, see the noisy scale too.
    """
    clean = {name: norms[name]._parameters["weight"] for name in scales}
    hooks = []
    try:
        for name, scale in scales.items():
            norms[name]._parameters["weight"] = scale  # type: ignore[assignment]  # a plain tensor, so gradients flow on
            if scale.dtype != clean[name].dtype:  # type: ignore[union-attr]
                hooks.append(norms[name].register_forward_hook(_keep_input_dtype))
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for name, parameter in clean.items():
            norms[name]._parameters["weight"] = parameter


def combined(reports: list[NoiseReport]) -> dict[str, float]:
    """The metrics of a step from the reports of its draws: sizes as root mean square, counts as the least of them."""
    return {
        "aqn/sigma": reports[0].sigma,
        "aqn/sigma_realised": (sum(report.sigma_realised**2 for report in reports) / len(reports)) ** 0.5,
        "aqn/norms_perturbed": min(report.norms_perturbed for report in reports),
        "aqn/scales_changed": min(report.scales_changed for report in reports),
    }


def _keep_input_dtype(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    return output.to(inputs[0].dtype)
