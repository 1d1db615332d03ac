"""Command lines that take key=value words, as Hydra does, besides argparse's own --key value."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from qerl_core.checks import require

NEAR = 0.8  # as difflib measures it
WIDTH = 100  # columns of what commands say about themselves
CONTROL = re.compile(  # not \t and \n, and \r only before it: alone it writes over its line
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]|\r(?!\n)"
)
INDENT = " " * 4  # of the lines in which a line that is too long goes on


class KeyValueParser(argparse.ArgumentParser):
    """argparse, where out=DIR stands for --out DIR, metrics=a,b for --metrics a b, and csv=true for --csv.

    Commas in brackets separate nothing, as in words=task.numbers=[3,4],steps=5. Behind a --key, an `a=b` is a value of
    it.
    """

    def __init__(self, description: str | None) -> None:
        super().__init__(
            description=wrapped(description or ""),
            epilog="Every --key VALUE can be written key=VALUE, as in out=DIR or mixed_code=true.",
            formatter_class=partial(argparse.RawDescriptionHelpFormatter, width=WIDTH),
        )

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        first = next((at for at, word in enumerate(words) if word.startswith("-")), len(words))
        words, rest = words[:first], words[first:]
        flags = {word: self._flags(word, strict=not rest) for word in words}
        self._refuse_twice([(word, found[0]) for word in words if (found := flags[word])])
        plain = [word for word in words if flags[word] is None]
        front = [*plain, *(flag for word in words for flag in flags[word] or ())]
        return super().parse_known_args([*front, *rest], namespace)

    def _flags(self, word: str, strict: bool) -> list[str] | None:
        """The flag and values that `key=value` stands for; None if `word` is something else.

        An unknown key is refused if `strict`: where there are flags, the word may be a pattern of folders.
        """
        key, equals, value = word.partition("=")
        if not equals or not key.isidentifier() or Path(word).exists():
            return None
        option = f"--{key.replace('_', '-')}"
        action = self._option_string_actions.get(option)
        if action is None and strict:
            self.error(f"there is no option {key}{self._instead_of(key, value)}")
        if action is None:
            return None
        if action.nargs == 0:  # a switch
            if value not in ("true", "false"):
                self.error(f"{key} must be true or false, got {value!r}")
            return [option] if value == "true" else []
        return [option, *(_parts(value) if action.nargs == "+" else [value])]

    def is_own(self, word: str) -> bool:
        """Whether key=value has the key of an option, or one so near that this parser shall say how it is written.

        A key with dots is none of a command.
        """
        key, equals, _ = word.partition("=")
        return bool(equals and key.isidentifier() and difflib.get_close_matches(key, self._keys(), cutoff=NEAR))

    def _keys(self) -> set[str]:
        return {flag.lstrip("-").replace("-", "_") for flag in self._option_string_actions}

    def _refuse_twice(self, given: Sequence[tuple[str, str]]) -> None:
        """End with an error if two words set one option, of which argparse would take the last."""
        for option in {option for _, option in given}:
            words = [word for word, one in given if one == option]
            if len(words) > 1 and not isinstance(self._option_string_actions[option], argparse._ExtendAction):
                self.error(f"{' and '.join(words)} set one option: give it once")

    def _instead_of(self, key: str, value: str) -> str:
        """What to type in the place of an option `key` that does not exist; empty if no option has a name like it."""
        if any(action.dest == key and not action.option_strings for action in self._actions):
            return f": {value} stands alone, without {key}="
        close = difflib.get_close_matches(key, self._keys(), n=1)
        return f". Did you mean {close[0]}={value}?" if close else ""


def output_folder(text: str) -> Path:
    """The type of an argument that names a folder to write to, there or not. argparse ends with its error if it is a
    file, or nothing can be written there."""
    if text.startswith("~"):
        raise argparse.ArgumentTypeError(f"{text}: this shell does not expand ~ there; write the whole path, or $HOME")
    if not text or (path := Path(text)).is_file():
        raise argparse.ArgumentTypeError(f"{text} is a file; give a folder" if text else "empty; give a folder")
    if reason := unwritable(path):
        raise argparse.ArgumentTypeError(f"cannot write to {text}: {reason}; give another folder")
    return path


def unwritable(path: Path) -> str | None:
    """Why nothing can be written to the folder `path`, or where it would have to be made; None if something can."""
    place = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    try:
        TemporaryFile(dir=place).close()  # for root, os.access allows places where nothing can be made
    except OSError as error:
        return f"{place} is not a writable folder ({error.strerror})"
    return None


def wrapped(text: str) -> str:
    """Paragraphs filled to WIDTH columns; indented lines, which are commands, stay as they are."""
    paragraphs = re.split(r"\n\s*\n", text.strip())
    filled = [one if one.startswith(" ") or "\n " in one else textwrap.fill(one, WIDTH) for one in paragraphs]
    return "\n\n".join(filled)


def printable(text: str) -> str:
    """`text` for a terminal: control characters and those that turn the direction, which a name of somebody else may
    have, as `repr` shows them."""
    return CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def wrap_lines(text: str) -> str:
    """Printable `text` in lines of WIDTH columns, broken at spaces, those behind punctuation first; a longer word stays
    whole."""
    return "\n".join(map(_broken, printable(text).split("\n")))


def whole(text: str) -> str:
    """`text` as it was before `wrap_lines`, on whose lines it is read."""
    return text.replace(f"\n{INDENT}", " ")


def _broken(line: str) -> str:
    if len(line) <= WIDTH:
        return line
    first, *parts = re.split(r"(?<=.{6}[,;:.]) ", line)  # not behind `error:`
    rows = [first]
    for part in parts:
        if len(rows[-1]) + 1 + len(part) <= WIDTH:
            rows[-1] += f" {part}"
        else:
            rows.append(INDENT + part)
    keep = {"subsequent_indent": INDENT, "break_long_words": False, "break_on_hyphens": False}
    return "\n".join(
        textwrap.fill(row.lstrip(), WIDTH, initial_indent=" " * (len(row) - len(row.lstrip())), **keep) for row in rows
    )


def _parts(value: str) -> list[str]:
    """What the commas outside of brackets separate."""
    parts, depth = [""], 0
    for letter in value:
        depth += (letter in "[{(") - (letter in ")}]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def split_words(argv: Sequence[str], names: Sequence[str], usage: str) -> tuple[list[str], dict[str, str]]:
    """Split a command line into words for Hydra and the values of `names`, each of which must be given once."""
    chosen: dict[str, str] = {}
    words = []
    for word in argv:
        key, equals, value = word.partition("=")
        require(bool(equals and value), f"{word!r} is not key=value; {usage}")
        if key in names:
            require(key not in chosen, f"{key}= is given twice; {usage}")
            chosen[key] = value
        else:
            words.append(word)
    missing = [f"{name}=" for name in names if name not in chosen]
    require(not missing, f"{' and '.join(missing)} must be given; {usage}")
    return words, chosen
