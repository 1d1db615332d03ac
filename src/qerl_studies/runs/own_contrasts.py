"""The contrasts that are in a folder of runs: settings that differ in one factor alone, whoever asked for them.

A factor is an axis or a group of keys, such as `quant` or `optim`; `noise` belongs to `aqn`. The plainest of its
levels, or the usual one, is what the others are compared with. Left out: contrasts of several factors, unless a setting
has no other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from qerl_studies.runs.settings import Setting

PLAIN = {"none", "bf16", "rtn", "grpo", "task"}  # levels that others are compared with
PARTS = {"noise": "aqn"}  # groups of keys that say more of another axis


@dataclass(frozen=True)
class OwnContrast:
    """`treated` minus `control`, which differ in `factor`; `where` says what both are, of what varies in the folder."""

    factor: str
    label: str
    where: str
    treated: Setting
    control: Setting


@dataclass(frozen=True)
class Levels:
    """What each of some settings has of every factor in which any two differ: by factor, its parts for each setting.

    A part is the name of an option, or a key with its value.
    """

    settings: Sequence[Setting]

    @cached_property
    def by_factor(self) -> dict[str, list[tuple[str, ...]]]:
        items = [dict(setting.runs[0].setting_items) for setting in self.settings]
        keys = sorted({key for one in items for key in one if not key.endswith("_target_")})
        varying = [key for key in keys if len({one.get(key) for one in items}) > 1]
        return {factor: _levels(factor, varying, self.settings) for factor in dict.fromkeys(map(factor_of, varying))}

    @cached_property
    def usual(self) -> set[str]:
        """Keys with the value that most settings have, which go without saying."""
        counts = Counter(part for texts in self.by_factor.values() for parts in texts for part in parts if " " in part)
        return {part for part, count in counts.items() if 2 * count > len(self.settings)}

    @property
    def names(self) -> list[str]:
        """One for each setting, with its weight format if there is nothing else to say."""
        return [self.shown(place) or str(one["quant.name"]) for place, one in enumerate(self.settings)]

    def shown(self, place: int, without: str = "") -> str:
        """What a setting has of all factors but one, unless it goes without saying."""
        columns = [texts[place] for factor, texts in self.by_factor.items() if factor != without]
        return " ".join(part for parts in columns for part in parts if part not in self.usual)

    def others(self, factor: str, place: int) -> tuple[tuple[str, ...], ...]:
        """What a setting has of the other factors."""
        return tuple(texts[place] for one, texts in self.by_factor.items() if one != factor)

    def rank(self, level: Sequence[str]) -> tuple[bool, int, list[tuple[str, bool, float, str]]]:
        """Plain levels first, then what goes without saying, then numbers by size, then names."""
        unusual = sum(part not in self.usual for part in level if " " in part)
        return not {*level[:1]} & PLAIN, unusual, [_in_order(part) for part in level]


def own_contrasts(settings: Sequence[Setting]) -> list[OwnContrast]:
    """The contrasts among settings of one model and task, factor by factor."""
    levels = Levels(settings)
    contrasts: list[OwnContrast] = []
    for factor, texts in levels.by_factor.items():
        groups: dict[tuple[tuple[str, ...], ...], list[int]] = {}
        for place in range(len(settings)):
            groups.setdefault(levels.others(factor, place), []).append(place)
        for members in groups.values():
            first = min(members, key=lambda place: levels.rank(texts[place]))
            where = levels.shown(first, without=factor)
            contrasts += [
                OwnContrast(factor, _label(texts[place], texts[first]), where, settings[place], settings[first])
                for place in sorted(members, key=lambda place: [*map(_in_order, texts[place])])
                if place != first
            ]
    return [*contrasts, *_of_several_factors(levels, contrasts)]


def _of_several_factors(levels: Levels, contrasts: Sequence[OwnContrast]) -> Iterator[OwnContrast]:
    """The settings that no contrast has, each minus the plainest setting."""
    compared = {id(one) for contrast in contrasts for one in (contrast.treated, contrast.control)}
    places = range(len(levels.settings))
    first = min(places, key=lambda place: [levels.rank(texts[place]) for texts in levels.by_factor.values()])
    for place in places:
        setting, control = levels.settings[place], levels.settings[first]
        if place != first and id(setting) not in compared:
            differing = [factor for factor, texts in levels.by_factor.items() if texts[place] != texts[first]]
            label = f"{levels.names[place]} - {levels.names[first]}"
            yield OwnContrast(" and ".join(differing), label, "", setting, control)


def factor_of(key: str) -> str:
    """The axis or group that a dotted key belongs to."""
    group = key.partition(".")[0]
    return PARTS.get(group, group)


def _levels(factor: str, varying: Sequence[str], settings: Sequence[Setting]) -> list[tuple[str, ...]]:
    """What each setting has of a factor, in as few parts as tell the settings apart."""
    own = [key for key in varying if factor_of(key) == factor]
    name = f"{factor}.name"
    texts = []
    for setting in settings:
        alike = [one for one in settings if one[name] == setting[name]]
        keys = [key for key in own if key != name and len({str(one[key]) for one in alike}) > 1]
        parts = [f"{key.removeprefix(f'{factor}.')} {_short(setting[key])}" for key in keys if setting[key] is not None]
        texts.append((*([str(setting[name])] if name in own else []), *parts))
    return texts


def _label(treated: Sequence[str], control: Sequence[str]) -> str:
    """What one has and the other has not."""
    differing = [
        ", ".join(part for part in one if part not in other) or "without"
        for one, other in ((treated, control), (control, treated))
    ]
    return " - ".join(differing)


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).rpartition("/")[2]


def _in_order(part: str) -> tuple[str, bool, float, str]:
    key, _, value = part.rpartition(" ")
    try:
        return key, False, float(value), ""
    except ValueError:
        return key, True, 0.0, value
