"""The errors that users see, and checks of config values that raise them.

A spec checks its fields in `__post_init__`, one line per field:

    check_fields(self, "optim", lr=learning_rate, schedule=one_of("constant", "linear"), warmup_steps=count(0))

Upper limits are generous: a larger value is a typo, not an experiment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MAX_STEPS = 10_000_000
MAX_COMPLETIONS = 1_000_000  # of one step, and of one evaluation
MAX_SIGMA = 1000.0  # of noise on norm scales, which are about 1, and below 1,000 in every model
MAX_ALPHA = 1e6  # of LoRA; alpha over rank multiplies the adapter's output
MAX_LR = 1.0  # AdamW moves each weight by about the learning rate per step; weights of language models are below 1
MAX_NAME_BYTES = 200  # of a folder; file systems allow 255, and files beside it add to its name
FieldCheck = Callable[[str, object], None]  # (key, value): raises ConfigError unless the value is allowed
TEMPERATURES = (0.01, 100.0)  # below, sampling is greedy decoding; above, all tokens are equally likely


class ConfigError(ValueError):
    """Bad input, found before training starts: `src/run.py` prints the message and exits with code 2.

    The message names the key, the limit, the given value, and a remedy.
    """


class RunLocked(ConfigError):
    """Another process is running in the folder of a run."""


def require(condition: bool, message: str) -> None:
    """Raise ConfigError with `message` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


@contextmanager
def naming(what: str) -> Iterator[None]:
    """In this block the message of a ConfigError begins with `what` it is about, such as a file, unless it says so."""
    try:
        yield
    except ConfigError as error:
        if what not in str(error):
            error.args = (f"{what}: {error}",)
        raise


def require_package(name: str, option: str, extra: str) -> None:
    """Raise ConfigError if the optional package `name`, which the config choice `option` needs, is not installed."""
    from importlib.util import find_spec

    require(find_spec(name) is not None, lacking(name, option, extra))


def lacking(package: str, option: str, extra: str) -> str:
    """What to do if the optional `package`, which the config choice `option` needs, is not installed."""
    return f"{option} needs the package {package}, which is not installed. In a checkout: pip install -e '.[{extra}]'"


class TrainingStopped(RuntimeError):
    """A run cannot go on: `src/run.py` prints the message without a traceback and exits with code 1."""


@dataclass(frozen=True)
class Check:
    """check(key, value) raises ConfigError, with key and value, unless the value is `what`, as `allowed` decides."""

    allowed: Callable[[object], bool]
    what: str

    def __call__(self, key: str, value: object) -> None:
        require(self.allowed(value), f"{key} must be {self.what}, got {value!r}")


def check_fields(spec: object, group: str, **checks: FieldCheck) -> None:
    """Apply each check to the field of `spec` with its name. Raises ConfigError that names the key `group`.field."""
    for name, check in checks.items():
        check(f"{group}.{name}".lstrip("."), getattr(spec, name))


def count(least: int = 1) -> Check:
    """A whole number of at least `least`."""

    def allowed(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= least

    return Check(allowed, f"a whole number of at least {least}")


@dataclass(frozen=True)
class _AtMost:
    most: int
    check: Check

    @property
    def what(self) -> str:
        return f"{self.check.what}, at most {self.most:,}"

    def __call__(self, key: str, value: object) -> None:
        self.check(key, value)
        require(value <= self.most, f"{key} must be at most {self.most:,}, got {value}")  # type: ignore[operator]


def at_most(most: int, check: Check) -> FieldCheck:
    """What `check` allows, up to `most`; a value above gets a message of its own."""
    return _AtMost(most, check)


def one_of(*choices: str) -> Check:
    return Check(lambda value: value in choices, f"one of {', '.join(choices)}")


def number(
    least: float = -math.inf, most: float = math.inf, *, above: float = -math.inf, below: float = math.inf
) -> Check:
    """A finite number from `least` to `most`, larger than `above` and smaller than `below`."""

    def allowed(value: object) -> bool:
        return is_number(value) and least <= value <= most and above < value < below  # type: ignore[operator]

    limits = (
        f"of at least {least:g}" if least > -math.inf else "",
        f"above {above:g}" if above > -math.inf else "",
        f"at most {most:g}" if most < math.inf else "",
        f"below {below:g}" if below < math.inf else "",
    )
    return Check(allowed, f"a number {' and '.join(filter(None, limits))}".rstrip())


def optional(check: Check) -> Check:
    """null, or what `check` allows."""
    return Check(lambda value: value is None or check.allowed(value), f"null or {check.what}")


text = Check(lambda value: isinstance(value, str) and value.strip() != "", "a text that is not empty")
flag = Check(lambda value: isinstance(value, bool), "true or false")
positive = number(above=0)
share = number(0, 1)


def is_number(value: object) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool)  # isfinite would overflow for very large ones
    return whole or (isinstance(value, float) and math.isfinite(value))


def is_texts(value: object) -> bool:
    """Whether `value` is a list or tuple of strings alone."""
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(one, str) for one in value)


def is_folder_name(name: object) -> bool:
    """Whether `name` is a relative path without `..`, such as x or a/b, that every file system can hold."""
    if not (isinstance(name, str) and name.isprintable() and not Path(name).is_absolute()):
        return False
    parts = Path(name).parts
    return parts != () and ".." not in parts and all(len(part.encode()) <= MAX_NAME_BYTES for part in parts)


def learning_rate(key: str, value: object) -> None:
    """Raise ConfigError unless `value` can be a learning rate of AdamW."""
    positive(key, value)
    require(
        value <= MAX_LR,  # type: ignore[operator]  # a number by now
        f"{key} must be at most {MAX_LR:g}, got {value!r}: AdamW moves each weight by about the learning rate per "
        "step, and weights of language models are below 1. RL of an adapter uses 1e-6 to 1e-3",
    )


def temperature(key: str, value: object) -> None:
    """Raise ConfigError unless `value` is a temperature to sample at."""
    positive(key, value)
    low, high = TEMPERATURES
    require(
        low <= value <= high,  # type: ignore[operator]  # a number by now
        f"{key} must be from {low:g} to {high:g}, got {value!r}: below, sampling is greedy decoding; above, all tokens "
        "are equally likely. 1 is the model's own distribution",
    )


def require_completions(key: str, prompts: int, each: int) -> None:
    """Raise ConfigError if `each` completions of `prompts` prompts are too many for one step or evaluation."""
    require(
        prompts * each <= MAX_COMPLETIONS,
        f"{key} must be at most {MAX_COMPLETIONS:,} completions, got {prompts:,} x {each:,} = {prompts * each:,}; "
        "make one of the two smaller",
    )
