"""The errors that a user can cause, and the checks of config values that raise them.

The upper limits are few and generous: a value beyond them is a typing error.
"""

from __future__ import annotations

import math
from pathlib import Path

MOST_STEPS = 10_000_000
MOST_COMPLETIONS = 1_000_000  # of one step, and of one evaluation
MOST_LR = 1.0  # AdamW moves each weight by about its rate in every step; weights of language models are below 1
TEMPERATURES = (0.01, 100.0)  # below them sampling is greedy decoding, above them all tokens are equally likely


class ConfigError(ValueError):
    """Raised before any training starts; `src/run.py` prints its message and exits with code 2.

    The message says what was wrong, the limit, the value given, and what to do instead.
    """


def require(condition: bool, message: str) -> None:
    """Raise ConfigError with `message` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


def require_package(name: str, option: str, extra: str) -> None:
    """Raise ConfigError if the optional package `name`, which the config choice `option` needs, is not installed."""
    from importlib.util import find_spec

    if find_spec(name) is None:
        raise ConfigError(
            f"{option} needs the package {name}, which is not installed: pip install 'qerl-bench[{extra}]'"
        )


class TrainingStopped(RuntimeError):
    """Raised by a run that cannot go on; `src/run.py` prints its message, no traceback, and exits with code 1."""


def is_number(value: object) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool)  # of any size, where isfinite would overflow
    return whole or (isinstance(value, float) and math.isfinite(value))


def is_folder_name(name: object) -> bool:
    """Whether `name` is a relative path that leads downwards, such as x or a/b."""
    return isinstance(name, str) and name != "" and not Path(name).is_absolute() and ".." not in Path(name).parts


def require_count(key: str, value: object, least: int = 1, most: int | None = None) -> None:
    """Raise ConfigError unless `value` is a whole number of at least `least`, and at most `most`."""
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= least
    require(ok, f"{key} must be a whole number of at least {least}, got {value!r}")
    if most is not None:
        require(value <= most, f"{key} must be at most {most:,}, got {value}")  # type: ignore[operator]


def require_positive(key: str, value: object) -> None:
    """Raise ConfigError unless `value` is a positive, finite number."""
    require(is_number(value) and value > 0, f"{key} must be a positive number, got {value!r}")  # type: ignore[operator]


def require_lr(key: str, value: object) -> None:
    """Raise ConfigError unless `value` can be a learning rate of AdamW."""
    require_positive(key, value)
    require(
        value <= MOST_LR,  # type: ignore[operator]  # a number by now
        f"{key} must be at most {MOST_LR:g}, got {value!r}: AdamW moves each weight by about that much in every step, "
        "and the weights of language models are below 1. RL of an adapter uses 1e-6 to 1e-3",
    )


def require_temperature(key: str, value: object) -> None:
    """Raise ConfigError unless `value` is a temperature to sample at."""
    require_positive(key, value)
    low, high = TEMPERATURES
    require(
        low <= value <= high,  # type: ignore[operator]  # a number by now
        f"{key} must be from {low:g} to {high:g}, got {value!r}: below, sampling is greedy decoding, and above, all "
        "tokens are equally likely. 1 is the model's own distribution",
    )


def require_completions(key: str, prompts: int, each: int) -> None:
    """Raise ConfigError if `each` completions of `prompts` prompts are more than one step or evaluation may sample."""
    require(
        prompts * each <= MOST_COMPLETIONS,
        f"{key} must be at most {MOST_COMPLETIONS:,} completions, got {prompts:,} x {each:,} = {prompts * each:,}; "
        "make one of the two smaller",
    )


def require_readable(key: str, tokens: int | None, reads: int | None, model: str) -> None:
    """Raise ConfigError if completions of `tokens` are longer than what `model` reads, as far as both are known."""
    require(
        tokens is None or reads is None or tokens <= reads,
        f"{key} must be at most the {reads} tokens that model={model} reads, got {tokens}; make it smaller, or choose "
        "a model that reads more",
    )
