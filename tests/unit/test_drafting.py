"""Acceptance of drafts: by hand, against numpy, and against speculative sampling itself, token by token."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from qerl_bench.config import build, compose
from qerl_bench.model_setup import build_policy
from qerl_bench.probe.drafting import drafting, verifications
from qerl_bench.probe.scoring import acceptance
from qerl_core.records import Rollout
from qerl_studies.probes.numbers import DRAFTED
from qerl_studies.probes.over_units import DRAFTS, drafts, mean_of
from qerl_studies.probes.page import sizes

WORDS = ("task=arithmetic", "device=cpu", "model=tiny_untrained", "model.hidden_size=64", "model.heads=2")


def test_acceptance_by_hand_and_against_numpy() -> None:
    p, q = torch.tensor([[0.5, 0.5, 0.0]]).log(), torch.tensor([[0.25, 0.25, 0.5]]).log()
    assert acceptance([p], [q]) == acceptance([q], [p]) == 0.5
    draw = np.random.default_rng(0)
    for vocabulary in (2, 300, 50_000):
        one, other = (draw.normal(0, 2, (3, vocabulary)) for _ in range(2))
        log_p, log_q = (torch.tensor(logits).float().log_softmax(-1) for logits in (one, other))
        p, q = (np.exp(logits) / np.exp(logits).sum(1, keepdims=True) for logits in (one, other))
        smaller = np.minimum(p, q).sum()
        assert acceptance([log_p[:1], log_p[1:]], [log_q[:1], log_q[1:]]) == pytest.approx(smaller, rel=1e-5)
        assert acceptance([log_p], [log_p]) == 3


def test_verifications_by_hand() -> None:
    assert verifications([1.0] * 20, 4) == 4 and verifications([1.0] * 21, 4) == 5  # four drafts and one of its own
    assert verifications([0.0] * 7, 4) == 7 and verifications([], 4) == 0
    assert verifications([0.5, 0.9], 1) == 1.5  # the second token is the verifier's own, or begins a pass
    steady = 4000 / verifications([0.8] * 4000, 4)
    assert steady == pytest.approx((1 - 0.8**5) / 0.2, rel=1e-3)  # Leviathan et al., equation 1


def test_verifications_are_those_of_speculative_sampling() -> None:
    """A chain of five tokens: passes counted over texts that it drafts and verifies, without a look at `kept`."""
    draw, tokens, length, drafted, texts = np.random.default_rng(1), 5, 12, 3, 3000
    p = draw.dirichlet(np.ones(tokens), tokens)
    q = 0.5 * p + 0.5 * draw.dirichlet(np.ones(tokens), tokens)
    counted, expected, pairs = [], [], np.zeros((tokens, tokens))
    for _ in range(texts):
        text, passes = [0], 0
        while len(text) <= length:
            passes, proposed = passes + 1, [text[-1]]
            for _ in range(drafted):
                proposed.append(int(draw.choice(tokens, p=q[proposed[-1]])))
            for last, token in pairwise(proposed):
                if draw.random() >= p[last, token] / q[last, token]:
                    rest = np.maximum(p[last] - q[last], 0)
                    text.append(int(draw.choice(tokens, p=rest / rest.sum())))
                    break
                text.append(token)
            else:
                text.append(int(draw.choice(tokens, p=p[text[-1]])))
        steps = [*pairwise(text)][:length]
        counted.append(passes)
        expected.append(verifications([min(1.0, q[step] / p[step]) for step in steps], drafted))
        np.add.at(pairs, tuple(np.transpose(steps)), 1)
    error = math.hypot(np.std(counted), np.std(expected)) / math.sqrt(texts)
    assert abs(np.mean(counted) - np.mean(expected)) < 4 * error < 0.2
    assert pairs / pairs.sum(1, keepdims=True) == pytest.approx(p, abs=0.03)  # texts follow the verifier


def rollouts() -> list[Rollout]:
    nothing: Any = {"prompt": None, "logprobs": [], "text": "", "finished": True, "sample": 0, "entropies": []}
    draw = np.random.default_rng(2)
    sizes = [(3, 9), (2, 4), (5, 7), (1, 6)]
    ids = [(draw.integers(3, 250, one).tolist(), draw.integers(3, 250, other).tolist()) for one, other in sizes]
    return [Rollout(prompt_ids=prompt, token_ids=tokens, **nothing) for prompt, tokens in ids]


def test_a_format_is_its_own_best_draft_and_another_a_worse_one() -> None:
    experiments = {name: build(compose([*WORDS, f"quant={name}"])) for name in ("bf16", "nvfp4")}
    plain, few = (build_policy(one, None, "cpu") for one in experiments.values())
    own = drafting(experiments["bf16"].train, plain, plain, rollouts(), 2)
    assert own["tokens"] == own["accepted"] == [13, 13] and own["verifications"] == [3, 4]
    found = drafting(experiments["bf16"].train, plain, few, rollouts(), 2)
    total = 0.0
    for one in rollouts():
        ids = torch.tensor([[*one.prompt_ids, *one.token_ids]])
        with torch.no_grad():
            p, q = (policy.model(input_ids=ids).logits[0].double().softmax(-1).numpy() for policy in (plain, few))
        total += np.minimum(p, q)[len(one.prompt_ids) - 1 : -1].sum()
    assert sum(found["accepted"]) == pytest.approx(total, abs=2e-3) and 20 < total < 25.9
    assert all(one > other for one, other in zip(found["verifications"], own["verifications"], strict=True))


def test_the_page_of_a_probe_has_ratios_of_sums_with_intervals_over_questions() -> None:
    draft = {"tokens": [10.0, 30.0, 20.0], "accepted": [9.0, 21.0, 15.0], "verifications": [3.0, 12.0, 6.0]}
    one = {
        "draft": draft, "entropy": 1.0, "kl": {"own": 0.1, "of_reference": 0.1}, "tokens_per_s": 1.0,
        "weights_gib": 1.0, "memory_gib": 1.0,
    }  # fmt: skip
    found = mean_of([{"formats": {"nvfp4": one}}], "nvfp4", drafts("accepted", "tokens"))
    residuals = np.array([9 - 7.5, 21 - 22.5, 15 - 15]) / 20
    assert found.value == pytest.approx(0.75) and found.n == 1
    assert found.stderr == pytest.approx(math.sqrt(residuals.var(ddof=1) / 3))
    heads, (line,) = sizes({"nvfp4": one})
    assert dict(zip(heads, line, strict=True))[f"tokens per verification of {DRAFTED} drafts"].startswith("2.857 [")
    heads, _ = sizes({"nvfp4": {name: value for name, value in one.items() if name != "draft"}})
    assert not {*DRAFTS} & {*heads}
