"""The arms that the claims of the paper contrast: matched ones, and the paper's own methods, which differ in more.

Matched arms have one learning rate and no noise, unless the claim is about these. If one arm is BF16, the quantizers
may differ, since 16-bit weights have none. The primary setting of most claims is rank 32, the model's default learning
rate, GRPO and codes rounded to nearest. The paper's methods (`recipe=method/...`) differ in format, rate and noise at
once; their contrasts declare which of these confound them.
"""

from __future__ import annotations

import math

from qerl_bench.studies.claims.match import Contrast, Filter, Side

ON_POLICY = Filter("algo.name", excluding=("sft",))
ADAPTER = Filter("lora.rank", low=1, high=math.inf)
LEARNS = Filter("steps", low=40, high=math.inf, excuse="of fewer than 40 steps, for speed alone: run longer ones")
EVALUATED = Filter("eval.name", excluding=("none",), excuse="without evaluation: run them with eval=task")
GRADED = Filter("reward.name", among=("task", None), excuse="with random rewards: run them with reward=task")
AS_TRAINED = Filter(
    "eval.quant", among=(None,), excuse="evaluated in another format than that of training: leave eval.quant out"
)
ONE_FORMAT = Filter(
    "rollout.quant", among=(None,), excuse="sampled in another format than that of training: leave rollout.quant out"
)
IN_NORMS = Filter(
    "noise.where", among=("norms", None), excuse="with noise on adapters, which is not QeRL's: leave noise.where out"
)
WEIGHTS_ALONE = tuple(  # of all blocks
    Filter(key, among=(None,), excuse=f"with {what}: leave {key} out")
    for key, what in {
        "quant.activations": "rounded inputs of layers",
        "rollout.activations": "rounded inputs of layers while sampling",
        "quant.keep_first": "transformer blocks in 16 bits",
        "quant.keep_last": "transformer blocks in 16 bits",
    }.items()
)
USUAL = (GRADED, AS_TRAINED, ONE_FORMAT, IN_NORMS, *WEIGHTS_ALONE)
NO_NOISE = Filter("aqn.name", among=("none",))
RANK_32 = Filter("lora.rank", among=(32,))
GRPO = Filter("algo.name", among=("grpo",))
NEAREST = Filter("quantizer.name", among=("rtn",))
DEFAULT_RATE = Filter("lr_factor", low=0.99, high=1.01)
PRIMARY = (RANK_32, GRPO, NEAREST, DEFAULT_RATE)
OWN_KERNELS = (  # not those of bitsandbytes or vLLM, whose memory is not in the trainer's peak
    Filter("quant.backend", among=("own", None)),
    Filter("engine.name", among=("hf",)),
)
SIGMA = Filter("aqn.sigma_start", among=(1e-2, None))  # of the paper's Table 4; None without noise
NVFP4 = Filter("quant.name", among=("nvfp4",))
LEARNING = (ON_POLICY, ADAPTER, LEARNS, *USUAL)
ANSWERING = (*LEARNING, EVALUATED)

FORMAT = ("quant.", "quantizer.")
NOISE = ("aqn.", "noise.")
# The paper's methods, without their quantizers and learning rates, which follow.
METHODS = {
    "QeRL": (NVFP4, Filter("aqn.name", among=("exp_paper",))),
    "NVFP4-LoRA": (NVFP4, NO_NOISE),
    "QLoRA": (Filter("quant.name", among=("nf4",)), NO_NOISE),
    "LoRA": (Filter("quant.name", among=("bf16",)), NO_NOISE),
}
QUANTIZERS = {"QeRL": "awq", "NVFP4-LoRA": "awq", "QLoRA": "rtn"}
RATES = {"QeRL": 1e-5, "NVFP4-LoRA": 1e-5, "QLoRA": 1e-5, "LoRA": 5e-6}
# The same shapes from a noise that is measured for each base.
MATCHED = {"exp": "matched", "linear": "matched_linear", "cosine": "matched_cosine", "log": "matched_log"}


def two_values(key: str, treated: str, control: str, factor: tuple[str, ...], *where: Filter) -> Contrast:
    """`treated` minus `control`, two values of a config key; all keys under `factor` may differ with it."""
    arms = tuple(
        Side(value, sign, (Filter(key, among=(value,)), *where)) for value, sign in ((treated, +1), (control, -1))
    )
    return Contrast(f"{treated} - {control}", factor, arms)


def formats(control: str, *treated: str, factor: tuple[str, ...] = FORMAT) -> tuple[Contrast, ...]:
    """Each weight format minus `control`, without noise."""
    return tuple(two_values("quant.name", quant, control, factor, NO_NOISE) for quant in treated)


def noise(name: str = "exp") -> Contrast:
    """Noise of one schedule against no noise; exp stands for any variant of exponential decay.

    Noise options may differ, since they have no effect without noise.
    """
    names = (name, MATCHED[name], *(("exp_paper", "exp_repo") if name == "exp" else ()))
    arms = (Side(name, +1, (Filter("aqn.name", among=names),)), Side("none", -1, (NO_NOISE,)))
    return Contrast(f"{name} - none", NOISE, arms)


def published(treated: str, control: str, differ: tuple[str, ...], factor: tuple[str, ...] = FORMAT) -> Contrast:
    """Two methods of the paper, which differ in `differ` besides `factor`.

    If the quantizer or the learning rate is in `differ`, each method has its own.
    """

    def method(name: str) -> tuple[Filter, ...]:
        quantizer = (Filter("quantizer.name", among=(QUANTIZERS[name],)),) if "quantizer." in differ else ()
        rate = (Filter("optim.lr", among=(RATES[name],)),) if "optim.lr" in differ else ()
        return METHODS[name] + quantizer + rate

    arms = (Side(treated, +1, method(treated)), Side(control, -1, method(control)))
    return Contrast(f"{treated} - {control}", factor, arms, differ)


def schedules(treated: str, *controls: str) -> tuple[Contrast, ...]:
    """Schedules with the same first and last noise and the same stages, which differ in shape alone."""

    def arm(name: str, sign: int) -> Side:
        return Side(name, sign, (Filter("aqn.name", among=(name, MATCHED[name])),))

    factor = ("aqn.name", "aqn._target_")
    return tuple(Contrast(f"{treated} - {one}", factor, (arm(treated, +1), arm(one, -1))) for one in controls)


def rank(number: int) -> Contrast:
    return _ranks(f"rank {number}", Filter("lora.rank", among=(number,)))


def other_ranks(*voting: int) -> Contrast:
    """All ranks but 32 and `voting`, as robustness checks."""
    return _ranks("another rank", Filter("lora.rank", low=1, high=math.inf, excluding=(32, *voting)), robustness=True)


def _ranks(label: str, where: Filter, robustness: bool = False) -> Contrast:
    arms = (Side(label, +1, (where,)), Side("rank 32", -1, (RANK_32,)))
    return Contrast(f"{label} - rank 32", ("lora.rank", "lora.alpha"), arms, robustness=robustness)


def high_rate(
    treated: str,
    control: str,
    high: Filter,
    usual: Filter,
    differ: tuple[str, ...] = (),
    times: str = "high",
    robustness: bool = False,
) -> Contrast:
    """The effect of a high learning rate on the method `treated`, minus its effect on `control`."""
    arms = tuple(
        Side(f"{name} at {rate}", sign if name == treated else -sign, (*METHODS[name], where))
        for name in (treated, control)
        for rate, sign, where in ((f"{times} rate", 1, high), ("the usual rate", -1, usual))
    )
    label = f"({treated} {times} - usual) - ({control} {times} - usual)"
    return Contrast(label, (*FORMAT, "optim.lr"), arms, differ, robustness)
