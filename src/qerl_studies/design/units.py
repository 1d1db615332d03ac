"""The units of a study: what all of its arms are repeated on, and what an interval is over.

    bases: 16                                                 # model.seed 0 to 15: models that are pretrained here
    units: {dither: [1, 2, 3]}                                # three copies of a GGUF file, each with a seed of its own
    units: {dither: [1, 2, 3], dither_scale: [0.5, 1, 2, 4]}  # each in four sizes, which share draws and seeds
    units: {model: [qwen3-4b, ORG/NAME, DIR/FILE.gguf]}       # each a case of its own; of one, seeds are the units

A copy is one plausible original of the file, so an interval over copies is about that one model, with its lost bits,
rounding and seeds. One over model.seed is about initialisations, and one over seeds of a model about that model alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from qerl_core.checks import count, number, require, text
from qerl_core.options import user_options as own_options
from qerl_core.options.files import options_of
from qerl_core.options.place_words import is_place, words_of


@dataclass(frozen=True, kw_only=True)
class Unit:
    """The words that choose it, and `first_seed`: it has the seeds from there on, or those of all units if None."""

    words: tuple[str, ...]
    first_seed: int | None = None

    def seed_of(self, seed: int, seeds: int) -> int:
        """What stands in the config of a run for `seed`, of which each unit has so many."""
        return seed if self.first_seed is None else self.first_seed * seeds + seed


def read_units(content: Mapping[str, Any]) -> dict[int, Unit]:
    """The units of a design by number, from its `bases` or `units`. Raises ConfigError unless it has one of the two."""
    require(("bases" in content) != ("units" in content), "a study has either bases or units, and not both")
    if "bases" in content:
        return {seed: Unit(words=(f"model.seed={seed}",)) for seed in read_seeds("bases", content["bases"])}
    units: Any = content["units"]
    keys = {*units} if isinstance(units, dict) else set()
    require(
        keys in ({"dither"}, {"dither", "dither_scale"}, {"model"}),
        f"units must have the key dither, with or without dither_scale, or the key model, got {units!r}",
    )
    if "model" in keys:
        return dict(enumerate(_models(units["model"])))
    copies = read_seeds("units.dither", units["dither"])
    if "dither_scale" not in keys:
        return {copy: Unit(words=(f"model.dither={copy}",), first_seed=copy) for copy in copies}
    scales = _listed("units.dither_scale", units["dither_scale"])
    for scale in scales:
        number(above=0)("each of units.dither_scale", scale)
    return {
        at: Unit(words=(f"model.dither={copy}", f"model.dither_scale={scale}"), first_seed=copy)
        for at, (scale, copy) in enumerate(product(scales, copies))
    }


def read_seeds(key: str, value: Any) -> tuple[int, ...]:
    """The seeds from 0 on, if `value` is their number, or those that it lists."""
    if not isinstance(value, list):
        count()(key, value)
        return tuple(range(value))
    for seed in value:
        count(0)(f"each of {key}", seed)
    require(len({*value}) == len(value), f"{key} has a seed twice: {value}")
    return tuple(value)


def _models(value: Any) -> list[Unit]:
    """Options of the axis, or what model.id can name."""
    options = options_of(own_options.folders(), "model")
    names = _listed("units.model", value)
    for name in names:
        text("each of units.model", name)
        require(
            name in options or is_place(name, options),
            f"units.model has {name}, which is no option; give one of qerl-bench run --explain model, a hub id "
            "ORG/NAME, or the path of a folder or GGUF file",
        )
    return [Unit(words=words_of(name, options)) for name in names]


def _listed(key: str, value: Any) -> Sequence[Any]:
    require(isinstance(value, list) and value != [], f"{key} must be a list, got {value!r}")
    require(len({*map(str, value)}) == len(value), f"{key} has a value twice: {value}")
    return value
