"""The one exception that means: the user asked for something that cannot be done."""

from __future__ import annotations


class BadInput(ValueError):
    """Raised before any training starts; `src/run.py` prints its message and exits with code 2.

    The message says what was wrong, the limit, the value given, and what to do instead.
    """


def require(condition: bool, message: str) -> None:
    """Raise BadInput with `message` unless `condition` holds."""
    if not condition:
        raise BadInput(message)


def require_package(name: str, option: str, extra: str) -> None:
    """Raise BadInput if the optional package `name`, which the config choice `option` needs, is not installed."""
    from importlib.util import find_spec

    if find_spec(name) is None:
        raise BadInput(f"{option} needs the package {name}, which is not installed: pip install 'qerl-bench[{extra}]'")


class TrainingStopped(RuntimeError):
    """Raised by a run that cannot go on; `src/run.py` prints its message, no traceback, and exits with code 1."""
