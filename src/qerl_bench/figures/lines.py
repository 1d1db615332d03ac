"""Which arms a figure of differences shows, in which order, and what each is compared with."""

from __future__ import annotations

from collections.abc import Sequence

from qerl_bench.checks import require
from qerl_bench.figures.effects import Line, line
from qerl_bench.figures.style import place
from qerl_bench.study.naming import details, format_rows, telling
from qerl_bench.study.select import Row

CONTROLS = ("none", "exp", "format_error")  # noise that is compared with and without quantization
NOTHING = "nothing added"


def format_lines(rows: Sequence[Row]) -> list[Line]:
    """Each format minus BF16, without noise if any is, then noise minus none within each format."""
    ordered = format_rows(rows)
    alike = len({row["aqn.name"] for row in ordered}) == 1
    plain = [row for row in ordered if alike or row["aqn.name"] == "none"]
    lines = []
    if len(plain) > 1:
        lines = [Line(f"minus {plain[0]['label']}"), line(plain[0], f"{plain[0]['label']} (control)", None)]
        lines += [line(row, row["label"], plain[0]) for row in plain[1:]]
    noisy = [row for row in ordered if row not in plain]
    lines += [Line("noise minus none")] if noisy else []
    return lines + [line(row, row["label"], _same(row, plain)) for row in noisy]


def all_lines(rows: Sequence[Row]) -> list[Line]:
    """Every setting minus the first, BF16 without noise if that was run."""
    first, *others = format_rows(rows)
    mixed = len({row["aqn.name"] for row in rows}) > 1
    named = [
        (row, row["label"] + (f", AQN {row['aqn.name']}" if mixed and row["aqn.name"] != "none" else ""))
        for row in others
    ]
    return [line(first, first["label"], None), *(line(row, label, first) for row, label in named)]


def control_lines(rows: Sequence[Row]) -> list[Line]:
    """What tells whether an effect is the noise's: other sources of entropy on BF16, and NVFP4, minus plain BF16."""
    kept = [row for row in rows if row["aqn.name"] in CONTROLS and row["quant.name"] in ("bf16", "nvfp4")]
    keys = [key for key in telling(kept) if key != "rollout.temperature"]
    labelled = [row | {"label": _added(row) + details(row, keys)} for row in kept]
    ordered = sorted(labelled, key=lambda row: (place(row["quant.name"]), _added(row) != NOTHING, row["label"]))
    plain = [row for row in ordered if row["quant.name"] == "bf16" and _added(row) == NOTHING]
    require(
        len(plain) == 1,
        f"{len(plain)} of these settings are BF16 without noise, at temperature 1 and without entropy bonus; the "
        "others are compared with one such: add it with quant=bf16 aqn=none, or leave all but one out",
    )
    lines = []
    for quant in dict.fromkeys(row["quant.name"] for row in ordered):
        lines.append(Line(quant.upper()))
        of_format = [row for row in ordered if row["quant.name"] == quant]
        for row in of_format:
            own = row is plain[0]
            lines.append(line(row, f"{row['label']} (control)" if own else row["label"], None if own else plain[0]))
    return lines


def _same(row: Row, among: Sequence[Row]) -> Row:
    """The one of `among` that is as `row` in format and label. Raises ConfigError if there is none."""
    found = [other for other in among if (other["quant.name"], other["label"]) == (row["quant.name"], row["label"])]
    found = found or [other for other in among if other["quant.name"] == row["quant.name"]]
    require(bool(found), f"{row['runs'][0].name} has no control without noise: add it with aqn=none")
    return found[0]


def _added(row: Row) -> str:
    """What an arm has beside its weight format."""
    parts = []
    if row["aqn.name"] == "exp":
        parts.append(f"AQN from {row['aqn.sigma_start']:g}")
    if row["aqn.name"] == "format_error":
        how = "drawn once" if row["noise.cadence"] == "run" else "redrawn each step"
        parts.append(f"noise of NVFP4's size, {how}")
    if row["rollout.temperature"] != 1:
        parts.append(f"temperature {row['rollout.temperature']:g}")
    if row["train.entropy_coef"] > 0:
        parts.append(f"entropy bonus {row['train.entropy_coef']:g}")
    return ", ".join(parts) or NOTHING
