"""What options mean, from the comments of their YAML files: --explain and --help.

docs/reference/write.py makes a page of the same. Nothing here imports torch.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from qerl_core.checks import ConfigError, require
from qerl_core.metrics.definitions import definitions
from qerl_core.options.composer import Composer
from qerl_core.options.files import (
    Field,
    alternatives,
    find_option,
    option_fields,
    options_of,
    read_option,
    same_value,
)
from qerl_core.options.fingerprint import flat
from qerl_core.options.names import search_folders
from qerl_core.options.suggestions import keys_of_axis, unknown_key
from qerl_core.options.user_options import split_search_path
from qerl_core.process.arguments import WIDTH
from qerl_core.process.installation import CONF_DIR

SEVERAL = ("recipe", "experiment")  # their files set options of other axes
AXES = ("quant", "quantizer", "aqn", "algo", "lora", "model", "engine", "task", "reward", "eval", "logger", *SEVERAL)
USAGE = "usage: qerl-bench run [KEY=VALUE ...] [-m] [-q] [--explain KEY ...] [--cfg job] [--config-dir D]"
INTRODUCTION = """
Train one experiment, or with -m every point of a sweep. A word AXIS=OPTION chooses a YAML file of
conf/, a word KEY=VALUE changes a value. `python src/run.py` in a checkout is the same command.

  qerl-bench run experiment=smoke                                   everything once, in a minute
  qerl-bench run quant=nvfp4 aqn=exp model=qwen3-1.7b task=gsm8k    one run
  qerl-bench run quant=nvfp4 aqn=exp -m lora.rank=16,32 seed=0,1    a sweep: a process for each run
"""
FLAGS = """
Flags:
  -m, --multirun      run every combination of the values that are separated by commas, one after
                      the other; hydra.launcher.slots=N: N side by side
  --explain KEY ...   what a value, all values of a group (noise), an axis (aqn) or an option (exp)
                      mean; other words choose options: --explain aqn.stages aqn=exp; or a
                      metric, --explain mismatch/kl
  --cfg job           print the config instead of running it; --resolve fills in references
  -q, --quiet         only steps, warnings and errors, and at the end the table
  --config-dir DIR    look for options in DIR/quant/*.yaml and so on as well
  --version           print the version
  --hydra-help        flags of Hydra, which composes the config

Read on: docs/options.md (options), docs/errors.md (refusals), docs/runs.md (what a run writes,
sweeps, exit codes), docs/README.md (all pages)."""


@dataclass(frozen=True)
class Place:
    """The fields below a prefix of the config, and the words that choose them: ("aqn", "aqn=exp")."""

    prefix: str
    words: str
    fields: dict[str, Field]


def usage(words: Sequence[str] = ()) -> str:
    """What --help prints: axes with their choices, the commonest commands, flags, where to read on.

    Of `words` only those matter that name other folders of options.
    """
    search_path, _ = split_search_path(words)
    folders = search_folders(Composer().chosen(search_path)[1]) if search_path else [CONF_DIR]
    chosen = dict(read_option(CONF_DIR / "run.yaml").bases)
    lists = {axis: [chosen[axis], *(one for one in options_of(folders, axis) if one != chosen[axis])] for axis in AXES}
    axes = [_hanging(f"  {axis:11} ", " ".join(options)) for axis, options in lists.items()]
    values, *groups = root_groups()
    plain = [
        _hanging(f"  {'values':11} ", " ".join(values.fields)),
        _hanging(f"  {'groups':11} ", " ".join(group.prefix for group in groups)),
    ]
    heading = "Axes and their options, the default first:"
    return "\n".join([USAGE, INTRODUCTION, heading, *axes, "", "Values of conf/run.yaml:", *plain, FLAGS])


def explain(words: Sequence[str]) -> str:
    """Explain the keys among `words`, with the options that the others (KEY=VALUE) choose.

    A key is a config key, a prefix that ends with a dot, an axis, a group, an option, a metric, or the part of a metric
    before its slash. Raises ConfigError for others.
    """
    overrides = [word for word in words if "=" in word]
    keys = [word for word in words if "=" not in word] or [word.partition("=")[0].lstrip("+~") for word in overrides]
    tree, runtime = Composer().chosen(overrides)
    folders = search_folders(runtime)
    chosen = {str(place): option for place, option in runtime.choices.items() if option is not None}
    choices = {place: str(option).removesuffix(".yaml") for place, option in chosen.items()}
    places = [*root_groups(), *_axes(choices, folders)]
    return (
        "\n\n".join(_explain(key, places, choices, folders, flat(tree)) for key in keys) if keys else usage(overrides)
    )


def _explain(
    key: str, places: Sequence[Place], choices: Mapping[str, str], folders: Sequence[Path], values: Mapping[str, Any]
) -> str:
    name = key.rstrip(".")
    require(
        name.partition(".")[0] != "hydra",
        f"{key} belongs to Hydra or to what starts the runs of a sweep: see docs/runs.md, docs/cluster.md, --cfg hydra",
    )
    keys = {full: (place, field) for place in places for full, field in place.fields.items()}
    below = {full: entry for full, entry in keys.items() if full == name or full.startswith(f"{name}.")}
    blocks = [_value(full, *entry, values.get(full)) for full, entry in below.items() if _is_shown(entry[1])]
    if key in AXES:
        return "\n\n".join([_choices(key, choices.get(key), folders), *blocks])
    if blocks:
        return "\n\n".join(blocks)
    if called := [axis for axis in AXES if key in options_of(folders, axis)]:
        return "\n\n".join([*(_option(axis, key, folders) for axis in called), *filter(None, [_metrics(name)])])
    elsewhere = keys_of_axis(name.partition(".")[0], folders) if name.partition(".")[0] in choices else {}
    if name not in elsewhere and (metrics := _metrics(name)):
        return metrics
    if name not in elsewhere:
        chosen = {axis: option for axis, option in choices.items() if axis in AXES}
        raise ConfigError(unknown_key(name, [*keys], chosen, folders))
    return "\n\n".join(_of_others(name, elsewhere[name], choices, folders))


def _metrics(name: str) -> str:
    """The metrics of that name, or with it before a slash; empty if there are none."""
    known = {one: said for one, said in definitions().items() if one == name or one.startswith(f"{name}/")}
    return "\n\n".join(_hanging(f"{one}  ", f"(metric, {said.replace(': ', ') ', 1)}") for one, said in known.items())


def root_groups() -> list[Place]:
    """The values of conf/run.yaml: those without a group first, under the prefix "", and then group by group."""
    content = read_option(CONF_DIR / "run.yaml")
    prefixes = dict.fromkeys(field.key.rpartition(".")[0] for field in content.fields)
    return [
        Place(prefix, "conf/run.yaml", {one.key: one for one in content.fields if one.key.rpartition(".")[0] == prefix})
        for prefix in sorted(prefixes, key=bool)
    ]


def _axes(choices: Mapping[str, str], folders: Sequence[Path]) -> list[Place]:
    """The values of the chosen options; those inside of another one, as aqn@aqn.schedule, replace what it has there."""
    places: dict[str, Place] = {}
    for place in sorted(choices, key=len):
        axis, _, package = place.partition("@")
        prefix = package or axis
        if axis not in AXES or axis in SEVERAL or not find_option(folders, axis, choices[place]).is_file():
            continue
        outer = places.get(prefix.rpartition(".")[0])
        for key in [key for key in (outer.fields if outer else ()) if key.startswith(f"{prefix}.")]:
            assert outer is not None
            del outer.fields[key]
        fields = option_fields(folders, axis, choices[place])
        places[prefix] = Place(
            prefix, f"{place}={choices[place]}", {f"{prefix}.{key}": field for key, field in fields.items()}
        )
    return [*places.values()]


def _is_shown(field: Field) -> bool:
    """Whether users set this; the names of options are fixed, and have no comment."""
    return bool(field.meaning) or field.key.rpartition(".")[2] != "name"


def _value(key: str, place: Place, field: Field, value: Any) -> str:
    default = "" if same_value(field.default, value) else f", default {field.default}"
    shown = field.default if not default else _text(value)
    return _block(f"{key} = {shown}   ({place.words}{default})", field.meaning)


def _of_others(key: str, options: Sequence[str], choices: Mapping[str, str], folders: Sequence[Path]) -> Iterator[str]:
    """What a key means in options that are not chosen, those with one meaning together."""
    axis, _, inside = key.partition(".")
    yield _wrapped(f"{axis}={choices[axis]} has no option {key}; it belongs to {alternatives(axis, options)}", "")
    meanings: dict[tuple[str, str], list[str]] = {}
    for option in options:
        field = option_fields(folders, axis, option)[inside]
        meanings.setdefault((field.default, field.meaning), []).append(option)
    for (default, meaning), same in meanings.items():
        yield _block(f"{key} = {default}   ({alternatives(axis, same)})", meaning)


def _choices(axis: str, chosen: str | None, folders: Sequence[Path]) -> str:
    """The options of an axis, each with the first sentence of its file; those without one follow by name."""
    options = options_of(folders, axis)
    summaries = {option: read_option(file).summary for option, file in options.items()}
    width = max(len(option) for option, summary in summaries.items() if summary) + 2
    lines = [_hanging(f"  {option:{width}}", _sentence(text)) for option, text in summaries.items() if text]
    presets = [option for option, summary in summaries.items() if not summary]
    lines += [_wrapped(f"presets: {' '.join(presets)}", "  ")] if presets else []
    return "\n".join([f"{axis} = {chosen or 'null'}; its options:", *lines])


def _option(axis: str, option: str, folders: Sequence[Path]) -> str:
    """What the file of an option says about itself and its values."""
    heading = _hanging(f"{axis}={option}  ", read_option(find_option(folders, axis, option)).summary)
    fields = {} if axis in SEVERAL else option_fields(folders, axis, option)
    shown = {key: field for key, field in fields.items() if _is_shown(field)}
    return "\n\n".join(
        [heading, *(_block(f"{axis}.{key} = {field.default}", field.meaning) for key, field in shown.items())]
    )


def _sentence(text: str) -> str:
    return re.split(r"\.(?: (?=[A-Z(])|$)", text)[0]


def _text(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip()


def _block(heading: str, meaning: str) -> str:
    return f"{_wrapped(heading, '')}\n{_wrapped(meaning, '    ')}".rstrip()


def _wrapped(text: str, indent: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent or "    ", **_WHOLE)


def _hanging(label: str, text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=label, subsequent_indent=" " * len(label), **_WHOLE)


_WHOLE: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
