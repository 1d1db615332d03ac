"""logger=trackio: a mirror of metrics.jsonl in Trackio's database on this machine. Needs no account, no network.

TRACKIO_DIR, TRACKIO_SPACE_ID and TRACKIO_SERVER_URL choose the place, as Trackio reads them.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerl_bench.checks import check_fields, require_package, text
from qerl_bench.logger.base import MetricsMirror, group_of, keep_id, kept_id, metrics_in

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Trackio:
    """Mirror a run under its own name, grouped with its other seeds."""

    name: str
    project: str

    def __post_init__(self) -> None:
        check_fields(self, "logger", project=text)

    def check(self) -> None:
        require_package("trackio", "logger=trackio", "trackio")

    def mirror(self, run_dir: Path, records: list[dict[str, Any]], config: dict[str, Any]) -> MetricsMirror:
        return TrackioMirror(self, run_dir, records, config)


class TrackioMirror(MetricsMirror):
    """A Trackio run with the records of ours, under its whole name. At its first failure it warns and switches itself
    off. Trackio continues the newest run of a name: if that is not ours, another one is begun.

    Trackio writes late, so a killed run may lack records that the resumed one keeps, or have some that it repeats: all
    local records are sent again at the start, except for those that Trackio has.
    """

    def __init__(self, spec: Trackio, run_dir: Path, records: list[dict[str, Any]], config: dict[str, Any]) -> None:
        self.run: Any = None
        self.sent: set[tuple[str, int]] = set()
        try:
            import trackio
            from trackio.sqlite_storage import SQLiteStorage

            name, ours = str(config["name"]), kept_id(run_dir, spec.name, records)
            newest = SQLiteStorage.get_latest_run_record_by_name(spec.project, name)
            goes_on = ours is not None and newest is not None and newest["id"] == ours
            known = SQLiteStorage.get_logs(spec.project, run_id=ours) if goes_on else []
            self.sent = {(_kind(row), row["step"]) for row in known}
            self.run = trackio.init(
                project=spec.project,
                name=name,
                group=group_of(config),
                config=config,
                resume="must" if goes_on else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
            keep_id(run_dir, spec.name, self.run.id)
        except Exception as error:  # a mirror may break in any way; the run goes on
            log.warning("logger=trackio cannot start and is off; metrics.jsonl has everything: %s", error)
        for record in records:
            self.log(record["kind"], record["step"], metrics_in(record))

    def log(self, kind: str, step: int, metrics: dict[str, float]) -> None:
        if self.run is None or (kind, step) in self.sent:
            return
        try:
            self.run.log(metrics, step=step)
        except Exception as error:  # as above
            log.warning("logger=trackio failed at step %d and is off from here on: %s", step, error)
            self.run = None

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if self.run is None:
            return
        try:
            self.run.finish()
        except Exception as failure:  # as above
            log.warning("logger=trackio failed at its end: %s", failure)


def _kind(row: dict[str, Any]) -> str:
    return next((kind for kind in ("eval", "validation") if any(key.startswith(f"{kind}/") for key in row)), "train")
