"""The points of a sweep, and the words of the command line that make them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException

from qerl_core.checks import TrainingStopped
from qerl_core.process.installation import CONF_DIR


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    overrides: list[str]
    name: str
    run_dir: Path
    finished: bool
    damage: str | None = None  # why it can neither run nor count as finished
    changed: Sequence[str] = ()  # what a finished one was made with and is now another


class SweepFailed(TrainingStopped):
    """Some runs of a sweep failed; the others are done."""

    def __init__(self, total: int, failed: Sequence[tuple[Point, str]]) -> None:
        listed = "\n".join(f"  {point.run_dir}: {reason}" for point, reason in failed)
        super().__init__(
            f"{len(failed)} of {total} runs failed:\n{listed}\n"
            "The same command runs these again and skips the finished ones."
        )


def flags_first(argv: list[str]) -> list[str]:
    """Move flags in front of overrides: `a=1 -m b=2` becomes `-m a=1 b=2`.

    argparse in Hydra 1.3 refuses overrides on both sides of a flag (hydra issue 3053).
    """
    flags: list[str] = []
    words: list[str] = []
    long = ("--config-name", "--config-path", "--config-dir", "--cfg", "--info", "--package", "--experimental-rerun")
    takes_value = (*long, "-cn", "-cp", "-cd", "-c", "-i", "-p")
    remaining = iter(argv)
    for word in remaining:
        if not word.startswith("-"):
            words.append(word)
            continue
        flags.append(word)
        if word in takes_value:
            flags += [value for value in [next(remaining, None)] if value is not None]
    return flags + words


def with_swept_axes(words: Sequence[str]) -> list[str]:
    """The words of a sweep, where a value of an axis that is swept becomes a sweep over one value: with
    aqn=exp,linear, aqn.stages=5 becomes aqn.stages=choice(5).

    Hydra composes the grid with one option of each axis, its default, which need not have the key.
    """
    pairs = [word.partition("=") for word in words]
    swept = {axis for axis, _, value in pairs if (CONF_DIR / axis).is_dir() and "," in value}
    return [
        f"{key}=choice({value})" if key.partition(".")[0] in swept and "." in key and is_one_value(word) else word
        for word, (key, _, value) in zip(words, pairs, strict=True)
    ]


def is_one_value(word: str) -> bool:
    """Whether a word of the command line sets one value, which is not empty, and is no sweep over several."""
    try:
        return not word.endswith("=") and not OverridesParser.create().parse_override(word).is_sweep_override()
    except OverrideParseException:
        return False
