"""Losses against TRL 1.16 itself, value and gradient. Needs the extra `peers`.

TRL's loss is a method of a trainer that needs a model, data and an accelerator; here it runs on a stand-in that holds
just the attributes it reads, and on log-probabilities that are given. The grid covers every loss that both have, the
KL penalty with and without its ratio, the cap on the ratio, old log-probabilities given or not, accumulation over 1
and 4 micro-batches, and one, as many, or twice as many micro-batches to a generation. One completion is empty.
Importance weights are compared on all losses, with accumulation over 4.
"""

from __future__ import annotations

import importlib
import warnings
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qerl_bench.algo import bnpo, cispo, dapo, dr_grpo, grpo, gspo, rloo
from qerl_bench.algo.base import LossInputs
from qerl_bench.algo.importance_sampling import ImportanceSampling
from qerl_bench.algo.kl import KLPenalty
from qerl_bench.algo.loss import step_loss

pytestmark = [pytest.mark.peers, pytest.mark.slow]

TOLERANCE = 1e-9
ROWS, WIDTH, LIMIT = 16, 7, 9  # completions of two generations, tokens of the longest, tokens allowed
SHARED: dict[str, Any] = {"epsilon_low": 0.2, "epsilon_high": 0.28, "delta": None, "advantage_eps": 1e-4}
GRPO = grpo.GRPO(name="grpo", **SHARED)
DAPO = dapo.DAPO(
    name="dapo",
    **SHARED,
    max_resampling_rounds=0,
    on_no_signal="stop",
    length_limit=LIMIT,
    overlong_share=4 / LIMIT,
    overlong_factor=1.0,
)
BNPO = bnpo.BNPO(name="bnpo", **SHARED, chunk=1)
DR_GRPO = dr_grpo.DrGRPO(name="dr_grpo", epsilon_low=0.2, epsilon_high=0.28, delta=None, length_limit=LIMIT)
GSPO = gspo.GSPO(name="gspo", **SHARED)
CISPO = cispo.CISPO(name="cispo", epsilon_low=1.0, epsilon_high=0.6, advantage_eps=1e-4)
TRL_NAMES = {"gspo": "grpo"}  # with importance_sampling_level="sequence"


def _peer(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("trl")
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def grpo_loss() -> Any:
    return _peer("trl.trainer.grpo_trainer").GRPOTrainer._compute_loss


class Accelerator:
    """One process."""

    num_processes = 1
    sync_gradients = True

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        return value

    def reduce(self, value: torch.Tensor, reduction: str) -> torch.Tensor:
        return value


def _trainer(algo: Any, kl: KLPenalty, accumulation: int, per_generation: int) -> SimpleNamespace:
    cispo = algo.name == "cispo"
    return SimpleNamespace(
        loss_type=TRL_NAMES.get(algo.name, algo.name),
        importance_sampling_level="sequence" if algo.name == "gspo" else "token",
        epsilon_low=algo.epsilon_low,
        epsilon_high=1 + algo.epsilon_high if cispo else algo.epsilon_high,  # absolute there
        beta=kl.coef,
        max_completion_length=LIMIT,
        current_gradient_accumulation_steps=accumulation,
        args=SimpleNamespace(
            delta=getattr(algo, "delta", None),
            use_bias_correction_kl=kl.ratio_weighted,
            steps_per_generation=per_generation,
        ),
        model=SimpleNamespace(training=True),
        accelerator=Accelerator(),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )


def _data(seed: int) -> dict[str, torch.Tensor]:
    """Completions of 0 to WIDTH tokens; ratios far enough from 1 for every clip, on both sides."""
    generator = torch.Generator().manual_seed(seed)
    old = -4 * torch.rand(ROWS, WIDTH, generator=generator, dtype=torch.float64) - 0.1
    move = 0.6 * torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    reference = old + 0.4 * torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    advantages = torch.randn(ROWS, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, WIDTH + 1, (ROWS,), generator=generator)
    lengths[2] = 0
    mask = torch.arange(WIDTH) < lengths[:, None]
    return {"logprobs": old + move, "old": old, "reference": reference, "advantages": advantages, "mask": mask}


def _theirs(
    loss_of: Any,
    trainer: SimpleNamespace,
    data: dict[str, torch.Tensor],
    rows: list[slice],
    items: list[int],
    old: bool,
    importance: torch.Tensor | None = None,
) -> tuple[float, torch.Tensor]:
    """Loss and gradient of one optimiser step: the sum over its micro-batches, with their generation's tokens."""
    leaf = data["logprobs"].clone().requires_grad_()
    value = 0.0
    for part, tokens in zip(rows, items, strict=True):
        mask = data["mask"][part].long()
        inputs = {
            "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.long),
            "prompt_mask": torch.ones(len(mask), 1, dtype=torch.long),
            "completion_ids": torch.zeros_like(mask),
            "completion_mask": mask,
            "advantages": data["advantages"][part],
            "num_items_in_batch": torch.tensor(tokens),
            "ref_per_token_logps": data["reference"][part],
        }
        if old:
            inputs["old_per_token_logps"] = data["old"][part]
        if importance is not None:
            inputs["importance_sampling_ratio"] = importance[part]
        given = (leaf[part], torch.zeros_like(leaf[part]), None)
        trainer._get_per_token_logps_and_entropies = lambda *_, given=given, **__: given
        loss = loss_of(trainer, None, inputs)
        loss.backward()
        value += loss.item()
    assert leaf.grad is not None
    return value, leaf.grad


def _ours(
    algo: Any,
    kl: KLPenalty,
    data: dict[str, torch.Tensor],
    window: slice,
    old: bool,
    importance: torch.Tensor | None = None,
) -> tuple[float, torch.Tensor, dict[str, torch.Tensor]]:
    leaf = data["logprobs"].clone().requires_grad_()
    terms = LossInputs(
        logprobs=leaf[window],
        old_logprobs=(data["old"] if old else data["logprobs"])[window],
        advantages=data["advantages"][window],
        mask=data["mask"][window],
        reference_logprobs=data["reference"][window] if kl.coef else None,
        importance_weights=None if importance is None else importance[window],
    )
    loss, columns = step_loss(algo, kl, terms, algo.loss_weights(terms.mask.sum(1)))
    loss.backward()
    assert leaf.grad is not None
    return loss.item(), leaf.grad, columns


KLS = [
    KLPenalty(coef=coef, estimator="k3", ratio_weighted=weighted, every=0)
    for coef, weighted in ((0.0, True), (0.04, True), (0.04, False))
]


@pytest.mark.parametrize("old", [True, False], ids=["old", "no-old"])
@pytest.mark.parametrize("kl", KLS, ids=["no-kl", "kl-ratio", "kl"])
@pytest.mark.parametrize(("accumulation", "per_generation"), [(1, 1), (4, 4), (4, 1), (4, 8), (1, 4)])
@pytest.mark.parametrize(
    "algo",
    [GRPO, DAPO, BNPO, DR_GRPO, GSPO, CISPO, *(replace(algo, delta=2.0) for algo in (GRPO, DAPO, BNPO, DR_GRPO, GSPO))],
    ids=lambda algo: f"{algo.name}-{getattr(algo, 'delta', None)}",
)
def test_loss_and_gradient_of_a_step_are_those_of_trl(
    grpo_loss: Any, algo: Any, accumulation: int, per_generation: int, kl: KLPenalty, old: bool
) -> None:
    """Our step = the micro-batches that TRL accumulates. See the comments for where TRL's total is another one."""
    data = _data(seed=accumulation * 10 + per_generation)
    size = 2 if max(accumulation, per_generation) == 8 else 4
    rows = [slice(i * size, (i + 1) * size) for i in range(accumulation)]
    window = slice(0, accumulation * size)
    whole = per_generation * size
    items = [int(data["mask"][i * size // whole * whole :][:whole].sum()) for i in range(accumulation)]
    if algo.name == "bnpo":
        algo = replace(algo, chunk=size)  # what TRL averages over is its micro-batch
    scale = 1.0
    if algo.name in ("dapo", "cispo"):
        if per_generation < accumulation:  # TRL's token mean is then over each generation, and a mean of those: bnpo's
            chunks = replace(BNPO, chunk=per_generation * size)
            weights = chunks.loss_weights(data["mask"][window].sum(1))
            algo = _with_weights(algo, weights)
        else:  # over the whole generation, whose tokens are on average, not exactly, those of its steps
            scale = int(data["mask"][window].sum()) / (items[0] * accumulation / per_generation)
    value, gradient = _theirs(grpo_loss, _trainer(algo, kl, accumulation, per_generation), data, rows, items, old)
    found, own, columns = _ours(algo, kl, data, window, old)
    assert found * scale == pytest.approx(value, abs=TOLERANCE)
    assert (own * scale - gradient).abs().max() < TOLERANCE
    assert gradient.abs().max() > 1e-3  # something was compared
    if per_generation == accumulation:
        assert scale == 1.0
    assert old or not any(bool(columns[name].any()) for name in columns if name.startswith("clip_ratio"))


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("kl", KLS[:2], ids=["no-kl", "kl-ratio"])
@pytest.mark.parametrize(
    ("algo", "level"),
    [(algo, level) for algo in (GRPO, DAPO, BNPO, DR_GRPO, GSPO, CISPO) for level in ("token", "sequence")],
    ids=lambda value: getattr(value, "name", value),
)
def test_importance_weights_enter_the_loss_as_in_trl(
    grpo_loss: Any, algo: Any, level: str, kl: KLPenalty, mode: str
) -> None:
    """TRL's ratio, written out: (B, T), or (B, 1) for sequences; ours is made by the spec. Four micro-batches."""
    data = _data(seed=8)
    generator = torch.Generator().manual_seed(9)
    sampler = data["old"] + 0.5 * torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    clip_max, clip_min = 1.5, 0.6 if mode == "mask" else None
    spec = ImportanceSampling(
        mode=mode, level=level, clip_max=clip_max, clip_min=clip_min, warn_ess=0.0, split_mismatch=False
    )
    gap = (data["old"] - sampler) * data["mask"]
    ratio = (gap.sum(1, keepdim=True) if level == "sequence" else gap).exp()
    bounded = (
        ratio.clamp(max=clip_max)
        if clip_min is None
        else ratio.masked_fill((ratio < clip_min) | (ratio > clip_max), 0.0)
    )
    assert (bounded != ratio).any() and (bounded == ratio).any()

    rows = [slice(i, i + 4) for i in range(0, ROWS, 4)]
    items = [int(data["mask"].sum())] * 4
    if algo.name == "bnpo":
        algo = replace(algo, chunk=4)
    trainer = _trainer(algo, kl, 4, 4)
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    value, gradient = _theirs(grpo_loss, trainer, data, rows, items, True, bounded)
    ours = spec.clip_or_mask(spec.importance_weights(data["old"], sampler, data["mask"]))
    found, own, _ = _ours(algo, kl, data, slice(0, ROWS), True, ours)
    assert found == pytest.approx(value, abs=TOLERANCE)
    assert (own - gradient).abs().max() < TOLERANCE
    without, plain, _ = _ours(algo, kl, data, slice(0, ROWS), True)
    assert abs(without - found) > 1e-3 and (plain - own).abs().max() > 1e-3  # the weights do something


def _with_weights(algo: Any, weights: torch.Tensor) -> Any:
    """`algo` with given weights in place of its own."""
    given = SimpleNamespace(
        **{name: getattr(algo, name) for name in ("name", "epsilon_low", "epsilon_high", "token_loss")}
    )
    given.delta = getattr(algo, "delta", None)
    given.loss_weights = lambda lengths: weights
    return given


@pytest.mark.parametrize("algo", [GRPO, DAPO, BNPO, DR_GRPO], ids=lambda algo: algo.name)
def test_clip_ratios_are_those_of_trl(grpo_loss: Any, algo: Any) -> None:
    data = _data(seed=5)
    trainer = _trainer(algo, KLS[1], 1, 1)
    everything = slice(0, ROWS)
    _theirs(grpo_loss, trainer, data, [everything], [int(data["mask"].sum())], old=True)
    _, _, columns = _ours(algo, KLS[1], data, everything, old=True)
    for name in ("clip_ratio/low_mean", "clip_ratio/high_mean"):
        share = columns[name][data["mask"]].double().mean().item()
        assert share == pytest.approx(trainer._metrics["train"][name][0], abs=1e-6) and share > 0
    assert "kl" in columns


def test_kl_metric_is_that_of_trl_without_the_ratio(grpo_loss: Any) -> None:
    data = _data(seed=6)
    trainer = _trainer(GRPO, KLS[2], 1, 1)
    _theirs(grpo_loss, trainer, data, [slice(0, ROWS)], [1], old=True)
    _, _, columns = _ours(GRPO, KLS[2], data, slice(0, ROWS), old=True)
    kl = columns["kl"][data["mask"]].mean().item()
    assert kl == pytest.approx(trainer._metrics["train"]["kl"][0], abs=TOLERANCE) and kl > 0


@pytest.mark.parametrize("clip", [0.2, 5.0])
def test_rloo_is_that_of_trl(clip: float) -> None:
    """An empty completion, which no sampler makes, counts as a ratio of 1 there and as nothing here."""
    loss_of = _peer("trl.trainer.rloo_trainer").RLOOTrainer._compute_loss
    algo = rloo.RLOO(name="rloo", epsilon_low=0.2, epsilon_high=clip)
    data = _data(seed=7)
    trainer = _trainer(algo, KLS[0], 1, 1)
    leaf = data["logprobs"].clone().requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (leaf, torch.zeros_like(leaf), None)
    mask = data["mask"].long()
    inputs = {
        "prompt_ids": torch.zeros(ROWS, 1, dtype=torch.long),
        "prompt_mask": torch.ones(ROWS, 1, dtype=torch.long),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": data["advantages"],
        "old_logps": (data["old"] * mask).sum(1),
    }
    loss = loss_of(trainer, None, inputs)
    loss.backward()
    found, gradient, _ = _ours(algo, KLS[0], data, slice(0, ROWS), old=True)
    empty = -float(data["advantages"][2]) / ROWS
    assert found + empty == pytest.approx(loss.item(), abs=TOLERANCE)
    assert leaf.grad is not None and (gradient - leaf.grad).abs().max() < TOLERANCE
    assert gradient.abs().max() > 1e-3


def test_overlong_penalty_is_that_of_trl() -> None:
    punish = _peer("trl.rewards").get_soft_overlong_punishment(max_completion_len=LIMIT, soft_punish_cache=4)
    lengths = list(range(1, LIMIT + 1))
    theirs = punish([[0] * length for length in lengths])
    assert DAPO.overlong(torch.tensor(lengths)).tolist() == pytest.approx([-penalty for penalty in theirs])
