"""Which arms a figure of differences shows, in which order, and what each is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qerl_core.checks import require
from qerl_studies.figures.effects import PlottedArm, plotted_arm
from qerl_studies.figures.labels import details_text, differing_details, label_settings
from qerl_studies.figures.style import format_order
from qerl_studies.runs.settings import Setting

CONTROLS = ("none", "exp", "format_error")  # noise that is compared with and without quantization
NOTHING = "nothing added"


def format_arms(settings: Sequence[Setting]) -> list[PlottedArm]:
    """Each format minus BF16, without noise if any is, then noise minus none within each format."""
    ordered = label_settings(settings)
    one_noise = len({setting.noise for setting in ordered}) == 1
    plain = [setting for setting in ordered if one_noise or setting["aqn.name"] == "none"]
    arms = []
    if len(plain) > 1:
        control = plain[0]
        arms = [PlottedArm(f"minus {control.label}"), plotted_arm(control, f"{control.label} (control)", None)]
        arms += [plotted_arm(setting, setting.label, control) for setting in plain[1:]]
    noisy = [setting for setting in ordered if setting not in plain]
    arms += [PlottedArm("noise minus none")] if noisy else []
    several = len({setting.noise for setting in noisy}) > 1
    return arms + [
        plotted_arm(one, one.label + (f", AQN {one.noise}" if several else ""), _without_noise(one, plain))
        for one in noisy
    ]


def all_arms(settings: Sequence[Setting]) -> list[PlottedArm]:
    """Every setting minus the first, which is BF16 without noise if that was run."""
    first, *others = label_settings(settings)
    mixed = len({setting.noise for setting in settings}) > 1
    arms = [plotted_arm(first, first.label, None)]
    for setting in others:
        noise = f", AQN {setting.noise}" if mixed and setting["aqn.name"] != "none" else ""
        arms.append(plotted_arm(setting, setting.label + noise, first))
    return arms


def control_arms(settings: Sequence[Setting]) -> list[PlottedArm]:
    """Whether an effect is due to the noise: other sources of entropy on BF16, and NVFP4, each minus plain BF16."""
    kept = [one for one in settings if one["aqn.name"] in CONTROLS and one["quant.name"] in ("bf16", "nvfp4")]
    keys = [key for key in differing_details(kept) if key != "rollout.temperature"]
    labelled = [replace(one, label=_added(one) + details_text(one, keys)) for one in kept]
    ordered = sorted(labelled, key=lambda one: (format_order(one["quant.name"]), _added(one) != NOTHING, one.label))
    plain = [one for one in ordered if one["quant.name"] == "bf16" and _added(one) == NOTHING]
    require(
        len(plain) == 1,
        f"{len(plain)} of these settings are BF16 without noise, at temperature 1 and without entropy bonus, but one "
        "is needed as the control of the others: add it with quant=bf16 aqn=none, or leave all but one out",
    )
    arms = []
    for quant in dict.fromkeys(one["quant.name"] for one in ordered):
        arms.append(PlottedArm(quant.upper()))
        for setting in ordered:
            if setting is plain[0] and setting["quant.name"] == quant:
                arms.append(plotted_arm(setting, f"{setting.label} (control)", None))
            elif setting["quant.name"] == quant:
                arms.append(plotted_arm(setting, setting.label, plain[0]))
    return arms


def _without_noise(setting: Setting, plain: Sequence[Setting]) -> Setting:
    """The one of `plain` with the format and, if possible, the label of `setting`. ConfigError if there is none."""
    same_format = [other for other in plain if other["quant.name"] == setting["quant.name"]]
    require(bool(same_format), f"{setting.runs[0].name} has no control without noise: add it with aqn=none")
    return next((other for other in same_format if other.label == setting.label), same_format[0])


def _added(setting: Setting) -> str:
    """What an arm has besides its weight format."""
    parts = []
    if setting["aqn.name"] == "exp":
        parts.append(f"AQN{setting.noise.removeprefix('exp')} from {setting['aqn.sigma_start']:g}")
    if setting["aqn.name"] == "format_error":
        how = "drawn once" if setting["noise.cadence"] == "run" else "redrawn each step"
        parts.append(f"noise of NVFP4's size, {how}")
    if setting["rollout.temperature"] != 1:
        parts.append(f"temperature {setting['rollout.temperature']:g}")
    if setting["train.entropy_coef"] > 0:
        parts.append(f"entropy bonus {setting['train.entropy_coef']:g}")
    return ", ".join(parts) or NOTHING
