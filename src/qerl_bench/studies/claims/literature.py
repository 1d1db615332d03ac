"""Claims that others made after QeRL, as data of the same kind as QeRL's own (paper.py): one entry for each paper.

Only what the options of this harness can compare is here; docs/literature.md lists what needs a new one. Where a paper
acts on something else than we do (on the entropy itself, say, where we act on the noise), `source` says so, and the
verdict is about ours. These claims are a family of their own: Holm's method corrects for their number, and QeRL's
verdicts do not depend on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pandas as pd

from qerl_bench.checks import require
from qerl_bench.studies.claims import paper
from qerl_bench.studies.claims.claim import Claim, ClaimResult, greedy_text
from qerl_bench.studies.claims.contrasts import (
    ADAPTER,
    ANSWERING,
    AS_TRAINED,
    DEFAULT_RATE,
    EVALUATED,
    FORMAT,
    GRADED,
    GRPO,
    LEARNING,
    LEARNS,
    NEAREST,
    NO_NOISE,
    NOISE,
    NVFP4,
    ON_POLICY,
    ONE_FORMAT,
    PRIMARY,
    WEIGHTS_ALONE,
    formats,
    noise,
    rank,
    schedules,
    two_values,
)
from qerl_bench.studies.claims.match import Contrast, Filter, Side
from qerl_bench.studies.claims.paper import (
    INITIAL_ENTROPY,
    LATE_REWARD,
    MAIN,
    NOISY,
    NOISY_ENTROPY,
    NVFP4_RUNS,
    TRAINED,
)
from qerl_bench.studies.claims.preconditions import ManipulationCheck, learned
from qerl_bench.studies.runs.load import Run
from qerl_bench.studies.runs.measure import Measure, first_step, held_out, last_fifth_mean, mean_between
from qerl_bench.studies.tables.markdown import markdown_table


@dataclass(frozen=True, kw_only=True)
class Paper:
    """What one paper claims."""

    name: str
    address: str  # arXiv number, or a page
    claims: tuple[Claim, ...]


def growth_of_mismatch(run: Run) -> float:
    """The gap between sampler and trainer over the last fifth of the steps, divided by that over the second tenth."""
    return last_fifth_mean("mismatch/kl")(run) / mean_between("mismatch/kl", 0.1, 0.2)(run)


def answered_once(run: Run) -> pd.Series:
    """By held-out question, 1 if any sample answers it: pass@k with k the number of samples."""
    shares = held_out("sampled")(run)
    require(
        isinstance(shares, pd.Series),
        f"{run.name} kept no answers, without which there is no pass@k: leave it out, or run it again",
    )
    assert isinstance(shares, pd.Series)
    return (shares > 0).astype(float)


LATE_MISMATCH = Measure(
    "KL between sampler and trainer over the last fifth of the steps",
    last_fifth_mean("mismatch/kl"),
    ratio=True,
    margin=math.log(2.0),
)
MISMATCH_GROWTH = Measure(
    "KL between sampler and trainer, last fifth of the steps over their second tenth",
    growth_of_mismatch,
    ratio=True,
    margin=math.log(1.5),
)
NEARLY_AS_ACCURATE = replace(paper.ACCURACY, margin=0.1)  # 21.4 points of gain nearly match 29.1
EARLY_ENTROPY = replace(NOISY_ENTROPY, margin=math.log(1.02))
EARLY_REWARD = Measure(
    "mean reward over the second tenth of the steps", mean_between("reward/mean", 0.1, 0.2), unit="reward", margin=0.02
)
PASS_AT_K = Measure("held-out pass@k, k all samples", answered_once, unit="points", scale=100.0, margin=0.01)
MANY_SAMPLES = Filter(
    "eval.samples",
    low=16,
    excuse="with fewer than 16 samples a question, and the claim is about many: set eval.samples",
)
TRUNCATED = Filter(
    "importance_sampling.mode",
    among=("truncate",),
    excuse="without truncated importance weights, which belong to the method: set importance_sampling.mode=truncate",
)
NOISY_ADAPTERS = Contrast(
    "noise on adapters - none",
    NOISE,
    (
        Side(
            "noise on adapters",
            +1,
            (
                Filter("noise.where", among=("adapters",)),
                Filter("aqn.name", excluding=("none",)),
                Filter("aqn.level", excluding=(0,)),
            ),
        ),
        Side("none", -1, (NO_NOISE,)),
    ),
)
CLIPPED = Filter(
    "train.updates_per_batch",
    low=2,
    excuse="with one update per batch, which never clips, and clipping is the cause that the paper names: set "
    "train.updates_per_batch",
)
RANDOM_REWARD = Contrast(
    "random - task",
    ("reward.",),
    (Side("random", +1, (Filter("reward.name", among=("random",)),)), Side("task", -1, (GRADED,))),
)
CERTAIN_ENTROPY, UNCERTAIN_ENTROPY = (
    Measure(f"entropy of {tokens} at the first step", first_step(name), ratio=True, margin=math.log(1.02), needs=name)
    for tokens, name in (
        ("the four fifths of tokens with least of it", "entropy/rest"),
        ("the fifth of tokens with most of it", "entropy/top20"),
    )
)
BF16 = Filter("quant.name", among=("bf16",))
SERVED_IN_NVFP4 = Filter("eval.quant", among=("nvfp4",))
ASKED = (ON_POLICY, ADAPTER, LEARNS, EVALUATED, GRADED, AS_TRAINED, ONE_FORMAT, *WEIGHTS_ALONE)
SERVED = (ON_POLICY, ADAPTER, LEARNS, EVALUATED, GRADED, ONE_FORMAT, NO_NOISE, *WEIGHTS_ALONE)
MIXED = (ON_POLICY, ADAPTER, LEARNS, GRADED, AS_TRAINED, NO_NOISE, *WEIGHTS_ALONE)
SAMPLED_IN_NVFP4 = Filter("rollout.quant", among=("nvfp4",))
TWO_PRECISIONS = Contrast(
    "bf16 sampled from nvfp4 - nvfp4",
    (*FORMAT, "rollout.quant"),
    (
        Side("bf16 sampled from nvfp4", +1, (BF16, SAMPLED_IN_NVFP4)),
        Side("nvfp4", -1, (NVFP4, Filter("rollout.quant", among=(None, "nvfp4")))),
    ),
)
FOUR_BIT_SAMPLER = Contrast(
    "sampled from nvfp4 - from bf16",
    ("rollout.quant",),
    (Side("sampled from nvfp4", +1, (SAMPLED_IN_NVFP4,)), Side("sampled from bf16", -1, (ONE_FORMAT,))),
)
FORMATS_AT_SCALE = "python src/run.py experiment=paper/table1 recipe=none quant=bf16,nvfp4 -m"
MIXED_RUNS = "python src/run.py experiment=tiny/base quant=bf16,nvfp4 rollout.quant=nvfp4 -m"
MIXED_AT_SCALE = (
    "python src/run.py experiment=paper/gsm8k model=qwen3-1.7b quant=bf16,nvfp4 rollout.quant=nvfp4 "
    "train.updates_per_batch=1 -m"
)
ROUNDS = Filter(
    "model.dtype",
    among=("bfloat16", "float16"),
    excuse="computed in float32, where nothing but rounding parts sampler and trainer: set model.dtype",
)
RANK_1 = "python src/run.py experiment=tiny/ranks quant=bf16 lora.rank=1,32 -m"
RANK_1_AT_SCALE = (
    "python src/run.py experiment=paper/figure10 quant=bf16 aqn=none quantizer=rtn lora.rank=1,32 lora.alpha=32 -m"
)
ONE_ALPHA = (GRPO, NEAREST, DEFAULT_RATE, Filter("lora.alpha", among=(32,)))


def _of_ais(
    title: str, what: str, expected: Literal["more", "less"], measure: Measure, explores: bool = False
) -> Claim:
    """A claim about a 4-bit sampler beside a 16-bit one, both with a 16-bit trainer."""
    return Claim(
        title=title,
        statement=f"With a 16-bit trainer, rollouts from 4-bit weights have {what}.",
        paper="a bonus early, harm late, no number",
        source="abstract: the mismatch of a low-bit sampler is an exploration bonus at first and harm later. Early is "
        "the second tenth of the steps here. No importance weights; named after the runs were made",
        expected=expected,
        measure=measure,
        where=(*MIXED, BF16),
        primary=PRIMARY,
        contrasts=(FOUR_BIT_SAMPLER,),
        explores=explores,
        exploratory=True,
        gates=(learned,),
        command="python src/run.py experiment=tiny/base quant=bf16 rollout.quant=null,nvfp4 -m",
        at_scale="python src/run.py experiment=paper/gsm8k model=qwen3-1.7b quant=bf16 rollout.quant=null,nvfp4 -m",
    )


LITERATURE = (
    Paper(
        name="Entrocraft",
        address="arXiv 2604.26326",
        claims=(
            Claim(
                title="Linear annealing is best",
                statement="Noise that decays linearly ends with more reward than noise that decays exponentially.",
                paper="best of its schedules, no number",
                source="abstract: entropy that starts high and falls linearly does best. The paper steers entropy "
                "by rejecting samples; here the noise falls linearly. QeRL claims the opposite",
                expected="more",
                measure=LATE_REWARD,
                where=NVFP4_RUNS,
                primary=NOISY,
                contrasts=schedules("linear", "exp"),
                explores=True,
                gates=(
                    ManipulationCheck(NOISY_ENTROPY, (noise("linear"), noise("exp")), (*NVFP4_RUNS, *NOISY)),
                    *TRAINED,
                ),
                command="python src/run.py experiment=tiny/schedules -m",
                at_scale="python src/run.py experiment=paper/figure9 -m",
            ),
        ),
    ),
    Paper(
        name="MXFP4 error in RL",
        address="arXiv 2605.20402",
        claims=(
            Claim(
                title="Grid error raises entropy",
                statement="Of two 4-bit formats that round to nearest, the one with more grid noise in its weights "
                "samples with more entropy: MXFP4 over NVFP4, and NVFP4 over NF4.",
                paper="more, no number",
                source="the paper divides MXFP4's error into parts of grid and scale, of which the first raises "
                "entropy. The order of the formats here is that of grid_noise in studies/quantizers, "
                "0.0119, 0.0088 and 0.0080 of the squared weights; their dead zones differ as well",
                expected="more",
                measure=INITIAL_ENTROPY,
                where=LEARNING,
                primary=PRIMARY,
                contrasts=(*formats("nvfp4", "mxfp4"), *formats("nf4", "nvfp4")),
                command=MAIN,
                at_scale="python src/run.py experiment=paper/table1 recipe=none quant=mxfp4,nvfp4,nf4 -m",
            ),
        ),
    ),
    Paper(
        name="FP16 against the mismatch",
        address="arXiv 2510.26788",
        claims=(
            Claim(
                title="FP16 removes the mismatch",
                statement="Sampler and trainer that compute in FP16 differ less than in BF16.",
                paper="eliminated, no number",
                source="abstract: the rounding of BF16 is the root of the mismatch, and FP16 removes it. Without loss "
                "scaling here; fused kernels compute in BF16 only, so FP16 takes plain PyTorch, and kernel=torch must "
                "hold for both",
                expected="less",
                measure=LATE_MISMATCH,
                where=(*LEARNING, BF16, NO_NOISE, Filter("kernel", among=("torch",))),
                primary=PRIMARY,
                contrasts=(two_values("model.dtype", "float16", "bfloat16", ("model.dtype",)),),
                gates=TRAINED,
                command="python src/run.py experiment=tiny/base quant=bf16 kernel=torch "
                "model.dtype=bfloat16,float16 -m",
                at_scale="python src/run.py experiment=paper/gsm8k model=qwen2.5-3b-instruct quant=bf16 kernel=torch "
                "model.dtype=bfloat16,float16 seed=0,1,2 -m",
            ),
        ),
    ),
    Paper(
        name="QUADS",
        address="arXiv 2607.15810",
        claims=(
            Claim(
                title="4-bit weights alone do not part sampler and trainer",
                statement="With 4-bit weights and 16-bit activations the gap between sampler and trainer grows over "
                "the run as with 16-bit weights.",
                paper="stable, where 4-bit activations collapse after about 150 steps",
                source="the paper samples with other weights than it trains; here both have the same 4-bit weights, "
                "which should be easier; the next claim has two formats. 4-bit activations (quant.activations) do not "
                "count",
                expected="same",
                measure=MISMATCH_GROWTH,
                where=(*LEARNING, ROUNDS),
                primary=PRIMARY,
                contrasts=formats("bf16", "nvfp4"),
                gates=TRAINED,
                command="python src/run.py experiment=tiny/base quant=bf16,nvfp4 model.dtype=bfloat16 -m",
                at_scale="python src/run.py experiment=paper/table1 recipe=method/lora,method/nvfp4 optim.lr=1e-5 "
                "steps=300 -m",
            ),
            Claim(
                title="The gap of a 4-bit sampler does not grow",
                statement="With a 16-bit trainer the gap between sampler and trainer grows over the run no faster if "
                "the sampler has 4-bit weights.",
                paper="stable, where 4-bit activations collapse after about 150 steps",
                source="as the claim before, with the paper's two formats",
                expected="same",
                measure=MISMATCH_GROWTH,
                where=(*MIXED, BF16, ROUNDS),
                primary=PRIMARY,
                contrasts=(FOUR_BIT_SAMPLER,),
                gates=TRAINED,
                command="python src/run.py experiment=tiny/base quant=bf16 rollout.quant=null,nvfp4 "
                "model.dtype=bfloat16 -m",
                at_scale="python src/run.py experiment=paper/gsm8k model=qwen3-1.7b quant=bf16 "
                "rollout.quant=null,nvfp4 steps=300 -m",
            ),
        ),
    ),
    Paper(
        name="LoRA Without Regret",
        address="https://thinkingmachines.ai/blog/lora",
        claims=(
            Claim(
                title="Rank 1 is enough",
                statement="An adapter of rank 1 ends with the reward of one of rank 32.",
                paper="rank 1 matches full training, no number",
                source="policy gradients on mathematical questions; a reward of one bit needs little capacity. It "
                "compares with full training at the best rate of each; here both ranks have one rate and one alpha",
                expected="same",
                measure=LATE_REWARD,
                where=(*LEARNING, BF16, NO_NOISE),
                primary=ONE_ALPHA,
                contrasts=(rank(1),),
                gates=TRAINED,
                command=RANK_1,
                at_scale=RANK_1_AT_SCALE,
            ),
        ),
    ),
    Paper(
        name="PEFT for RLVR",
        address="arXiv 2512.23165",
        claims=(
            Claim(
                title="Rank 1 is a bottleneck",
                statement="A policy with an adapter of rank 1 answers fewer held-out questions than one with rank 32.",
                paper="less, no number",
                source="abstract: extreme reduction, such as rank 1, holds reasoning back "
                "(DeepSeek-R1-Distill-Qwen 1.5B and 7B). Contradicts LoRA Without Regret",
                expected="less",
                measure=paper.ACCURACY,
                where=(*ANSWERING, BF16, NO_NOISE),
                primary=ONE_ALPHA,
                contrasts=(rank(1),),
                gates=TRAINED,
                command=RANK_1,
                at_scale=RANK_1_AT_SCALE,
            ),
        ),
    ),
    Paper(
        name="Quantization and RL of reasoning models",
        address="arXiv 2511.15694",
        claims=(
            Claim(
                title="Quantizing after RL keeps the answers",
                statement="A policy trained on 16-bit weights answers as many held-out questions on NVFP4 weights.",
                paper="preserved at 4 bits, no number",
                source="quantization after RL and QLoRA did well, quantization-aware training badly (Qwen3, 0.6B to "
                "8B). It quantizes whole models; here the base is rounded to nearest and the adapter stays apart",
                expected="same",
                measure=paper.ACCURACY,
                where=(*SERVED, BF16),
                primary=PRIMARY,
                contrasts=(
                    Contrast(
                        "served in nvfp4 - served in bf16",
                        ("eval.quant",),
                        (
                            Side("served in nvfp4", +1, (SERVED_IN_NVFP4,)),
                            Side("served in bf16", -1, (AS_TRAINED,)),
                        ),
                    ),
                ),
                gates=TRAINED,
                command="python src/run.py experiment=tiny/base quant=bf16 eval.quant=null,nvfp4 -m",
                at_scale="python src/run.py experiment=paper/gsm8k model=qwen3-1.7b quant=bf16 "
                "eval.quant=null,nvfp4 -m",
            ),
            Claim(
                title="Training on 4-bit weights is as good as quantizing afterwards",
                statement="Served in NVFP4, a policy trained on NVFP4 weights answers as many held-out questions as "
                "one trained on 16-bit weights.",
                paper="both did well, no number",
                source="the paper's QLoRA against quantization after training",
                expected="same",
                measure=paper.ACCURACY,
                where=SERVED,
                primary=PRIMARY,
                contrasts=(
                    Contrast(
                        "trained in nvfp4 - in bf16",
                        (*FORMAT, "eval.quant"),
                        (
                            Side("trained in nvfp4", +1, (NVFP4, Filter("eval.quant", among=("nvfp4", None)))),
                            Side("trained in bf16", -1, (BF16, SERVED_IN_NVFP4)),
                        ),
                    ),
                ),
                gates=TRAINED,
                command="python src/run.py experiment=tiny/base quant=bf16,nvfp4 eval.quant=nvfp4 -m",
                at_scale="python src/run.py experiment=paper/gsm8k model=qwen3-1.7b quant=bf16,nvfp4 "
                "eval.quant=nvfp4 -m",
            ),
        ),
    ),
    Paper(
        name="Jet-RL",
        address="arXiv 2601.14243",
        claims=(
            Claim(
                title="Two precisions learn worse than one",
                statement="A 16-bit trainer whose rollouts come from 4-bit weights ends with less reward than one with "
                "4-bit weights in both.",
                paper="collapse on long rollouts and hard tasks",
                source="abstract: BF16 training with FP8 rollouts is unstable, and one precision in both is not. The "
                "paper rounds activations too, to 8 bits; here weights alone, to 4 bits, and no importance weights",
                expected="less",
                measure=LATE_REWARD,
                where=MIXED,
                primary=PRIMARY,
                contrasts=(TWO_PRECISIONS,),
                gates=(learned,),
                command=MIXED_RUNS,
                at_scale=MIXED_AT_SCALE,
            ),
        ),
    ),
    Paper(
        name="QaRL",
        address="arXiv 2604.07853",
        claims=(
            Claim(
                title="Two precisions answer worse than one",
                statement="A 16-bit trainer whose rollouts come from 4-bit weights answers fewer held-out questions "
                "than one with 4-bit weights in both.",
                paper="-5.5 points",
                paper_effects=(-0.055,),
                source="abstract: a trainer that computes as the quantized rollout does gains 5.5 points over one that "
                "does not (Qwen3-30B-A3B), with a new objective besides. Each arm answers in its trainer's format",
                expected="less",
                measure=paper.ACCURACY,
                where=(*MIXED, EVALUATED),
                primary=PRIMARY,
                contrasts=(TWO_PRECISIONS,),
                gates=(learned,),
                command=MIXED_RUNS,
                at_scale=MIXED_AT_SCALE,
            ),
        ),
    ),
    Paper(
        name="HiFloat4 for RL",
        address="arXiv 2607.26515",
        claims=(
            Claim(
                title="16 bits for the trainer alone make it worse",
                statement="With rollouts from 4-bit weights a 16-bit trainer answers fewer held-out questions than one "
                "with 4-bit weights.",
                paper="worse than 4 bits in both, no number",
                source="abstract: giving 16 bits back to the trainer alone is worse than 4 bits throughout. The paper "
                "rounds activations too and trains all weights. QaRL's contrast, and named after its runs were made",
                expected="less",
                measure=paper.ACCURACY,
                where=(*MIXED, EVALUATED),
                primary=PRIMARY,
                contrasts=(TWO_PRECISIONS,),
                exploratory=True,
                gates=(learned,),
                command=MIXED_RUNS,
                at_scale=MIXED_AT_SCALE,
            ),
        ),
    ),
    Paper(
        name="AIS",
        address="arXiv 2605.13907",
        claims=(
            _of_ais("A 4-bit sampler explores early", "more entropy early", "more", EARLY_ENTROPY),
            _of_ais("Its exploration pays early", "more reward early", "more", EARLY_REWARD, explores=True),
            _of_ais("It harms late", "less reward late", "less", LATE_REWARD),
        ),
    ),
    Paper(
        name="ReSET",
        address="arXiv 2606.13233",
        claims=(
            Claim(
                title="NVFP4 unsettles certain tokens",
                statement="NVFP4 weights raise the entropy of the four fifths of tokens with least entropy.",
                paper="more wrong samples there, no number",
                source="abstract: quantization increases incorrect sampling at low-entropy tokens. The paper rounds "
                "activations too, and ranks tokens by one text; here each policy ranks its own",
                expected="more",
                measure=CERTAIN_ENTROPY,
                where=LEARNING,
                primary=PRIMARY,
                contrasts=formats("bf16", "nvfp4"),
                command=MAIN,
                at_scale=FORMATS_AT_SCALE,
            ),
            Claim(
                title="NVFP4 narrows uncertain tokens",
                statement="NVFP4 weights lower the entropy of the fifth of tokens with most entropy.",
                paper="over-concentration, no number",
                source="abstract: over-concentration on a few tokens in steps of high uncertainty; as above",
                expected="less",
                measure=UNCERTAIN_ENTROPY,
                where=LEARNING,
                primary=PRIMARY,
                contrasts=formats("bf16", "nvfp4"),
                command=MAIN,
                at_scale=FORMATS_AT_SCALE,
            ),
        ),
    ),
    Paper(
        name="PSN-RLVR",
        address="arXiv 2602.02555",
        claims=(
            Claim(
                title="Noise in parameters raises pass@k",
                statement="A policy whose rollouts have noise on the trained parameters answers more held-out "
                "questions in at least one of many samples.",
                paper="higher pass@k for large k, no number",
                source="abstract: parameters are perturbed before the rollout, with truncated importance weights, and "
                "the noise adapts. Here the trained parameters are an adapter's, and the noise follows a schedule",
                expected="more",
                measure=PASS_AT_K,
                where=(*ASKED, BF16, MANY_SAMPLES, TRUNCATED),
                primary=PRIMARY,
                contrasts=(NOISY_ADAPTERS,),
                explores=True,
                gates=(ManipulationCheck(NOISY_ENTROPY, (NOISY_ADAPTERS,), (*ASKED, BF16, *PRIMARY)), *TRAINED),
                command="python src/run.py experiment=tiny/base quant=bf16 noise.where=adapters aqn=none,matched "
                "importance_sampling.mode=truncate importance_sampling.clip_max=2 -m",
                at_scale="python src/run.py experiment=paper/gsm8k model=qwen3-1.7b quant=bf16 noise.where=adapters "
                "aqn=none,matched importance_sampling.mode=truncate importance_sampling.clip_max=2 eval.samples=64 -m",
            ),
        ),
    ),
    Paper(
        name="First study of this project",
        address="studies/tiny",
        claims=(
            Claim(
                title="Noise helps without quantization",
                statement="Adaptive quantization noise raises the accuracy that a 16-bit policy ends with.",
                paper="+0.77 [+0.27, +1.26] points",
                paper_effects=(0.0077,),
                source="noise minus none over four formats, BF16 among them, eight seeds of one base; found by "
                "looking, so it waits for other bases. Its noise did not raise the entropy",
                expected="more",
                measure=paper.ACCURACY,
                where=(*ANSWERING, BF16),
                primary=NOISY,
                contrasts=(noise(),),
                explores=True,
                gates=(ManipulationCheck(NOISY_ENTROPY, (noise(),), (*LEARNING, BF16, *NOISY)), *TRAINED),
                command="python src/run.py experiment=worlds/outliers quant=bf16 aqn=none,matched "
                "model.seed=0,1,2,3 -m",
                at_scale="python src/run.py experiment=paper/gsm8k quant=bf16 aqn=none,exp seed=0,1,2,3 -m",
            ),
        ),
    ),
    Paper(
        name="Spurious Rewards",
        address="arXiv 2506.10947",
        claims=(
            Claim(
                title="Random rewards nearly match true ones",
                statement="A policy that was trained on random rewards answers about as many held-out questions as one "
                "trained on true ones.",
                paper="+21.4 points against +29.1",
                paper_effects=(-0.077,),
                source="abstract: MATH-500, Qwen2.5-Math-7B; Llama 3 and OLMo 2 gain nothing. The cause named is the "
                "clipping of the ratio. Other families, and so the tiny model, should contradict this",
                expected="same",
                measure=NEARLY_AS_ACCURATE,
                where=(ON_POLICY, ADAPTER, LEARNS, EVALUATED, AS_TRAINED, ONE_FORMAT, BF16, NO_NOISE, CLIPPED),
                primary=PRIMARY,
                contrasts=(RANDOM_REWARD,),
                gates=(learned,),
                command="python src/run.py experiment=tiny/base quant=bf16 train.updates_per_batch=4 "
                "reward=task,random -m",
                at_scale="python src/run.py experiment=paper/gsm8k model=hub model.id=Qwen/Qwen2.5-Math-7B "
                "task=bigmath task.max_completion_tokens=3072 eval.max_tokens=3072 steps=300 quant=bf16 "
                "reward=task,random -m",
            ),
        ),
    ),
)

REGISTRIES = {
    "qerl": paper.CLAIMS,
    "literature": tuple(claim for one in LITERATURE for claim in one.claims),
}
HEADER = ("paper", "claim", "experiment", "verdict", "effect [95 % interval]")


def page_table(results: Sequence[ClaimResult]) -> str:
    """A Markdown table: paper, claim, the command that makes its runs, the verdict on each, and its effects."""
    of_title = {result.claim.title: result for result in results}
    rows = [
        (f"{one.name} ({one.address})", claim.title, f"`{claim.command}`", *_verdict_cells(of_title[claim.title]))
        for one in LITERATURE
        for claim in one.claims
    ]
    return markdown_table(HEADER, rows) + "\n"


def _verdict_cells(result: ClaimResult) -> tuple[str, str]:
    effects = [
        f"{one.contrast.label}: {result.claim.measure.estimate_text(one.primary.effect.whole)}"
        + (f", greedy {greedy_text(result, one)}" if result.greedy else "")
        for one in result.voting
        if one.primary and one.primary.effect
    ]
    verdict = f"**{result.verdict}**" + (", exploratory" if result.claim.exploratory else "")
    reason = f": {result.reason}" if result.reason else ""
    return f"{verdict}{reason}", "; ".join(effects) or "-"
