"""The claims of QeRL (arXiv 2510.11696v1) as data: what is compared, the direction, and the paper's own numbers.

The margins are our judgement of the smallest difference that would change a decision: one point of accuracy, a fiftieth
of the reward for a correct answer, two per cent of an entropy, five per cent of a time or a memory.

Each claim names one primary setting, which alone votes, and gates, without which its contrast could not show the
effect. All other runs are robustness checks. A change after a study has data needs a dated line in docs/LOG.md.
"""

from __future__ import annotations

import math

from qerl_bench.studies.claims.claim import Claim
from qerl_bench.studies.claims.contrasts import (
    ADAPTER,
    ANSWERING,
    DEFAULT_RATE,
    EVALUATED,
    GRPO,
    LEARNING,
    LEARNS,
    NEAREST,
    NOISE,
    NVFP4,
    ON_POLICY,
    OWN_KERNELS,
    PRIMARY,
    RANK_32,
    SIGMA,
    USUAL,
    formats,
    high_rate,
    noise,
    other_ranks,
    published,
    rank,
    schedules,
)
from qerl_bench.studies.claims.match import Filter
from qerl_bench.studies.claims.preconditions import ManipulationCheck, learned, stable
from qerl_bench.studies.runs.measure import (
    ACCURACY,
    Measure,
    area,
    difference,
    first_step,
    last_fifth_mean,
    mean_between,
    mean_gain,
    median_after_warmup,
    peak,
    steps_saved,
)

INITIAL_ENTROPY = Measure(
    "entropy of the sampler at the first step", first_step("entropy"), ratio=True, margin=math.log(1.02)
)
NOISY_ENTROPY = Measure(
    "entropy of the sampler over the second tenth of the steps", mean_between("entropy", 0.1, 0.2), ratio=True
)
REWARD = Measure("mean reward over the run (area under its curve)", area("reward/mean"), unit="reward", margin=0.02)
LATE_REWARD = Measure(
    "mean reward over the last fifth of the steps", last_fifth_mean("reward/mean"), unit="reward", margin=0.02
)
SPEED_MARGIN = math.log(1.05)
ROLLOUT = Measure(
    "completion tokens per second",
    median_after_warmup("speed/rollout_tok_s"),
    ratio=True,
    margin=SPEED_MARGIN,
    gpu=True,
)
STEP = Measure("seconds per step", median_after_warmup("time/step_s"), ratio=True, margin=SPEED_MARGIN, gpu=True)
MEMORY = Measure("peak memory", peak("memory/peak_gib"), ratio=True, margin=SPEED_MARGIN, gpu=True, exact=True)

NVFP4_RUNS = (*LEARNING, NVFP4)
NOISY = (*PRIMARY, SIGMA)
EIGHT = Filter("completions", among=(8,))  # per step, as in the paper's Table 6
SPEEDS = (RANK_32, GRPO, NEAREST, EIGHT, *OWN_KERNELS)
TRAINED = (learned, stable)

MAIN = "python src/run.py experiment=tiny/main -m"
TABLE_1 = "python src/run.py experiment=paper/table1"
SPEED = "python src/run.py experiment=speed/rollout rollout.prompts_per_step=1 -m"

CLAIMS = (
    Claim(
        title="4-bit raises initial entropy",
        statement="A policy with 4-bit weights samples with more entropy than the same policy with 16-bit weights.",
        paper="more, no number",
        source="Fig. 5 (7B, GSM8K): 4-bit above 16-bit, between 0.1 and 0.3, the gap largest early; one seed, no table",
        expected="more",
        measure=INITIAL_ENTROPY,
        where=LEARNING,
        primary=PRIMARY,
        contrasts=formats("bf16", "nvfp4", "mxfp4", "nf4"),
        command=MAIN,
        at_scale="python src/run.py experiment=paper/figure4_grpo -m",
    ),
    Claim(
        title="Faster reward growth than 16-bit LoRA",
        statement="Reward grows faster with NVFP4 weights and LoRA than with 16-bit weights and LoRA.",
        paper="200 steps against over 500",
        source="Fig. 7 (7B, BigMath); Fig. 4 (7B, GSM8K): peak near step 80 against 110. The paper gave its 4-bit "
        "arms twice the learning rate (1e-5 against 5e-6); matched arms have the same. A run that starts lower has "
        "less area and more to gain, so the gain above its start is shown too",
        expected="more",
        measure=REWARD,
        where=LEARNING,
        primary=PRIMARY,
        contrasts=(
            *formats("bf16", "nvfp4"),
            published("NVFP4-LoRA", "LoRA", differ=("optim.lr",)),
            published("QeRL", "LoRA", differ=("optim.lr", *NOISE)),
        ),
        gates=TRAINED,
        command=MAIN,
        at_scale=f"{TABLE_1} recipe=method/lora,method/nvfp4 optim.lr=1e-5 -m",
        additional=(
            ("difference of the mean reward above the run's start", difference(mean_gain("reward/mean"))),
            ("steps saved to 90 % of BF16's gain", steps_saved),
        ),
    ),
    Claim(
        title="Higher final accuracy than 16-bit LoRA",
        statement="After training, NVFP4 with LoRA answers more held-out questions than 16-bit weights with LoRA.",
        paper="+7.2 (3B), +0.4 (7B) points",
        paper_effects=(0.072, 0.004),
        source="Table 1 (GSM8K), 83.3 against 76.1 and 88.5 against 88.1, one seed; Table 2 (BigMath, mean of four): "
        "+1.3 at 7B, +0.3 at 14B, -0.8 at 32B",
        expected="more",
        measure=ACCURACY,
        where=ANSWERING,
        primary=PRIMARY,
        contrasts=(
            *formats("bf16", "nvfp4"),
            published("NVFP4-LoRA", "LoRA", differ=("optim.lr",)),
            published("QeRL", "LoRA", differ=("optim.lr", *NOISE)),
        ),
        gates=TRAINED,
        command=MAIN,
        at_scale=f"{TABLE_1} recipe=method/lora,method/nvfp4 optim.lr=1e-5 -m",
    ),
    Claim(
        title="AQN adds to it",
        statement="Adaptive quantization noise raises the accuracy that an NVFP4 policy ends with.",
        paper="+0.4 (3B), +2.3 (7B) points",
        paper_effects=(0.004, 0.023),
        source="Table 1 (GSM8K), one seed; Table 2 (BigMath, mean of four): -0.6 at 7B, +1.5 at 14B, +4.2 at 32B",
        expected="more",
        measure=ACCURACY,
        where=(*ANSWERING, NVFP4),
        primary=NOISY,
        contrasts=(noise(),),
        explores=True,
        gates=(ManipulationCheck(NOISY_ENTROPY, (noise(),), (*NVFP4_RUNS, *NOISY)), *TRAINED),
        command=MAIN,
        at_scale=f"{TABLE_1} recipe=method/nvfp4,method/qerl -m",
    ),
    Claim(
        title="Exponential decay is best",
        statement="Noise that decays exponentially ends with more reward than noise that decays in another way.",
        paper="best late, no number",
        source="Fig. 9 (3B, 150 steps): equal early; the other schedules are not given as formulas",
        expected="more",
        measure=LATE_REWARD,
        where=NVFP4_RUNS,
        primary=NOISY,
        contrasts=schedules("exp", "linear", "cosine", "log"),
        explores=True,
        gates=(
            ManipulationCheck(
                NOISY_ENTROPY, tuple(map(noise, ("exp", "linear", "cosine", "log"))), (*NVFP4_RUNS, *NOISY)
            ),
            *TRAINED,
        ),
        command="python src/run.py experiment=tiny/schedules -m",
        at_scale="python src/run.py experiment=paper/figure9 -m",
    ),
    Claim(
        title="Rank matters little",
        statement="The rank of the adapter hardly changes how reward grows.",
        paper="near-identical, no number",
        source="Fig. 10 (3B, 150 steps): ranks 16, 32, 64 and 128, 16 slightly faster",
        expected="same",
        measure=REWARD,
        where=NVFP4_RUNS,
        primary=(GRPO, NEAREST, DEFAULT_RATE, Filter("lora.alpha", among=(32,))),
        contrasts=(rank(16), rank(64), other_ranks(16, 64)),
        gates=TRAINED,
        command="python src/run.py experiment=tiny/ranks -m",
        at_scale="python src/run.py experiment=paper/figure10 -m",
    ),
    Claim(
        title="Quantized policies bear a higher learning rate",
        statement="A high learning rate does less harm to an NVFP4 policy than to a 16-bit one.",
        paper="16-bit collapses, no number",
        source="Figs. 16 and 17 (7B): at 3e-5 instead of 5e-6 QeRL learns twice as fast and stays stable",
        expected="more",
        measure=LATE_REWARD,
        where=LEARNING,
        primary=(RANK_32, GRPO, NEAREST),
        contrasts=(
            high_rate("NVFP4-LoRA", "LoRA", Filter("lr_factor", low=2.9, high=3.5), DEFAULT_RATE, times="3x"),
            high_rate(
                "NVFP4-LoRA",
                "LoRA",
                Filter("lr_factor", low=3.6, high=20.0),
                DEFAULT_RATE,
                times="higher",
                robustness=True,
            ),
            high_rate("QeRL", "LoRA", Filter("optim.lr", among=(3e-5,)), Filter("optim.lr", among=(5e-6,)), NOISE),
        ),
        gates=(learned,),
        command="python src/run.py experiment=tiny/learning_rates -m",
        at_scale="python src/run.py experiment=paper/figure16 recipe=method/lora,method/nvfp4 optim.lr=1e-5,6e-5 -m",
    ),
    Claim(
        title="NF4 trails",
        statement="After training, NF4 answers fewer held-out questions than NVFP4.",
        paper="-7.2 (3B), -3.5 (7B) points",
        paper_effects=(-0.072, -0.035),
        source="Table 1 (GSM8K): 76.1 against 83.3 and 85.0 against 88.5, one seed",
        expected="less",
        measure=ACCURACY,
        where=ANSWERING,
        primary=PRIMARY,
        contrasts=(
            *formats("nvfp4", "nf4", factor=("quant.",)),
            published("QLoRA", "NVFP4-LoRA", differ=("quantizer.",), factor=("quant.",)),
        ),
        gates=TRAINED,
        command=MAIN,
        at_scale=f"{TABLE_1} recipe=method/qlora,method/nvfp4 quantizer=rtn -m",
    ),
    Claim(
        title="The reverse holds for supervised fine-tuning",
        statement="In supervised fine-tuning quantization error only harms: 4-bit weights end with less accuracy.",
        paper="less, no number",
        source="stated in the text; no experiment of the paper shows it",
        expected="less",
        measure=ACCURACY,
        where=(Filter("algo.name", among=("sft",)), ADAPTER, LEARNS, EVALUATED, *USUAL),
        primary=(RANK_32, NEAREST, DEFAULT_RATE),
        contrasts=formats("bf16", "nvfp4", "nf4"),
        gates=TRAINED,
        command="python src/run.py experiment=tiny/sft -m",
        at_scale="python src/run.py model=qwen2.5-7b-instruct task=gsm8k algo=sft eval=paper quant=bf16,nvfp4,nf4 "
        "seed=0,1,2 -m",
    ),
    Claim(
        title="Faster rollouts",
        statement="NVFP4 samples more tokens per second than 16-bit LoRA, and than NF4 (QLoRA).",
        paper="×1.3 and ×1.5 (7B)",
        paper_effects=(math.log(1.3), math.log(1.5)),
        source="Table 6 and Fig. 1 (H100, batch 8). Over 16-bit: ×1.0 at 3B, ×1.5 at 14B, ×1.8 to 2.0 at 32B",
        expected="more",
        measure=ROLLOUT,
        where=(ON_POLICY, ADAPTER, *USUAL),
        primary=SPEEDS,
        contrasts=(
            *formats("bf16", "nvfp4"),
            *formats("nf4", "nvfp4"),
            published("QeRL", "LoRA", differ=NOISE),
            published("QeRL", "QLoRA", differ=NOISE),
        ),
        command=SPEED,
        at_scale=SPEED,
    ),
    Claim(
        title="Faster steps, end to end",
        statement="A whole step of training takes less time with NVFP4 than with 16-bit LoRA.",
        paper="×0.67 to 0.83 of the time (7B)",
        paper_effects=(math.log(0.67), math.log(0.83)),
        source="Table 3 (H100): ×1.5, 1.4 and 1.2 as fast at batch 2, 4 and 8; Table 6 for the same model: ×1.1 to 1.2",
        expected="less",
        measure=STEP,
        where=(ON_POLICY, ADAPTER, *USUAL),
        primary=SPEEDS,
        contrasts=(*formats("bf16", "nvfp4"), published("QeRL", "LoRA", differ=NOISE)),
        command=SPEED,
        at_scale=SPEED,
    ),
    Claim(
        title="Less memory",
        statement="Training with NVFP4 needs less memory at its peak than with 16-bit LoRA.",
        paper="×0.4 to 0.5",
        paper_effects=(math.log(0.4), math.log(0.5)),
        source="stated in the text; no peak was reported, only weights on disk, 5.9 against 15.2 GB at 7B (×0.39)",
        expected="less",
        measure=MEMORY,
        where=(ON_POLICY, ADAPTER, *USUAL),
        primary=SPEEDS,
        contrasts=(*formats("bf16", "nvfp4"), published("QeRL", "LoRA", differ=NOISE)),
        command=SPEED,
        at_scale=SPEED,
    ),
)
