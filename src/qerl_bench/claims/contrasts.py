"""Which arms the claims of the paper contrast: matched ones, and the paper's own methods, which differ in more.

Unless a claim is about it, matched arms have one learning rate and no noise. Formats against BF16 may have any
quantizer: 16-bit weights have none. The primary setting of most claims is rank 32, the model's own learning rate, GRPO
and codes rounded to nearest. The paper's methods (`recipe=method/...`) differ in format, rate and noise at once; a
contrast of them says which of these confound it.
"""

from __future__ import annotations

import math

from qerl_bench.claims.match import Arm, Contrast, Where

ON_POLICY = Where("algo.name", excluding=("sft",))
ADAPTER = Where("lora.rank", low=1, high=math.inf)
LEARNS = Where("steps", low=40, high=math.inf, otherwise="of fewer than 40 steps, for speed alone: run longer ones")
EVALUATED = Where("eval.name", excluding=("none",), otherwise="without evaluation: run them with eval=task")
NO_NOISE = Where("aqn.name", among=("none",))
RANK_32 = Where("lora.rank", among=(32,))
GRPO = Where("algo.name", among=("grpo",))
NEAREST = Where("quantizer.name", among=("rtn",))
OWN_RATE = Where("lr_factor", low=0.99, high=1.01)
PRIMARY = (RANK_32, GRPO, NEAREST, OWN_RATE)
OWN_KERNELS = (  # and not bitsandbytes', or vLLM's, whose memory is not in the trainer's peak
    Where("quant.backend", among=("own", None)),
    Where("engine.name", among=("hf",)),
)
SIGMA = Where("aqn.sigma_start", among=(1e-2, None))  # of the paper's Table 4; no noise has none
NVFP4 = Where("quant.name", among=("nvfp4",))
LEARNING = (ON_POLICY, ADAPTER, LEARNS)
ANSWERING = (*LEARNING, EVALUATED)

FORMAT = ("quant.", "quantizer.")
NOISE = ("aqn.", "noise.")
# The paper's methods but for their quantizers and learning rates, and these.
METHODS = {
    "QeRL": (NVFP4, Where("aqn.name", among=("exp_paper",))),
    "NVFP4-LoRA": (NVFP4, NO_NOISE),
    "QLoRA": (Where("quant.name", among=("nf4",)), NO_NOISE),
    "LoRA": (Where("quant.name", among=("bf16",)), NO_NOISE),
}
QUANTIZERS = {"QeRL": "awq", "NVFP4-LoRA": "awq", "QLoRA": "rtn"}
RATES = {"QeRL": 1e-5, "NVFP4-LoRA": 1e-5, "QLoRA": 1e-5, "LoRA": 5e-6}


def against(key: str, treated: str, control: str, factor: tuple[str, ...], *where: Where) -> Contrast:
    """`treated` minus `control`, two values of a config key; everything under `factor` may differ with it."""
    arms = tuple(
        Arm(value, sign, (Where(key, among=(value,)), *where)) for value, sign in ((treated, +1), (control, -1))
    )
    return Contrast(f"{treated} - {control}", factor, arms)


def formats(control: str, *treated: str, factor: tuple[str, ...] = FORMAT) -> tuple[Contrast, ...]:
    return tuple(against("quant.name", quant, control, factor, NO_NOISE) for quant in treated)


def noise(name: str = "exp") -> Contrast:
    """Noise of a schedule, in any variant of it, and none: how it is put in matters where it is."""
    names = ("exp", "exp_paper", "exp_repo") if name == "exp" else (name,)
    arms = (Arm(name, +1, (Where("aqn.name", among=names),)), Arm("none", -1, (NO_NOISE,)))
    return Contrast(f"{name} - none", NOISE, arms)


def published(treated: str, control: str, differ: tuple[str, ...], factor: tuple[str, ...] = FORMAT) -> Contrast:
    """Methods of the paper, which differ in `differ` besides `factor`.

    Each has its own quantizer or learning rate if that is one of these.
    """

    def own(name: str) -> tuple[Where, ...]:
        packed = (Where("quantizer.name", among=(QUANTIZERS[name],)),) if "quantizer." in differ else ()
        return packed + ((Where("optim.lr", among=(RATES[name],)),) if "optim.lr" in differ else ())

    arms = tuple(Arm(name, sign, METHODS[name] + own(name)) for name, sign in ((treated, +1), (control, -1)))
    return Contrast(f"{treated} - {control}", factor, arms, differ)


def schedules(treated: str, *controls: str) -> tuple[Contrast, ...]:
    """Same first and last noise, same stages: only the shape differs."""
    return tuple(against("aqn.name", treated, control, ("aqn.name", "aqn._target_")) for control in controls)


def rank(number: int) -> Contrast:
    return _ranks(f"rank {number}", Where("lora.rank", among=(number,)))


def other_ranks(*named: int) -> Contrast:
    """Any rank but these, of which others vote."""
    return _ranks("another rank", Where("lora.rank", low=1, high=math.inf, excluding=(32, *named)), robustness=True)


def _ranks(label: str, where: Where, robustness: bool = False) -> Contrast:
    arms = (
        Arm(label, +1, (where,)),
        Arm("rank 32", -1, (RANK_32,)),
    )
    return Contrast(f"{label} - rank 32", ("lora.rank", "lora.alpha"), arms, robustness=robustness)


def high_rate(
    treated: str,
    control: str,
    high: Where,
    usual: Where,
    differ: tuple[str, ...] = (),
    times: str = "high",
    robustness: bool = False,
) -> Contrast:
    """What a high learning rate does to the method `treated`, minus what it does to `control`."""
    arms = tuple(
        Arm(f"{name} at {rate}", sign if name == treated else -sign, (*METHODS[name], where))
        for name in (treated, control)
        for rate, sign, where in ((f"{times} rate", 1, high), ("the usual rate", -1, usual))
    )
    label = f"({treated} {times} - usual) - ({control} {times} - usual)"
    return Contrast(label, (*FORMAT, "optim.lr"), arms, differ, robustness)
