"""What was measured of a base before, so that no run measures it twice: comparisons with the untouched model.

A file has the whole key beside what was measured, and counts only for an equal key: weights (`model/digest.py`, which
sees a dither), config.json, formats and options that change what is computed, code, packages, and the card. Where a
part is not known nothing is read or written, and of a comparison that failed there is no file. To compare again, delete
the folder. Evaluations before training (`eval/untrained.py`) are kept in the same way, elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qerl_bench.quantizer.base import Quantizer
from qerl_core.rundir.checksums import digest
from qerl_core.rundir.environment import code_digest, cpu_name, nvidia_driver, own_modules, versions
from qerl_core.rundir.locks import wait_for_lock

log = logging.getLogger(__name__)
NEEDED = ("torch", "transformers")  # packages without which nothing can be compared
SHOWN = 16  # hex digits of a key, in the name of its file


def passed_before() -> Path:
    """The folder of comparisons that were passed: $XDG_CACHE_HOME/qerl_bench/preflight, by default in ~/.cache."""
    return _own_cache() / "preflight"


def locks() -> Path:
    """The folder of those who measure something now, $XDG_CACHE_HOME/qerl_bench/locks: a run that is refused leaves
    nothing in its root.
    """
    return _own_cache() / "locks"


def _own_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qerl_bench"


def key_of(
    weights: str | None,
    checkpoint: Path | None,
    remote_code: Mapping[str, str] | None,
    quantizer: Quantizer,
    options: Mapping[str, Any],
    device: str,
) -> dict[str, Any] | None:
    """All that a comparison depends on, as plain data; None if some of it is not known.

    `options` are specs, and values of the config, by name. Codes that a quantizer has chosen by calibration are not
    known by these.
    """
    import torch

    from qerl_kernels.decode_configs import tables

    if weights is None or quantizer.calibration is not None:
        return None
    card = torch.cuda.get_device_name() if device == "cuda" else cpu_name()
    packages = versions()
    known = [card, *(packages.get(name) for name in NEEDED)]
    config = None if checkpoint is None else checkpoint / "config.json"
    if not all(known) or (config is not None and not config.is_file()):
        return None
    return {
        "weights": weights,
        "config": None if config is None else digest(config),
        "remote_code": remote_code,
        "options": {name: _plain(value) for name, value in options.items()} | {"quantizer": _plain(quantizer)},
        "code": code_digest(),
        "own_code": own_modules(),
        "packages": packages,
        "device": device,
        "card": card,
        "driver": nvidia_driver() if device == "cuda" else None,
        "kernel_tables": [digest(path) for path in tables(card or "")] if device == "cuda" else [],
    }


def _plain(value: Any) -> Any:
    """A spec as plain data, with the name of its class."""
    if hasattr(value, "__dataclass_fields__"):
        value = asdict(value) | {"class": f"{type(value).__module__}.{type(value).__qualname__}"}
    return json.loads(json.dumps(value, default=str))


def recall(key: dict[str, Any] | None, folder: Path) -> dict[str, Any] | None:
    """What was measured under this key; None if nothing is remembered of it in `folder`, or not as it was written."""
    if key is None:
        return None
    try:
        found = json.loads(_file(key, folder).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or found.get("key") != key or not isinstance(found.get("measured"), dict):
        return None
    return found["measured"] if found.get("sha256") == _seal(found["measured"]) else None


def remember(key: dict[str, Any] | None, measured: Mapping[str, Any], folder: Path) -> None:
    """Keep what was measured, as plain data. A cache that cannot be written is left alone."""
    if key is None:
        return
    file = _file(key, folder)
    writing = file.with_suffix(f".{os.getpid()}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        kept = {"key": key, "sha256": _seal(measured), "measured": measured}
        writing.write_text(json.dumps(kept, indent=1), encoding="utf-8")
        os.replace(writing, file)
    except (OSError, TypeError) as error:
        log.debug("%s is not remembered: %s", file, error)
        with suppress(OSError):
            writing.unlink()


@contextmanager
def exclusively(key: dict[str, Any] | None, folder: Path, what: str) -> Iterator[None]:
    """For as long as something is recalled or measured, so that of several processes one measures it.

    A process whose key is not known, or that cannot write to `folder`, does not wait.
    """
    with ExitStack() as held:
        if key is not None:
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                held.enter_context(wait_for_lock(_file(key, folder).with_suffix(".lock"), what))
        yield


def _seal(measured: Mapping[str, Any]) -> str:
    """SHA-256 of what was measured as JSON, which is the same when it was read back."""
    return hashlib.sha256(json.dumps(measured).encode()).hexdigest()


def _file(key: dict[str, Any], folder: Path) -> Path:
    return folder / f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:SHOWN]}.json"
