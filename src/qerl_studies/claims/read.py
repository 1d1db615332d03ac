"""From the file of a claim, conf/claim/NAME.yaml, to a `Claim`; conf/claim/shared/learning.yaml explains the keys.

A file takes its other values from those in its `defaults`, as options do; of mappings it may set single keys.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from yaml import YAMLError

from qerl_core.checks import ConfigError, positive, require, text
from qerl_core.metrics.definitions import TABLES
from qerl_core.options.explain import AXES, SEVERAL, root_groups
from qerl_core.options.files import find_option
from qerl_core.options.names import layers
from qerl_core.options.suggestions import keys_of_axis
from qerl_studies.claims.claim import Claim
from qerl_studies.claims.match import DERIVED, OWN, Contrast, Filter, Side
from qerl_studies.claims.measures import MEASURES, OF_PAIRS, OVER
from qerl_studies.claims.preconditions import GATES, Gate, ManipulationCheck
from qerl_studies.runs.measure import Measure

GROUP = "claim"  # the folder of claims in conf/ and in folders of one's own
AS_THEY_ARE = ("family", "number", "paper", "address", "title", "statement", "reported", "source", "expected")
FLAGS = ("explores", "exploratory")
PARTS = (
    *("reported_effects", "measure", "margin", "where", "primary", "contrasts", "without_a_vote", "acts", "gates"),
    *("additional", "command", "at_scale"),
)
CONDITION = ("is", "not", "from", "to", "excuse")
ANY = "any"  # lifts a condition of `defaults`
SIGNS = {2: (1, -1), 4: (1, -1, -1, 1)}  # of the arms of a contrast: a difference, or a difference of differences


def read_claim(folders: Sequence[Path], name: str) -> Claim:
    """The claim in claim/NAME.yaml of the first of `folders` that has it.

    Raises ConfigError that names the file, the key, what is wrong with its value, and what would be right.
    """
    file = find_option(folders, GROUP, name)
    try:
        return _claim(_merged(layers(folders, GROUP, name)), tuple(folders))
    except FileNotFoundError as error:
        raise ConfigError(f"{file}: defaults names {error.filename}, which does not exist") from error
    except YAMLError as error:
        raise ConfigError(f"{file} cannot be read as YAML: {' '.join(str(error).split())}") from error
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def conditions(folders: Sequence[Path], name: str, part: str) -> tuple[Filter, ...]:
    """The conditions in `part`, where or primary, of a file in claim/."""
    return _filters(part, _merged(layers(folders, GROUP, name))[part], tuple(folders))


def _merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mappings on top of each other, key by key. A condition on a config key, which has a dot, is replaced as one."""
    merged: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            known = merged.get(key)
            merged[key] = {**known, **value} if isinstance(known, dict) and isinstance(value, dict) else value
    return merged


def _claim(content: Mapping[str, Any], folders: tuple[Path, ...]) -> Claim:
    fields = _object("a claim", content, {*AS_THEY_ARE, *FLAGS, *PARTS})
    measure = _measure("measure", fields["measure"])
    positive("margin", fields["margin"])
    require(
        not measure.ratio or fields["margin"] > 1,
        f"margin must be a factor above 1, such as 1.02 for two per cent, because {measure.name} is compared as a "
        f"ratio, got {fields['margin']}",
    )
    where, primary = (_filters(key, fields[key], folders) for key in ("where", "primary"))
    asked = any(condition.key == "class" for condition in where)
    where = where if asked else (Filter("class", (OWN,)), *where)  # runs of others count where a claim asks for them
    voting = _contrasts("contrasts", fields["contrasts"], folders, votes=True)
    others = _contrasts("without_a_vote", fields["without_a_vote"], folders, votes=False)
    return Claim(
        **{key: fields[key] for key in (*AS_THEY_ARE, *FLAGS)},
        reported_effects=tuple(
            math.log(number) if measure.ratio else number
            for number in _numbers("reported_effects", fields["reported_effects"], 0.0 if measure.ratio else -math.inf)
        ),
        measure=replace(measure, margin=math.log(fields["margin"]) if measure.ratio else fields["margin"]),
        where=where,
        primary=primary,
        contrasts=(*voting, *others),
        gates=(
            *_acts(fields["acts"], (*where, *primary), folders),
            *(_named("gates", GATES, name) for name in _list("gates", fields["gates"])),
        ),
        additional=tuple(_named("additional", OF_PAIRS, name) for name in _list("additional", fields["additional"])),
        command=_command("command", fields["command"]),
        at_scale=_command("at_scale", fields["at_scale"]),
    )


def _measure(place: str, content: object) -> Measure:
    """One of MEASURES by its name, or {name, metric, over, ratio, unit}."""
    if not isinstance(content, dict):
        return _named(place, MEASURES, content)
    one = _object(place, content, {"name", "metric", "over", "ratio", "unit"})
    known = {name for table in TABLES.values() for name in table}
    metric = _named(f"{place}.metric", {name: name for name in known}, one["metric"])
    over = _named(f"{place}.over", OVER, one["over"])
    return Measure(str(one["name"]), over(metric), ratio=bool(one["ratio"]), unit=str(one["unit"] or ""), needs=metric)


def _acts(content: object, where: tuple[Filter, ...], folders: tuple[Path, ...]) -> tuple[Gate, ...]:
    """The gate that the treatment raises what it acts on directly."""
    if content is None:
        return ()
    one = _object("acts", content, {"measure", "contrasts"})
    contrasts = _contrasts("acts.contrasts", one["contrasts"], folders, votes=True)
    return (ManipulationCheck(_measure("acts.measure", one["measure"]), contrasts, where),)


def _contrasts(place: str, content: object, folders: tuple[Path, ...], votes: bool) -> tuple[Contrast, ...]:
    require(isinstance(content, dict), f"{place} must have a label for each contrast, got {content!r}")
    assert isinstance(content, dict)
    return tuple(_contrast(f"{place}.{label}", label, one, folders, votes) for label, one in content.items())


def _contrast(place: str, label: str, content: object, folders: tuple[Path, ...], votes: bool) -> Contrast:
    one = _object(place, content, {"factor", "arms", *(() if votes else ("confounded",))})
    factor, confounded = (_list(f"{place}.{key}", one.get(key, [])) for key in ("factor", "confounded"))
    for key in (*factor, *confounded):
        require(
            any(known.startswith(str(key)) for known in _keys(folders)),
            f"{place} lets keys that begin with {key} differ, but no config key does",
        )
    arms = one["arms"]
    require(
        isinstance(arms, dict) and len(arms) in SIGNS,
        f"{place}.arms must be two arms, the second of which is subtracted, or four for a difference of differences, "
        f"got {arms!r}",
    )
    sides = tuple(
        Side(str(name), sign, _filters(f"{place}.arms.{name}", where, folders))
        for (name, where), sign in zip(arms.items(), SIGNS[len(arms)], strict=True)
    )
    return Contrast(str(label), tuple(factor), sides, tuple(confounded), robustness=not votes and not confounded)


def _filters(place: str, content: object, folders: tuple[Path, ...]) -> tuple[Filter, ...]:
    require(isinstance(content, dict), f"{place} must have conditions on config keys, KEY: VALUE, got {content!r}")
    assert isinstance(content, dict)
    for key in content:
        _named(place, dict.fromkeys(_keys(folders)), key)
    return tuple(_filter(f"{place}.{key}", key, value) for key, value in content.items() if value != ANY)


def _filter(place: str, key: str, value: object) -> Filter:
    condition = value if isinstance(value, dict) else {"is": value}
    require(
        bool(condition) and {*condition} <= {*CONDITION},
        f"{place} must be a value, a list of them, any, or have keys of {', '.join(CONDITION)}, got {value!r}",
    )
    low, high = _numbers(place, [condition.get("from", -math.inf), condition.get("to", math.inf)])
    require(low <= high, f"{place} must have from below to, got {value!r}")
    among, excluding = (_values(condition[part]) if part in condition else () for part in ("is", "not"))
    return Filter(key, among, excluding, low, high, str(condition.get("excuse", "")))


def _values(value: object) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list) else (value,)


@lru_cache
def _keys(folders: tuple[Path, ...]) -> frozenset[str]:
    """The config keys that a condition can be about."""
    axes = [axis for axis in AXES if axis not in SEVERAL]
    of_axes = {key for axis in axes for key in (f"{axis}.name", f"{axis}._target_", *keys_of_axis(axis, folders))}
    return frozenset({key for place in root_groups() for key in place.fields} | of_axes | {*DERIVED})


def _command(place: str, words: object) -> str:
    """What makes runs on a command line: a sweep with these words, or several, one after the other."""
    sweeps = words if isinstance(words, list) else [words]
    for sweep in sweeps:
        text(place, sweep)
    return "; ".join(f"python src/run.py {sweep} -m" for sweep in sweeps)


def _object(place: str, content: object, keys: set[str]) -> Mapping[str, Any]:
    require(isinstance(content, Mapping), f"{place} must have the keys {', '.join(sorted(keys))}, got {content!r}")
    assert isinstance(content, Mapping)
    for name in content:
        _named(place, dict.fromkeys(keys), name)
    lacking = sorted(keys - {*content})
    require(not lacking, f"{place} lacks {', '.join(lacking)}: add them, or `defaults: [shared/learning]`")
    return content


def _list(place: str, value: object) -> list[Any]:
    require(isinstance(value, list), f"{place} must be a list, got {value!r}")
    assert isinstance(value, list)
    return value


def _numbers(place: str, value: object, above: float = -math.inf) -> list[float]:
    """A list of numbers, infinite ones included."""
    numbers = _list(place, value)
    allowed = all(isinstance(one, int | float) and one > above for one in numbers if one != -math.inf)
    require(allowed, f"{place} must be numbers{f' above {above:g}' * (above > -math.inf)}, got {value!r}")
    return numbers


def _named(place: str, known: Mapping[str, Any], name: object) -> Any:
    """What `known` has under a name. Raises ConfigError that says which names there are, or the nearest."""
    if isinstance(name, str) and name in known:
        return known[name]
    close = difflib.get_close_matches(str(name), known, n=1)
    remedy = f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(known)[:20])}"
    raise ConfigError(f"{place} has {name!r}, which is not known: {remedy}")
