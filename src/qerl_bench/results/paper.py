"""The claims of QeRL (arXiv 2510.11696v1) as data: what is compared, which way it should go, the paper's own numbers.

The margins are ours, and judgements: a point of accuracy, a fiftieth of the reward for a right answer, two per cent of
an entropy and five of a time or a memory are the smallest differences that anybody would choose a setting by. Unless a
claim is about it, arms have one learning rate, no noise, and at most five times the rate of the model's YAML.
"""

from __future__ import annotations

import math

from qerl_bench.results.judge import Claim
from qerl_bench.results.match import Arm, Contrast, Where
from qerl_bench.results.measure import (
    Measure,
    area,
    climb,
    difference,
    first,
    held_out,
    largest,
    late,
    steps_saved,
    typical,
)

INITIAL_ENTROPY = Measure("entropy of the sampler at the first step", first("entropy"), ratio=True)
REWARD = Measure("mean reward over the run (area under its curve)", area("reward/mean"), unit="reward")
LATE_REWARD = Measure("mean reward over the last fifth of the steps", late("reward/mean"), unit="reward")
ACCURACY = Measure("held-out accuracy after training, sampled", held_out("sampled"), unit="points", scale=100.0)
ROLLOUT = Measure("completion tokens per second", typical("speed/rollout_tok_s"), ratio=True, gpu=True)
STEP = Measure("seconds per step", typical("time/step_s"), ratio=True, gpu=True)
MEMORY = Measure("peak memory", largest("memory/peak_gib"), ratio=True, gpu=True)

ON_POLICY = Where("algo.name", excluding=("sft",))
NO_NOISE = Where("aqn.name", among=("none",))
ADAPTER = Where("lora.rank", low=1, high=math.inf)
USUAL_RATE = Where("lr_factor", low=0.9, high=5.0)
NVFP4 = Where("quant.name", among=("nvfp4",))
PLAIN = (ON_POLICY, NO_NOISE, ADAPTER, USUAL_RATE)


def against(key: str, treated: str, control: str, *factor: str) -> Contrast:
    """`treated` minus `control`, two values of a config key; everything under `factor` may differ with it."""
    arms = (Arm(treated, +1, (Where(key, among=(treated,)),)), Arm(control, -1, (Where(key, among=(control,)),)))
    return Contrast(f"{treated} - {control}", factor, arms)


def formats(control: str, *treated: str) -> tuple[Contrast, ...]:
    return tuple(against("quant.name", quant, control, "quant.") for quant in treated)


def schedules(treated: str, *controls: str) -> tuple[Contrast, ...]:
    """Same first and last noise, same stages: only the shape differs."""
    return tuple(against("aqn.name", treated, control, "aqn.name", "aqn._target_") for control in controls)


def ranks(label: str, low: float, high: float) -> Contrast:
    arms = (
        Arm(label, +1, (Where("lora.rank", low=low, high=high),)),
        Arm("rank 32", -1, (Where("lora.rank", among=(32,)),)),
    )
    return Contrast(f"{label} - rank 32", ("lora.rank", "lora.alpha"), arms)


def high_rate() -> Contrast:
    """What a learning rate of five to twenty times the model's does to NVFP4, minus what it does to BF16."""
    high, usual = Where("lr_factor", low=5.0, high=20.0), Where("lr_factor", low=0.99, high=1.01)
    arms = tuple(
        Arm(f"{quant} at {rate}", sign if quant == "nvfp4" else -sign, (Where("quant.name", among=(quant,)), where))
        for quant in ("nvfp4", "bf16")
        for rate, sign, where in (("a high rate", 1, high), ("the usual rate", -1, usual))
    )
    return Contrast("(nvfp4 high - usual) - (bf16 high - usual)", ("quant.", "optim.lr"), arms)


GPU_RUNS = (
    "python src/run.py model=qwen2.5-7b-instruct task=gsm8k device=cuda steps=30 quant=bf16,nf4,nvfp4 -m seed=0,1,2,3,4"
)

CLAIMS = (
    Claim(
        title="4-bit raises initial entropy",
        statement="A policy with 4-bit weights samples with more entropy than the same policy with 16-bit weights.",
        paper="more, no number",
        source="Fig. 5 (7B, GSM8K): 4-bit above 16-bit, between 0.1 and 0.3, the gap largest early; one seed, no table",
        expected="more",
        measure=INITIAL_ENTROPY,
        margin=math.log(1.02),
        where=PLAIN,
        contrasts=formats("bf16", "nvfp4", "mxfp4", "nf4"),
        command="python src/run.py experiment=tiny/main -m",
    ),
    Claim(
        title="Faster reward growth than 16-bit LoRA",
        statement="Reward grows faster with NVFP4 weights and LoRA than with 16-bit weights and LoRA.",
        paper="200 steps against over 500",
        source="Fig. 7 (7B, BigMath); Fig. 4 (7B, GSM8K): peak near step 80 against 110. The paper gave NVFP4 twice "
        "the learning rate (1e-5 against 5e-6); here both have the same. A lower start makes the area smaller, and "
        "leaves more to gain: hence the gain above the own start, beside it",
        expected="more",
        measure=REWARD,
        margin=0.02,
        where=PLAIN,
        contrasts=formats("bf16", "nvfp4"),
        command="python src/run.py experiment=tiny/main -m",
        beside=(
            ("mean reward above the run's own start, difference", difference(climb("reward/mean"))),
            ("steps saved to 90 % of BF16's gain", steps_saved),
        ),
    ),
    Claim(
        title="Higher final accuracy than 16-bit LoRA",
        statement="After training, NVFP4 with LoRA answers more held-out questions than 16-bit weights with LoRA.",
        paper="+7.2 (3B), +0.4 (7B) points",
        source="Table 1 (GSM8K), 83.3 against 76.1 and 88.5 against 88.1, one seed; Table 2 (BigMath, mean of four): "
        "+1.3 at 7B, +0.3 at 14B, -0.8 at 32B",
        expected="more",
        measure=ACCURACY,
        margin=0.01,
        where=PLAIN,
        contrasts=formats("bf16", "nvfp4"),
        command="python src/run.py experiment=tiny/main -m",
    ),
    Claim(
        title="AQN adds to it",
        statement="Adaptive quantization noise raises the accuracy that an NVFP4 policy ends with.",
        paper="+0.4 (3B), +2.3 (7B) points",
        source="Table 1 (GSM8K), one seed; Table 2 (BigMath, mean of four): -0.6 at 7B, +1.5 at 14B, +4.2 at 32B",
        expected="more",
        measure=ACCURACY,
        margin=0.01,
        where=(ON_POLICY, NVFP4, ADAPTER, USUAL_RATE),
        contrasts=(against("aqn.name", "exp", "none", "aqn."),),
        command="python src/run.py experiment=tiny/main -m",
    ),
    Claim(
        title="Exponential decay is best",
        statement="Noise that decays exponentially ends with more reward than noise that decays in another way.",
        paper="best late, no number",
        source="Fig. 9 (3B, 150 steps): equal early; the other schedules are not given as formulas",
        expected="more",
        measure=LATE_REWARD,
        margin=0.02,
        where=(ON_POLICY, NVFP4, ADAPTER, USUAL_RATE),
        contrasts=schedules("exp", "linear", "cosine", "log"),
        command="python src/run.py experiment=tiny/schedules -m",
    ),
    Claim(
        title="Rank matters little",
        statement="The rank of the adapter hardly changes how reward grows.",
        paper="near-identical, no number",
        source="Fig. 10 (3B, 150 steps): ranks 16, 32, 64 and 128, 16 slightly faster",
        expected="same",
        measure=REWARD,
        margin=0.02,
        where=(ON_POLICY, NVFP4, NO_NOISE, USUAL_RATE),
        contrasts=(ranks("lower rank", 1, 31), ranks("higher rank", 33, math.inf)),
        command="python src/run.py experiment=tiny/ranks -m",
    ),
    Claim(
        title="Quantized policies bear a higher learning rate",
        statement="A high learning rate does less harm to an NVFP4 policy than to a 16-bit one.",
        paper="16-bit collapses, no number",
        source="Figs. 16 and 17 (7B): at 3e-5 instead of 5e-6 QeRL learns twice as fast and stays stable",
        expected="more",
        measure=LATE_REWARD,
        margin=0.02,
        where=(ON_POLICY, NO_NOISE, ADAPTER),
        contrasts=(high_rate(),),
        command="python src/run.py experiment=tiny/learning_rates -m",
    ),
    Claim(
        title="NF4 trails",
        statement="After training, NF4 answers fewer held-out questions than NVFP4.",
        paper="-7.2 (3B), -3.5 (7B) points",
        source="Table 1 (GSM8K): 76.1 against 83.3 and 85.0 against 88.5, one seed",
        expected="less",
        measure=ACCURACY,
        margin=0.01,
        where=PLAIN,
        contrasts=formats("nvfp4", "nf4"),
        command="python src/run.py experiment=tiny/main -m",
    ),
    Claim(
        title="The reverse holds for supervised fine-tuning",
        statement="In supervised fine-tuning quantization error only harms: 4-bit weights end with less accuracy.",
        paper="less, no number",
        source="said in the text; no experiment of the paper shows it",
        expected="less",
        measure=ACCURACY,
        margin=0.01,
        where=(Where("algo.name", among=("sft",)), ADAPTER, USUAL_RATE),
        contrasts=formats("bf16", "nvfp4", "nf4"),
        command="python src/run.py experiment=tiny/sft -m",
    ),
    Claim(
        title="Faster rollouts",
        statement="NVFP4 samples more tokens per second than 16-bit LoRA, and than NF4 (QLoRA).",
        paper="×1.3 and ×1.5 (7B)",
        source="Table 6 and Fig. 1 (H100, batch 8). Over 16-bit: ×1.0 at 3B, ×1.5 at 14B, ×1.8 to 2.0 at 32B",
        expected="more",
        measure=ROLLOUT,
        margin=math.log(1.05),
        where=PLAIN,
        contrasts=(*formats("bf16", "nvfp4"), *formats("nf4", "nvfp4")),
        command=GPU_RUNS,
    ),
    Claim(
        title="Faster steps, end to end",
        statement="A whole step of training takes less time with NVFP4 than with 16-bit LoRA.",
        paper="×0.67 to 0.83 of the time (7B)",
        source="Table 3 (H100): ×1.5, 1.4 and 1.2 as fast at batch 2, 4 and 8; Table 6 for the same model: ×1.1 to 1.2",
        expected="less",
        measure=STEP,
        margin=math.log(1.05),
        where=PLAIN,
        contrasts=formats("bf16", "nvfp4"),
        command=GPU_RUNS,
    ),
    Claim(
        title="Less memory",
        statement="Training with NVFP4 needs less memory at its peak than with 16-bit LoRA.",
        paper="×0.4 to 0.5",
        source="said in the text; no peak was reported, only weights on disk, 5.9 against 15.2 GB at 7B (×0.39)",
        expected="less",
        measure=MEMORY,
        margin=math.log(1.05),
        where=PLAIN,
        contrasts=formats("bf16", "nvfp4"),
        command=GPU_RUNS,
    ),
)
