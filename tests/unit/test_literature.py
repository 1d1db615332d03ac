"""The claims of later papers: they can be run, contradict each other where the papers do, and are on their page."""

from __future__ import annotations

import math
import re
import shlex
import zlib
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text
from omegaconf import OmegaConf

from qerl_bench.config import build, compose
from qerl_studies.claims.claim import Claim, ClaimResult
from qerl_studies.claims.evaluate import evaluate_claims
from qerl_studies.claims.measures import NOISY_ENTROPY, answered_once, growth
from qerl_studies.claims.preconditions import ManipulationCheck
from qerl_studies.claims.registry import QERL, claims_of, families
from qerl_studies.commands import claims as command
from qerl_studies.figures.forest import all_claims
from qerl_studies.runs.comparable import load_runs
from qerl_studies.runs.load import Run, load_run
from tests.run_folders import write_run

ROOT = Path(__file__).parents[2]
CLAIMS = claims_of("literature")
NAMED = (*claims_of("frontier"), *claims_of("rounded"))  # before there were runs
STEPS = 40
Arm = Callable[..., list[Run]]


@pytest.fixture
def arm(tmp_path: Path, make_config: Callable[..., Any]) -> Arm:
    """arm("lora.rank=1", reward=0.1): four seeds of a setting; returns the runs of all settings so far.

    Reward ends at 0.5 + `reward`; the mismatch is `kl`, times `growth` in the last fifth. Of sixty questions a run
    answers the first 30 + 30 `right` but one, which depends on its seed.
    """

    added: list[Run] = []

    def add(
        *words: str,
        reward: float = 0.0,
        kl: float = 1e-4,
        growth: float = 1.0,
        right: float = 0.0,
        parts: dict[str, float] | None = None,
    ) -> list[Run]:
        config = make_config("eval=task", f"steps={STEPS}", "lora.rank=32", "lora.alpha=32", *words)
        setting = config["name"]
        folders = []
        for seed in range(4):
            config["name"], config["seed"] = f"{setting}-{seed}", seed
            folder = tmp_path / "runs" / config["name"]
            wobble = 1 + 1e-3 * math.sin(zlib.crc32(folder.name.encode()))  # each run has its own
            lines: list[dict[str, Any]] = [
                {
                    "kind": "train", "step": step, "accuracy": 0.3 + 0.4 * step / STEPS, "entropy": 0.2 * wobble,
                    "reward/mean": (0.5 + reward) * step / STEPS * wobble, "train/taught_frac": 1.0,
                    "mismatch/kl": kl * wobble * (growth * wobble if step > 0.8 * STEPS else 1.0),
                    **{name: value * wobble for name, value in (parts or {}).items()},
                }
                for step in range(1, STEPS + 1)
            ]  # fmt: skip
            answers = [question < 30 + 30 * right and question != seed * (2 if right else 1) for question in range(60)]
            rows = {"mode": "sampled", "question": [f"q{n:02d}" for n in range(60)], "step": STEPS, "correct": answers}
            environment, answers_table = {"code": "1f", "device": "cpu", "packages": {}}, pd.DataFrame(rows)
            text = OmegaConf.to_yaml(config)
            folders.append(write_run(folder, text, lines, {"wall_s": 60.0}, environment, answers_table))
        added.extend(load_runs(folders))
        return sorted(added, key=lambda run: run.path)

    return add


def verdicts(runs: list[Run]) -> dict[str, ClaimResult]:
    return {result.claim.title: result for result in evaluate_claims(CLAIMS, runs)}


def test_papers_that_contradict_each_other_get_opposite_verdicts(arm: Arm) -> None:
    arm("quant=bf16", "lora.rank=32")
    found = verdicts(arm("quant=bf16", "lora.rank=1", reward=-0.2, right=-0.9))
    assert found["Rank 1 is enough"].verdict == "reversed"
    assert found["Rank 1 is a bottleneck"].verdict == "supported"


def test_equal_ranks_support_the_one_and_not_the_other(arm: Arm) -> None:
    arm("quant=bf16", "lora.rank=32")
    found = verdicts(arm("quant=bf16", "lora.rank=1"))
    assert found["Rank 1 is enough"].verdict == "supported"
    assert found["Rank 1 is a bottleneck"].verdict != "supported"


def test_fp16_is_compared_with_bf16_of_the_same_kernels(arm: Arm) -> None:
    arm("quant=bf16", "kernel=torch", "model.dtype=bfloat16", kl=1e-3)
    arm("quant=bf16", "kernel=auto", "model.dtype=bfloat16", kl=1e-9)
    found = verdicts(arm("quant=bf16", "kernel=torch", "model.dtype=float16", kl=1e-4))["FP16 removes the mismatch"]
    assert found.verdict == "supported"
    (effect,) = [one.primary.effect for one in found.voting if one.primary]
    assert effect is not None and math.exp(effect.whole.value) == pytest.approx(0.1, rel=0.02)


def test_a_mismatch_that_grows_with_4_bit_weights_alone_contradicts_quads(arm: Arm) -> None:
    title = "4-bit weights alone do not part sampler and trainer"
    grown = arm("quant=nvfp4", "model.dtype=bfloat16", growth=3.0)
    assert growth("mismatch/kl")(grown[0]) == pytest.approx(3.0, rel=2e-3)
    assert growth("entropy")(grown[0]) == pytest.approx(1.0)
    assert verdicts(arm("quant=bf16", "model.dtype=bfloat16"))[title].verdict == "reversed"


def test_in_float32_there_is_no_mismatch_to_compare(arm: Arm) -> None:
    arm("quant=nvfp4", "model.dtype=float32")
    found = verdicts(arm("quant=bf16", "model.dtype=float32"))["4-bit weights alone do not part sampler and trainer"]
    assert found.verdict == "not testable here" and "model.dtype" in found.reason


def test_random_rewards_are_compared_with_true_ones(arm: Arm) -> None:
    title = "Random rewards nearly match true ones"
    arm("quant=bf16", "train.updates_per_batch=4", right=0.9)
    assert verdicts(arm("quant=bf16", "train.updates_per_batch=4", "reward=random"))[title].verdict == "reversed"
    (result,) = [one.primary.effect for one in verdicts(arm())[title].voting if one.primary]
    assert result is not None and result.whole.value == pytest.approx(-0.45, abs=0.02)


def test_formats_of_training_and_of_serving_are_two_factors(arm: Arm) -> None:
    after, during = (
        "Quantizing after RL keeps the answers",
        "Training on 4-bit weights is as good as quantizing afterwards",
    )
    arm("quant=bf16", right=0.9)
    arm("quant=nvfp4", "eval.quant=nvfp4", right=0.5)
    found = verdicts(arm("quant=bf16", "eval.quant=nvfp4", right=0.0))
    effects = {title: found[title].voting[0].primary for title in (after, during)}
    assert [one.effect.whole.value for one in effects.values() if one and one.effect] == pytest.approx(
        [-0.45, 0.25], abs=0.02
    )
    assert {found[title].verdict for title in effects} == {"reversed"}


def test_no_other_claim_counts_an_evaluation_in_another_format(arm: Arm) -> None:
    arm("quant=bf16", "eval.quant=mxfp4")
    runs = arm("quant=nvfp4", "eval.quant=mxfp4")
    results = evaluate_claims(claims_of(QERL), runs)
    assert any("eval.quant" in one.reason for one in results)
    assert not [one for result in results for one in result.voting if one.primary]


def test_two_precisions_are_compared_with_one(arm: Arm) -> None:
    arm("quant=bf16", reward=0.3, right=0.9)  # one precision too, but another trainer
    arm("quant=nvfp4", "rollout.quant=nvfp4", right=0.9)
    found = verdicts(arm("quant=bf16", "rollout.quant=nvfp4", reward=-0.2, right=0.5))
    assert found["Two precisions learn worse than one"].verdict == "supported"
    (answers,) = [one.primary.effect for one in found["Two precisions answer worse than one"].voting if one.primary]
    assert answers is not None and answers.whole.value == pytest.approx(-0.2, abs=0.02)


def test_a_sampler_that_drifts_away_contradicts_quads_too(arm: Arm) -> None:
    arm("quant=bf16", "model.dtype=bfloat16")
    found = verdicts(arm("quant=bf16", "rollout.quant=nvfp4", "model.dtype=bfloat16", kl=1.7e-4, growth=3.0))
    assert found["The gap of a 4-bit sampler does not grow"].verdict == "reversed"


def test_entropy_that_rises_where_it_is_low_and_falls_where_it_is_high_supports_reset(arm: Arm) -> None:
    titles = "NVFP4 unsettles certain tokens", "NVFP4 narrows uncertain tokens"
    arm("quant=bf16", parts={"entropy/rest": 0.05, "entropy/top20": 0.80})
    found = verdicts(arm("quant=nvfp4", parts={"entropy/rest": 0.07, "entropy/top20": 0.70}))
    assert [found[title].verdict for title in titles] == ["supported", "supported"]


def test_runs_from_before_the_parts_of_the_entropy_were_recorded_do_not_count(arm: Arm) -> None:
    arm("quant=bf16")
    found = verdicts(arm("quant=nvfp4"))["NVFP4 unsettles certain tokens"]
    assert found.verdict == "not testable here" and "did not record entropy/rest" in found.reason


PSN = "quant=bf16", "importance_sampling.mode=truncate", "eval.samples=16"
NOISY = (*PSN, "aqn=constant", "aqn.level=0.2")


def test_noise_on_adapters_is_compared_with_none(arm: Arm) -> None:
    title = "Noise in parameters raises pass@k"
    arm(*PSN)
    arm(*NOISY, right=-0.9, parts={"entropy": 0.25})  # in norms: another treatment
    unmoved = verdicts(arm(*NOISY, "noise.where=adapters", right=0.5))[title]
    assert unmoved.verdict == "not testable here" and "act on its own target" in unmoved.reason


def test_more_questions_answered_once_support_noise_on_adapters(arm: Arm) -> None:
    title = "Noise in parameters raises pass@k"
    arm(*PSN)
    arm(*PSN, "aqn=constant", "aqn.level=0", "noise.where=adapters", right=-0.9)  # none in all but its name
    runs = arm(*NOISY, "noise.where=adapters", right=0.5, parts={"entropy": 0.25})
    found = verdicts(runs)[title]
    assert found.verdict == "supported"
    (effect,) = [one.primary.effect for one in found.voting if one.primary]
    assert effect is not None and effect.whole.value == pytest.approx(0.25, abs=0.02)


def test_noise_is_looked_for_where_a_schedule_has_some() -> None:
    """The first stage of a schedule has no noise, so a gate at the first step would fail whatever noise does."""
    gates = [gate for claims in families().values() for claim in claims for gate in claim.gates]
    checks = [gate for gate in gates if isinstance(gate, ManipulationCheck)]
    of_noise = [check for check in checks if any(one.may_differ_in("aqn.name") for one in check.contrasts)]
    assert len(of_noise) >= 4
    assert {check.measure.name for check in of_noise} == {NOISY_ENTROPY.name}


def test_noise_that_helps_16_bit_weights_repeats_the_first_study(arm: Arm) -> None:
    title = "Noise helps without quantization"
    arm("quant=bf16")
    arm("quant=nvfp4", "aqn=exp", right=-0.9, parts={"entropy": 0.25})  # of other weights
    assert verdicts(arm("quant=bf16", "aqn=exp", right=0.5))[title].verdict == "not testable here"


def test_noise_that_helps_16_bit_weights_must_act(arm: Arm) -> None:
    title = "Noise helps without quantization"
    arm("quant=bf16")
    runs = arm("quant=bf16", "aqn=matched", "aqn.sigma_of_base=0.2", right=0.5, parts={"entropy": 0.25})
    found = verdicts(runs)[title]
    assert found.verdict == "supported"
    (effect,) = [one.primary.effect for one in found.voting if one.primary]
    assert effect is not None and effect.whole.value == pytest.approx(0.25, abs=0.02)


def test_pass_at_k_counts_questions_with_any_right_answer(arm: Arm) -> None:
    run = arm(*PSN)[0]
    rows = [("a", 0), ("a", 1), ("b", 0), ("b", 0), ("c", 1), ("c", 1)]
    questions, correct = zip(*rows, strict=True)
    table = pd.DataFrame({"mode": "sampled", "question": questions, "step": STEPS, "correct": correct})
    table.to_parquet(run.path / "samples.parquet")
    assert answered_once(load_run(run.path)).to_dict() == {"a": 1.0, "b": 0.0, "c": 1.0}


def test_no_claim_of_qerl_counts_noise_on_adapters(arm: Arm) -> None:
    arm("quant=nvfp4")
    runs = arm("quant=nvfp4", "aqn=exp", "noise.where=adapters", reward=0.2, right=0.5, parts={"entropy": 0.3})
    results = evaluate_claims(claims_of(QERL), runs)
    assert any("noise.where" in one.reason for one in results)
    assert not [one for result in results for one in result.voting if one.primary]


def test_random_rewards_need_clipping(arm: Arm) -> None:
    arm("quant=bf16")
    found = verdicts(arm("quant=bf16", "reward=random"))["Random rewards nearly match true ones"]
    assert found.verdict == "not testable here" and "train.updates_per_batch" in found.reason


def test_no_claim_about_formats_counts_runs_with_random_rewards(arm: Arm) -> None:
    arm("quant=bf16", "reward=random")
    runs = arm("quant=nvfp4", "reward=random")
    reasons = {one.reason for one in evaluate_claims(claims_of(QERL), runs) if one.verdict == "not testable here"}
    assert any("reward=task" in reason for reason in reasons)
    assert not [one for result in evaluate_claims(claims_of(QERL), runs) for one in result.voting if one.primary]


def test_formats_are_in_the_order_of_their_grid_noise() -> None:
    """The order that the claim takes for granted, in the layers that were measured."""
    layers = pd.read_parquet(ROOT / "studies" / "quantizers" / "data" / "layers.parquet")
    noise = {
        str(quant): float(np.mean(rows["grid_noise"]))
        for quant, rows in layers[layers["quantizer"] == "rtn"].groupby("quant")
    }
    claim = next(claim for claim in CLAIMS if claim.title == "Grid error raises entropy")
    for contrast in claim.contrasts:
        more, less = (float(noise[arm.label]) for arm in contrast.arms)
        assert more > 1.05 * less
    assert all(f"{noise[quant]:.4f}" in claim.source for quant in ("mxfp4", "nvfp4", "nf4"))


@pytest.mark.parametrize(
    "words",
    sorted(
        {
            sweep
            for claim in (*CLAIMS, *NAMED)
            for command_of_claim in (claim.command, claim.at_scale)
            for sweep in command_of_claim.split("; ")
        }
    ),
)
def test_what_to_run_can_be_run(words: str) -> None:
    python, path, *overrides = shlex.split(words)
    assert (python, path) == ("python", "src/run.py") and "-m" in overrides
    swept = [word.partition("=") for word in overrides if word != "-m"]
    for place in (0, -1):
        build(compose([f"{key}={values.split(',')[place]}" for key, _, values in swept]))


@pytest.mark.parametrize("claim", NAMED, ids=lambda claim: claim.title)
def test_whoever_runs_its_command_gets_a_claim_compared(claim: Claim, arm: Arm) -> None:
    """Named without runs, so that only this shows that its conditions are those of the arms that its command makes."""
    runs: list[Run] = []
    for sweep in claim.command.split("; "):
        swept = [word.partition("=") for word in shlex.split(sweep)[2:-1]]
        options = [[f"{key}={value}" for value in values.split(",")] for key, _, values in swept]
        for words in product(*(one for one in options if not one[0].startswith(("model.seed=", "experiment=")))):
            runs = arm(*words, right=0.1 * len(runs))
    (found,) = evaluate_claims([claim], runs)
    assert all(one.primary and one.primary.effect for one in found.voting), found.reason


def test_the_page_has_the_verdicts_on_the_committed_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(ROOT / "studies" / "tiny"), "--papers", "literature", "--out", str(tmp_path)]
    command.main(words)
    folded = capsys.readouterr().out
    command.main([*words, "--all"])
    told = "Rank 1 is enough: incomplete"  # one of its arms has runs: without --all it is counted alone
    assert told not in folded and "--all" in folded and told in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"literature.md", "literature.svg"}
    caption = " ".join(re.findall(r"<!-- (.*?) -->", (tmp_path / "literature.svg").read_text()))
    assert "0.02 of reward, 1 point of accuracy, 5% of a time or memory. Grey band" in caption
    figure = all_claims(evaluate_claims(CLAIMS, []), "")  # no claim has runs: all are shown
    everything = " ".join(" ".join(text.get_text() for text in figure.findobj(Text)).split())
    assert (
        "0.02 of reward, 1 or 10 points of accuracy, 5% of a time or memory, a factor of 1.5 or 2 of a KL" in everything
    )
    table = (tmp_path / "literature.md").read_text().split("\n\n", 1)[1]
    page = (ROOT / "docs" / "literature.md").read_text()
    (shown,) = re.findall(r"<!-- table of [^>]* -->\n(.*?)<!-- end of table -->", page, re.DOTALL)
    assert shown == table
    assert table.count("\n") == 2 + len(CLAIMS)


def test_papers_and_titles_are_different() -> None:
    titles = [claim.title for claims in families().values() for claim in claims]
    papers = {(claim.paper, claim.address) for claims in families().values() for claim in claims}
    assert len({*titles}) == len(titles)
    assert len({paper for paper, _ in papers}) == len({address for _, address in papers}) == len(papers)
