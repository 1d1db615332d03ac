"""logger=trackio: a mirror of metrics.jsonl in Trackio's database on this machine. Needs no account, no network.

TRACKIO_DIR, TRACKIO_SPACE_ID and TRACKIO_SERVER_URL choose the place, as Trackio reads them.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerl_bench.logger.base import NAMES, MetricsMirror, ServiceMirror, group_of, keep_id
from qerl_core.checks import check_fields, one_of, optional, require_package, text


@dataclass(frozen=True, kw_only=True)
class Trackio:
    """Mirror a run under its own name, grouped with its other seeds."""

    name: str
    project: str
    names: str | None

    def __post_init__(self) -> None:
        check_fields(self, "logger", project=text, names=optional(one_of(*NAMES)))

    def check(self) -> None:
        require_package("trackio", "logger=trackio", "trackio")

    def mirror(self, run_dir: Path, records: list[dict[str, Any]], config: dict[str, Any]) -> MetricsMirror:
        return TrackioMirror(self, run_dir, records, config)


class TrackioMirror(ServiceMirror):
    """A Trackio run with the records of ours, under its whole name. Trackio continues the newest run of a name: if that
    is not ours, another one is begun."""

    def begin(self, spec: Trackio, run_dir: Path, known: str | None, config: dict[str, Any]) -> Any:
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        name = str(config["name"])
        newest = SQLiteStorage.get_latest_run_record_by_name(spec.project, name)
        goes_on = known is not None and newest is not None and newest["id"] == known
        there = SQLiteStorage.get_logs(spec.project, run_id=known) if goes_on else []
        self.sent = {(_kind(row), row["step"]) for row in there}
        run = trackio.init(
            project=spec.project,
            name=name,
            group=group_of(config),
            config=config,
            resume="must" if goes_on else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        keep_id(run_dir, spec.name, run.id)
        return run

    def send(self, run: Any, kind: str, step: int, metrics: dict[str, float]) -> None:
        if (kind, step) not in self.sent:
            run.log(metrics, step=step)


def _kind(row: dict[str, Any]) -> str:
    begins = {kind: (f"{kind}/", f"qerl_{kind}_") for kind in ("eval", "validation")}  # the second with names=trl
    return next((kind for kind, starts in begins.items() if any(key.startswith(starts) for key in row)), "train")
