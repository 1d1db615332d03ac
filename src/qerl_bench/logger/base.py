"""A logger option: a mirror of metrics.jsonl. The run directory keeps its own record whatever the logger is."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from qerl_core.checks import ConfigError
from qerl_core.rundir.durable import write_atomically

log = logging.getLogger(__name__)
NAMES = ("trl",)  # those of others that a mirror can write
IDS = "mirror.json"  # in the run's folder: the id of its record at each service


class MetricsMirror:
    """Receives every record of metrics.jsonl. This one ignores them. Use as a context manager."""

    def __enter__(self) -> MetricsMirror:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """End the mirror; `kind` is None if the run succeeded."""

    def log(self, kind: str, step: int, metrics: dict[str, float]) -> None:
        """Mirror the metrics of one step; `kind` is train, validation or eval. Must not fail the run."""


def no_mirror(run_dir: Path, records: list[dict[str, Any]], config: dict[str, Any]) -> MetricsMirror:
    """Of a process that writes no run."""
    return MetricsMirror()


class ServiceMirror(MetricsMirror):
    """A record of the run at a service. At its first failure it warns and switches itself off.

    The service writes late, so after a kill it may hold records that the resumed run repeats, or lack some that it
    keeps: all local `records` are sent again at the start, and `send` leaves out those that the service has.
    """

    trl_prefix = "train/"  # with names=trl, as transformers' loggers of services write TRL's

    def __init__(self, spec: LoggerSpec, run_dir: Path, records: list[dict[str, Any]], config: dict[str, Any]) -> None:
        self.name, self.run = f"logger={spec.name}", None
        self.named = naming(getattr(spec, "names", None), config, self.trl_prefix)
        try:
            self.run = self.begin(spec, run_dir, kept_id(run_dir, spec.name, records), config)
        except ConfigError:
            raise
        except Exception as error:  # a mirror may break in any way; the run goes on
            log.warning("%s cannot start and is off; metrics.jsonl has everything: %s", self.name, error)
        for record in records:
            metrics = {key: value for key, value in record.items() if key not in ("kind", "step", "time")}
            self.log(record["kind"], record["step"], metrics)

    def begin(self, spec: Any, run_dir: Path, known: str | None, config: dict[str, Any]) -> Any:
        """The service's own object of a run; `known` is the id that its record has, if it is continued."""
        raise NotImplementedError

    def send(self, run: Any, kind: str, step: int, metrics: dict[str, float]) -> None:
        """Send the metrics of one step, unless the service has them."""
        raise NotImplementedError

    def end(self, run: Any, failed: bool) -> None:
        """Wait until the service has all."""
        run.finish()

    def log(self, kind: str, step: int, metrics: dict[str, float]) -> None:
        if self.run is None:
            return
        try:
            self.send(self.run, kind, step, {self.named(name): value for name, value in metrics.items()})
        except Exception as error:  # as above
            log.warning("%s failed at step %d and is off from here on: %s", self.name, step, error)
            self.run = None

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if self.run is None:
            return
        try:
            self.end(self.run, failed=kind is not None)
        except Exception as failure:  # as above
            log.warning("%s failed at its end: %s", self.name, failure)


class LoggerSpec(Protocol):
    """A logger option."""

    @property
    def name(self) -> str: ...

    def check(self) -> None:
        """Raise ConfigError if this logger cannot work here; called before training."""

    def mirror(self, run_dir: Path, records: list[dict[str, Any]], config: dict[str, Any]) -> MetricsMirror:
        """Start the mirror of the run in `run_dir`.

        `records` are the lines of metrics.jsonl so far, not empty after a resume; `config` is the resolved config.
        """
        ...


def naming(names: str | None, config: Mapping[str, Any], prefix: str) -> Callable[[str], str]:
    """What turns the name of a metric into that of a mirror: its own, or with `names` trl TRL's with this prefix."""
    if names is None:
        return str
    from qerl_studies.foreign.trl_names import trl_names

    return trl_names(config, prefix)


def group_of(config: dict[str, Any]) -> str:
    """What runs that differ in their seed alone have in common: the name without it."""
    return str(config["name"]).replace(f"-s{config['seed']}-", "-")


def tags_of(config: dict[str, Any]) -> list[str]:
    """The option of each axis, as in quant=nvfp4; without the logger."""
    axes = {key: value["name"] for key, value in config.items() if isinstance(value, dict) and "name" in value}
    return [f"{axis}={name}" for axis, name in axes.items() if axis != "logger"]


def kept_id(run_dir: Path, logger: str, records: list[dict[str, Any]]) -> str | None:
    """The id of the record that `logger` has of this run; None for a run that has no `records` yet, and for a copy.

    A folder that was deleted takes the id with it, so that a run of its name does not go on in the old record. One
    that was moved, or is read on another machine, keeps it.
    """
    known = _known(run_dir) if records else {}
    id, here = known.get(logger), _place(run_dir)
    if isinstance(id, str) and not any(known.get(key, value) == value for key, value in here.items()):
        log.warning("logger=%s: %s is a copy, and begins a record of its own beside %s", logger, run_dir, id)
        return None
    return id if isinstance(id, str) else None


def keep_id(run_dir: Path, logger: str, id: str) -> None:
    """Note the id of the record that `logger` has of this run, and where the run is."""
    write_atomically(run_dir / IDS, json.dumps(_known(run_dir) | _place(run_dir) | {logger: id}) + "\n")


def _known(run_dir: Path) -> dict[str, Any]:
    """What IDS says; nothing if it is missing or damaged, so that the record begins anew with all lines."""
    try:
        known = json.loads((run_dir / IDS).read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _place(run_dir: Path) -> dict[str, Any]:
    """A copy has another inode and another path, or another machine; a folder that was moved keeps the inode."""
    place = f"{platform.node()}:{run_dir.resolve()}"
    return {"inode": run_dir.stat().st_ino, "place": hashlib.sha256(place.encode()).hexdigest()[:16]}
