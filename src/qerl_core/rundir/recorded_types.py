"""What kinds of values a run's JSON files have, asked before anybody computes with them: a run may be somebody else's.

A key that is missing is another matter, and unknown keys are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from qerl_core.checks import ConfigError, is_number, is_texts

Kind = tuple[Callable[[Any], bool], str]  # whether a value is one, and what it must be


def _texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(one, str) for one in value.values())


def _or_null(kind: Kind) -> Kind:
    return (lambda value: value is None or kind[0](value)), f"{kind[1]} or null"


TEXT: Kind = (lambda value: isinstance(value, str)), "a text"
WHOLE: Kind = (lambda value: type(value) is int), "a whole number"
FLAG: Kind = (lambda value: type(value) is bool), "true or false"
NUMBER: Kind = is_number, "a number"
OBJECT: Kind = (lambda value: isinstance(value, dict)), "an object"
OBJECTS: Kind = (lambda value: isinstance(value, list) and all(isinstance(one, dict) for one in value)), "objects"
TEXTS: Kind = _texts, "an object of texts"
LIST: Kind = is_texts, "a list of texts"
VERSIONS: Kind = (
    (lambda value: isinstance(value, dict) and all(one is None or isinstance(one, str) for one in value.values())),
    "an object of versions",
)

GGUF = {"digest": TEXT, "file": TEXT, "dither": _or_null(WHOLE), "dither_scale": _or_null(NUMBER)}
ENVIRONMENT = {
    **dict.fromkeys(("commit", "code", "cpu", "gpu", "device", "base", "driver"), _or_null(TEXT)),
    **dict.fromkeys(("own_code", "remote_code", "inputs"), _or_null(TEXTS)),
    **dict.fromkeys(("metrics", "kernel_tables"), TEXTS),
    **{"dirty": _or_null(FLAG), "packages": _or_null(VERSIONS), "own_folders": LIST, "gguf": OBJECT},
    **{"earlier": OBJECTS, "after": WHOLE, "ranks": WHOLE, "threads": WHOLE},
}
RESULT = {
    **dict.fromkeys(("wall_s", "energy_j", "peak_memory_gib", "started", "ended"), _or_null(NUMBER)),
    **{"collapse": _or_null(TEXT), "base": _or_null(TEXT), "checkpoints": OBJECT, "final": OBJECT},
}

NAMED = ("quant", "quantizer", "aqn", "algo", "model", "task")
CONFIG: dict[str, dict[str, Kind]] = {  # of its groups, what readers compute with
    **{group: {"name": TEXT} for group in NAMED},
    "lora": {"name": TEXT, "rank": WHOLE},
    "optim": {"lr": NUMBER},
    "rollout": {"prompts_per_step": WHOLE, "group_size": WHOLE},
}


def require_kinds(where: str, content: Mapping[str, Any], kinds: Mapping[str, Kind], remedy: str) -> None:
    """Raise ConfigError, naming file `where` and key, for the first value that is none of its kind."""
    for key, (fits, what) in kinds.items():
        if key in content and not fits(content[key]):
            raise ConfigError(f"{where}: {key} must be {what}, got {content[key]!r:.80}. {remedy}")


def require_environment(where: str, content: Mapping[str, Any], remedy: str) -> None:
    """`require_kinds` of an env.json, and of what it says of a GGUF file and of earlier attempts."""
    require_kinds(where, content, ENVIRONMENT, remedy)
    require_kinds(f"{where}: gguf", content.get("gguf", {}), GGUF, remedy)
    if "gguf" in content and "digest" not in content["gguf"]:
        raise ConfigError(f"{where}: gguf has no digest. {remedy}")
    for entry in content.get("earlier", []):
        require_kinds(f"{where}: earlier", entry, ENVIRONMENT, remedy)


def require_config(where: str, config: Mapping[str, Any], remedy: str) -> None:
    """`require_kinds` of a config.yaml, and of its groups."""
    require_kinds(where, config, {"name": TEXT, "seed": WHOLE, "steps": WHOLE} | dict.fromkeys(CONFIG, OBJECT), remedy)
    for group, kinds in CONFIG.items():
        require_kinds(f"{where}: {group}", config.get(group, {}), kinds, remedy)
