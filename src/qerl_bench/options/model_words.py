"""`model=` with the place of a model in place of an option: what model.id can name is model=hub with that id."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

AXIS = "model="


def is_place(name: str, options: Collection[str]) -> bool:
    """Whether `name` is a hub id, a folder or a GGUF file, and not one of `options`, nor in a folder of theirs."""
    folders = {option.partition("/")[0] for option in options if "/" in option}
    named = name in options or name.partition("/")[0] in folders
    return not named and ("/" in name or name.lower().endswith(".gguf"))


def words_of(name: str, options: Collection[str]) -> tuple[str, ...]:
    """The words that choose the model `name`, which is one of `options` or a place."""
    return (f"{AXIS}hub", f"model.id={name}") if is_place(name, options) else (f"{AXIS}{name}",)


def with_places(words: Sequence[str], options: Collection[str]) -> list[str]:
    """`words` with model=hub model.id=PLACE for each model=PLACE; points of a sweep are words of their own, later."""
    return [
        part
        for word in words
        for part in ((f"{AXIS}hub", f"model.id={word.removeprefix(AXIS)}") if _names_a_place(word, options) else [word])
    ]


def _names_a_place(word: str, options: Collection[str]) -> bool:
    if not word.startswith(AXIS):
        return False
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException:  # of which Hydra says more
        return False
    value = None if override.is_sweep_override() else override.value()
    return isinstance(value, str) and is_place(value, options)
