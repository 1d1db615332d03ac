"""How much of a base is measured before any arm: the `probe` and the `dose` of a study.yaml."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from qerl_core.checks import (
    MAX_SIGMA,
    TEMPERATURES,
    Check,
    check_fields,
    count,
    is_number,
    is_texts,
    number,
    one_of,
    require,
)

FORMATS = Check(is_texts, "a list of weight formats")
SIGMAS = Check(
    lambda value: isinstance(value, tuple) and all(is_number(one) and 0 < one <= MAX_SIGMA for one in value),
    f"a list of numbers above 0, at most {MAX_SIGMA:g}",
)
TEMPERATURES_ASKED = Check(
    lambda value: (
        isinstance(value, tuple)
        and 1 in value
        and all(is_number(one) and (one == 0 or TEMPERATURES[0] <= one <= TEMPERATURES[1]) for one in value)
    ),
    f"a list of temperatures, 0 (greedy) or from {TEMPERATURES[0]:g} to {TEMPERATURES[1]:g}, with 1, which training "
    "samples at",
)


@dataclass(frozen=True, kw_only=True)
class ProbeSize:
    """How a base is asked before training: pass@k of up to `samples`.

    It asks in the weight formats of arms and in `formats`. With any of the fields below, which set `details`, it keeps
    every answer and compares each format with the first: at these `temperatures`, which include 1; with noise of these
    `sigmas`; with the `texts` of so many questions; on the `split` train or held_out.
    """

    questions: int
    samples: int
    formats: tuple[str, ...] = ()
    temperatures: tuple[float, ...] = (1,)
    sigmas: tuple[float, ...] = ()
    texts: int = 0
    split: str = "train"

    def __post_init__(self) -> None:
        check_fields(
            self,
            "probe",
            questions=count(2),
            samples=count(2),
            texts=count(0),
            split=one_of("train", "held_out"),
            temperatures=TEMPERATURES_ASKED,
            formats=FORMATS,
            sigmas=SIGMAS,
        )

    @property
    def details(self) -> dict[str, Any]:
        """Those of the fields that are set; none of them in a probe for gates alone."""
        plain = vars(ProbeSize(questions=self.questions, samples=self.samples, formats=self.formats))
        return {key: value for key, value in vars(self).items() if value != plain[key]}

    @property
    def decisive(self) -> dict[str, Any]:
        """What decides the numbers of a format."""
        return {"questions": self.questions, "samples": self.samples, **self.details}


@dataclass(frozen=True, kw_only=True)
class DoseSize:
    """The relative rise of entropy that the noise of aqn=matched shall have, and what it is measured with."""

    rise: float
    prompts: int
    draws: int

    def __post_init__(self) -> None:
        check_fields(self, "dose", rise=number(above=0, most=1), prompts=count(), draws=count())


def probe_size(entry: object) -> ProbeSize:
    """The size that a study.yaml gives under `probe`. Raises ConfigError for missing or unknown keys."""
    needed, known = {"questions", "samples"}, {field.name for field in fields(ProbeSize)}
    given: dict[str, Any] = entry if isinstance(entry, dict) else {}
    require(
        needed <= given.keys() <= known,
        f"probe must have the keys questions and samples, and may have {', '.join(sorted(known - needed))}, got "
        f"{', '.join(map(str, given)) or entry}",
    )
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    return ProbeSize(**values)
