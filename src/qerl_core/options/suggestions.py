"""What is said about a word of the command line that names no option: what it is called today, or what comes near."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from qerl_core.options.files import SET_BY_FILE, alternatives, option_fields, options_of, read_option
from qerl_core.options.foreign_names import ON, OPTIONS_FOR, WITHOUT_KEY
from qerl_core.options.hydra_options import unknown_hydra_key
from qerl_core.options.renamed_keys import renamed, renamed_value

SHOWN = 8  # keys or choices that a message lists
NUMBERS = {"lora": "lora.rank", "aqn": "aqn=constant aqn.level"}  # what a number for the whole axis probably means
ALL = "All options: --help"
PLACES = {  # besides options
    "model": "Of the hub or of a file: model=ORG/NAME, model=./FOLDER, model=FILE.gguf",
    "reward": "A function of your own: reward=FILE.py",
}


def unknown_key(key: str, known: Collection[str], choices: Mapping[str, str], folders: Sequence[Path]) -> str:
    """Say that there is no option `key`, and which was probably meant.

    `known` are the dotted keys of the chosen config, `choices` the option of each axis, as {"aqn": "exp"}. An option of
    the chosen file comes first, then one of another file, with the choice that has it.
    """
    if sentence := renamed(key):
        return sentence
    if place := _dictionary(key, choices, folders):
        word = f"{place}.KEYWORD" if key == place else key
        return f"{word} is not set yet, so add it with a plus: +{word}=VALUE"
    if key.startswith("hydra."):
        return unknown_hydra_key(key)
    known = [one for one in known if one.rpartition(".")[2] not in ("name", *SET_BY_FILE)]
    last = key.rpartition(".")[2]
    of_others = key not in keys_of_axis(key.partition(".")[0], folders)
    if last in WITHOUT_KEY and of_others:
        return f"there is no option {key}. {WITHOUT_KEY[last]}"
    ours = OPTIONS_FOR.get(last, ())
    if ours and of_others:
        ours = [one for one in ours if one in known] or ours
        near = [_with_its_options(one, known, folders) for one in ours]
        return f"there is no option {key}.{did_you_mean(near)} What it means: --explain {' '.join(ours)}"
    axis, _, rest = key.partition(".")
    if not rest or (axis not in choices and not any(one.startswith(f"{axis}.") for one in known)):
        return f"there is no option {key}.{_near_anywhere(key, known, choices, folders)} {ALL}"
    own = [one for one in known if one.startswith(f"{axis}.")]
    near = difflib.get_close_matches(key, own, n=1)
    if axis not in choices:
        return f"there is no option {key}.{did_you_mean(near or own)} What they mean: --explain {axis}"
    elsewhere = keys_of_axis(axis, folders)
    chosen = f"{axis}={choices[axis]} has no option {key}"
    if key in elsewhere:
        return f"{chosen}, which belongs to {alternatives(axis, elsewhere[key])}{_has(own)}"
    if near:
        return f"{chosen}.{did_you_mean(near)}"
    others = difflib.get_close_matches(key, elsewhere, n=1)
    belongs = "".join(f". {other} belongs to {alternatives(axis, elsewhere[other])}" for other in others)
    return f"{chosen}{_has(own)}{belongs}"


def _dictionary(key: str, choices: Mapping[str, str], folders: Sequence[Path]) -> str:
    """The dictionary of a chosen option that takes any keys, and that `key` is or would be in; empty without one."""
    if key.startswith("hydra.launcher.additional"):
        return "hydra.launcher.additional"
    axis = key.partition(".")[0]
    fields = option_fields(folders, axis, choices[axis]) if choices.get(axis) in options_of(folders, axis) else {}
    free = {f"{axis}.{name}" for name, one in fields.items() if one.default.startswith("{")} | {"model.template"}
    return next((one for one in free if f"{key}.".startswith(f"{one}.") and one.partition(".")[2] in fields), "")


def _with_its_options(key: str, known: Collection[str], folders: Sequence[Path]) -> str:
    """A key, with the options that have it if none of them is chosen."""
    axis = key.partition(".")[0]
    options = [] if key in known else keys_of_axis(axis, folders).get(key, [])
    return f"{key} (of {alternatives(axis, options)})" if options else key


def unknown_option(group: str, option: str, folders: Sequence[Path]) -> str:
    """Say that an axis has no such option, and which it has."""
    if sentence := renamed_value(group, option):
        return sentence
    axis, _, place = f"{group}/{option}".partition("/")
    options = options_of(folders, axis)
    if not options:
        return f"there is no axis {axis}. {ALL}"
    near = [f"{axis}={one}" for one in _near_option(place, options)]
    number = f" A number is {NUMBERS[axis]}={place}." if axis in NUMBERS and place.replace(".", "").isdecimal() else ""
    few = len(options) <= 2 * SHOWN
    choices = f"Choose {axis}={'|'.join(options)}" if few else f"All of them: --explain {axis}"
    places = f". {PLACES[axis]}" if axis in PLACES else ""
    own = "" if len(folders) > 1 else f"; one of your own: --config-dir DIR, which has DIR/{axis}/{place}.yaml"
    return f"there is no {axis}={place}.{number or did_you_mean(near)} {choices}{places}{own}"


def _near_option(name: str, options: Collection[str]) -> list[str]:
    """The options that a name is near to: one in other capitals alone; none to a word that switches on."""
    if name.lower() in options:
        return [name.lower()]
    return [] if name.lower() in ON else difflib.get_close_matches(name, options, n=3)


def unread(word: str) -> str:
    """Say that `word` is not in the language of the command line."""
    return (
        f"cannot read {word}: a word is KEY=VALUE, with brackets and quotes in pairs; a value with other signs than "
        "letters and digits needs quotes of its own, as in 'name=\"ü\"'"
    )


def did_you_mean(keys: Sequence[str]) -> str:
    """A question, with a space before it; empty without keys or with too many."""
    return f" Did you mean {' or '.join(keys)}?" if 0 < len(keys) <= SHOWN else ""


def keys_of_axis(axis: str, folders: Sequence[Path]) -> dict[str, list[str]]:
    """Every dotted key of an axis with the options that have it; presets of others in the same folder are left out."""
    found: dict[str, list[str]] = defaultdict(list)
    for option, file in options_of(folders, axis).items():
        if not any(place == "" for place, _ in read_option(file).bases):
            for key in option_fields(folders, axis, option):
                found[f"{axis}.{key}"].append(option)
    return {key: options for key, options in found.items() if not key.endswith(".name")}


def _has(own: Sequence[str]) -> str:
    return f"; it has {', '.join(own)}" if 0 < len(own) <= SHOWN else ""


def _near_anywhere(key: str, known: Sequence[str], axes: Iterable[str], folders: Sequence[Path]) -> str:
    """What comes nearest in the chosen config, or has the same last part there or in another file."""
    name = key.rpartition(".")[2]
    alike = difflib.get_close_matches(key, [*known, *axes], n=1)
    same = [one for one in known if one.rpartition(".")[2] == name]
    for keys in (alike, same) if "." in key else (same,):
        if keys:
            return did_you_mean(keys)
    for axis in axes:
        for other, options in keys_of_axis(axis, folders).items():
            if other.rpartition(".")[2] == name:
                return f" {other} belongs to {alternatives(axis, options)}."
    return did_you_mean(alike)
