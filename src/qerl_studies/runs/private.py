"""Takes out of what is published who made it, on which machine, in which folders, and keys to anything.

Paths keep their last part, names of the user and the machine become <user> and <host>. Left out: names that say nothing
(root, ubuntu, localhost), users and machines other than those of this process unless a path shows them, and the owner
of a model on the hub, OWNER/NAME, without which nobody could load it.
"""

from __future__ import annotations

import getpass
import re
import socket
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, TypeVar

T = TypeVar("T")
COMMON = {"root", "user", "ubuntu", "debian", "admin", "runner", "jovyan", "nobody", "localhost", "host"}
PART = r"[^\s/:;,'\"<>|()\[\]{}=]+"
PATH = re.compile(rf"(?:file://|(?<![\w/:.>~-]))/{PART}(?:/{PART})+/?|(?<![\w/:.>~-])/root\b")
HOMES = ("home", "Users")
MAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)*\.[A-Za-z]{2,}\b")
KEYS = {
    "a token of Hugging Face": re.compile(r"\bhf_[A-Za-z0-9]{20,}"),
    "a key of OpenAI or Anthropic": re.compile(r"\bsk-[A-Za-z0-9_-]{20,}"),
    "a token of GitHub": re.compile(r"\b(?:gh[pousr]|github_pat)_[A-Za-z0-9_]{20,}"),
    "a key of AWS": re.compile(r"\bAKIA[0-9A-Z]{16}\b"),
    "a key of W&B": re.compile(r"\bwandb_v\d_[A-Za-z0-9_]{20,}"),
    "a password": re.compile(r"(?i)(?:api_?key|secret|passw(?:or)?d|token)=\S{8,}|(?<=://)[^\s/@:]+:[^\s/@]+(?=@)"),
}


@dataclass(frozen=True)
class Private:
    """The words that are hidden, besides paths, mail addresses and keys."""

    user: str
    host: str

    @classmethod
    def here(cls) -> Private:
        """The user and the machine of this process."""
        try:
            user = getpass.getuser()
        except (OSError, KeyError):  # a container's user without a name
            user = ""
        return cls(user, socket.gethostname())

    def hidden(self, value: T) -> T:
        """`value`, a text or a tree of lists and mappings, keys included, without what is private."""
        if isinstance(value, dict):
            return {self.hidden(key): self.hidden(part) for key, part in value.items()}  # type: ignore[return-value]
        if isinstance(value, list):
            return [self.hidden(part) for part in value]  # type: ignore[return-value]
        return self.hidden_text(value) if isinstance(value, str) else value  # type: ignore[return-value]

    def hidden_text(self, text: str) -> str:
        for pattern in KEYS.values():
            text = pattern.sub("<key>", text)
        text = PATH.sub(_last_part, MAIL.sub("<mail>", text))
        for word, sign in self._words():
            text = word.sub(sign, text)
        return text

    def found(self, text: str) -> list[str]:
        """What in `text` is private, by kind; never the thing itself."""
        kinds = [kind for kind, pattern in KEYS.items() if pattern.search(text)]
        kinds += ["the path of a folder"] if PATH.search(text) else []
        kinds += ["a mail address"] if MAIL.search(text) else []
        return kinds + [f"the name of the {sign[1:-1]}" for word, sign in self._words() if word.search(text)]

    def _words(self) -> list[tuple[re.Pattern[str], str]]:
        names = {self.user: "<user>", self.host: "<host>", self.host.partition(".")[0]: "<host>"}
        chosen = {name: sign for name, sign in names.items() if len(name) > 2 and name.lower() not in COMMON}
        return [(_word(name), chosen[name]) for name in sorted(chosen, key=len, reverse=True)]


def _word(name: str) -> re.Pattern[str]:
    """`name` where it stands alone; not the owner of a model on the hub, NAME/MODEL."""
    return re.compile(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9]|/[A-Za-z0-9])")


def _last_part(path: re.Match[str]) -> str:
    """What is kept of a path: nothing of a home directory itself."""
    *parents, last = PurePosixPath(path[0].removeprefix("file://")).parts[1:]
    home = not parents or (len(parents) == 1 and parents[0] in HOMES)
    return "<path>" if home else f"<path>/{last}"


def kinds_in(values: Any, private: Private) -> list[str]:
    """The kinds of private things in a tree, each once."""
    if isinstance(values, dict):
        values = [*values, *values.values()]
    if isinstance(values, list):
        return [*dict.fromkeys(kind for value in values for kind in kinds_in(value, private))]
    return private.found(values) if isinstance(values, str) else []
