"""The few contrasts that a study is about, as its study.yaml says before there is any data; all else is exploratory.

primary:
  contrasts: {noise: [nvfp4-noise, nvfp4], format: [nvfp4, bf16]}  # an arm minus another
  measure: late_lenient      # MEASURES
  margin: 0.01               # smallest difference that matters, in its unit
  looks: {8: 0.012, 12: 0.046}  # when so many bases have all these arms: two-sided level, over all contrasts
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from qerl_core.checks import check_fields, is_number, number, one_of, require
from qerl_studies.runs.measure import Measure, held_out, late_mean

MEASURES = {
    "late_lenient": Measure(
        "right by the last number, sampled, mean of the evaluations in the last quarter",
        late_mean("sampled", "lenient"),
        unit="points",
        scale=100.0,
    ),
    "late": Measure(
        "right, sampled, mean of the evaluations in the last quarter", late_mean("sampled"), unit="points", scale=100.0
    ),
    "final": Measure("right, sampled, after training", held_out("sampled"), unit="points", scale=100.0),
}


@dataclass(frozen=True, kw_only=True)
class Primary:
    """`contrasts` are names of arms, treated and control; `looks` have the number of bases as keys, in order."""

    contrasts: Mapping[str, tuple[str, str]]
    measure: str
    margin: float
    looks: Mapping[int, float]

    def __post_init__(self) -> None:
        check_fields(self, "primary", measure=one_of(*MEASURES), margin=number(above=0))

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(arm for pair in self.contrasts.values() for arm in pair))


def read_primary(content: object, arms: Collection[str], bases: int) -> Primary | None:
    """The `primary` of a study.yaml with these arms and so many bases; None without one.

    Raises ConfigError for unknown or wrong entries.
    """
    if content is None:
        return None
    entries: Mapping[str, Any] = content if isinstance(content, Mapping) else {}
    wanted = {"contrasts", "measure", "margin", "looks"}
    require({*entries} == wanted, f"primary must have exactly the keys {', '.join(sorted(wanted))}, got {content!r}")
    contrasts, looks = entries["contrasts"], entries["looks"]
    require(
        isinstance(contrasts, Mapping) and bool(contrasts) and all(map(_is_pair, contrasts.values())),
        f"primary.contrasts must have two arms for each name, treated and control, got {contrasts!r}",
    )
    unknown = sorted({arm for pair in contrasts.values() for arm in pair} - {*arms})
    require(not unknown, f"primary.contrasts names arms that the study does not have: {', '.join(unknown)}")
    require(
        isinstance(looks, Mapping)
        and bool(looks)
        and all(isinstance(count, int) and 1 < count <= bases for count in looks)
        and all(is_number(level) and 0 < level < 1 for level in looks.values())
        and [*looks] == sorted(looks),
        f"primary.looks must have, in order, numbers of bases from 2 to {bases} with levels below 1, got {looks!r}",
    )
    return Primary(
        contrasts={str(name): (pair[0], pair[1]) for name, pair in contrasts.items()},
        measure=entries["measure"],
        margin=entries["margin"],
        looks={int(count): float(level) for count, level in looks.items()},
    )


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and value[0] != value[1]
