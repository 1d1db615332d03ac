"""What env.json says of who made a run: versions of the code, machines and libraries, attempt by attempt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "numpy")  # those that any run may compute with
CLASS = "reported"  # of a study, beside those that were made here
Environment = Mapping[str, Any]


def attempts_of(env: Environment) -> list[Environment]:
    """The environments that steps of a run were made in, as far as they differ and were recorded, the last one at the
    end."""
    return [*(env.get("earlier") or []), env]


def codes_of(env: Environment) -> list[str]:
    """The versions of the code that made a run's steps, in their order: digests of its sources or, without, commits."""
    return list(dict.fromkeys(map(_code, attempts_of(env))))


def block_of(env: Environment) -> str:
    """Machines and library versions that made a run's steps, in their order, as far as they were recorded."""
    return ", then ".join(dict.fromkeys(map(_block, attempts_of(env))))


def is_reported(env: Environment) -> bool:
    """Whether others made the run, and only its numbers are here."""
    return env.get("class") == CLASS


def device_of(env: Environment) -> str:
    """The name of the GPU, cpu, or unknown."""
    return str(env.get("gpu") or env.get("device", "unknown"))


def _code(env: Environment) -> str:
    return str(env.get("code") or f"of commit {env.get('commit')}{' with changes' if env.get('dirty') else ''}")


def _block(env: Environment) -> str:
    packages: Environment = env.get("packages") or {}
    versions = [f"{name} {packages[name]}" for name in LIBRARIES if packages.get(name)]
    if env.get("gpu") and packages.get("triton"):
        versions.append(f"triton {packages['triton']}")
    return ", ".join([device_of(env), *([env["cpu"]] if env.get("cpu") else []), *versions])
