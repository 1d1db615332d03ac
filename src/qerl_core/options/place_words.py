"""`model=` and `reward=` with a place in place of an option.

What model.id can name is model=hub with that id, and a Python file is reward=function with that file.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

AXIS = "model="
REWARD = "reward="


def is_place(name: str, options: Collection[str]) -> bool:
    """Whether `name` is a hub id, a folder or a GGUF file, and not one of `options`, nor in a folder of theirs."""
    folders = {option.partition("/")[0] for option in options if "/" in option}
    named = name in options or name.partition("/")[0] in folders
    return not named and ("/" in name or name.lower().endswith(".gguf"))


def words_of(name: str, options: Collection[str]) -> tuple[str, ...]:
    """The words that choose the model `name`, which is one of `options` or a place."""
    return (f"{AXIS}hub", f"model.id={name}") if is_place(name, options) else (f"{AXIS}{name}",)


def with_places(words: Sequence[str], options: Collection[str]) -> list[str]:
    """`words` with the option and the key of each place, where `options` are those of models.

    Points of a sweep are words of their own, later.
    """
    return [part for word in words for part in _spelled_out(word, options)]


def _spelled_out(word: str, options: Collection[str]) -> list[str]:
    if word.startswith(AXIS) and is_place(_value(word), options):
        return [f"{AXIS}hub", f"model.id={word.removeprefix(AXIS)}"]
    if word.startswith(REWARD) and _value(word).endswith(".py"):
        return [f"{REWARD}function", f"reward.file={word.removeprefix(REWARD)}"]
    return [word]


def _value(word: str) -> str:
    """The text that a word sets; empty for several, and for what is none."""
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException:  # of which Hydra says more
        return ""
    value = None if override.is_sweep_override() else override.value()
    return value if isinstance(value, str) else ""
