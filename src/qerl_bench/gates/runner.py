"""Run a study within a time: bases and their probes, gates, then arms in order of priority.

    qerl-bench study studies/worlds-2026/study.yaml minutes=25 slots=24 out=results/

Every base is pretrained and probed first (gates/probe.py), `slots` processes at a time, each on a GPU if there are
any; no run begins before the last of them, because gates are about all bases. The gates then stop the arms that could
decide nothing; despite=GATE lets them run. Runs follow in blocks, all arms of a tier on one base, and no block begins
that would not end in time, so that an early end leaves a balanced study; tiers=1 leaves other tiers out, and does
without formats that only they need. What runs at the end of the time saves a checkpoint. The same command continues.
Code that is not committed is refused, or its changes are kept in `out` (with_changes=true). Finished runs of the whole
study and the gates are packed into `out`, which `qerl-bench claims` reads: every five minutes, for a machine that may
go, and when the runs end, which a signal may do.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from hydra_plugins.process_launcher.launcher import Sweep, visible_gpus
from qerl_bench.arguments import KeyValueParser
from qerl_bench.checkpoints import is_finished
from qerl_bench.checks import TrainingStopped, require
from qerl_bench.children import stop
from qerl_bench.cli import Point, check_points
from qerl_bench.gates.accountable import account_for_changes
from qerl_bench.gates.assay import Result, gates, override, render, stopped, to_json
from qerl_bench.gates.deadline import GRACE_S, PACKING_S, STOP_S, Deadline
from qerl_bench.gates.design import Design, read_design
from qerl_bench.gates.probing import probe_bases
from qerl_bench.own_options import split_search_path
from qerl_bench.study.collect import write_study
from qerl_bench.study.load import Run, find_runs, load_run
from qerl_bench.sweep_table import run_left, share_to_make, time_left
from qerl_bench.terminal import log_to_stderr

log = logging.getLogger(__name__)
SPARE = 1.1  # runs differ: a block begins if it would end in time taking a tenth longer than foreseen
PACK_EVERY_S = 300.0


class Blocks(Sweep):
    """Runs whole blocks of points, one after the other, until the time is up.

    The launcher's sweep asks for a point whenever a slot is free. The last block that began is finished, if the time
    for it was estimated well; points that are not nearly done when the time is up are stopped with a checkpoint.
    """

    def __init__(
        self,
        blocks: Sequence[Sequence[Point]],
        slots: int,
        gpus: list[str],
        deadline: Deadline,
        keep: Callable[[], None] = lambda: None,
    ) -> None:
        points = [point for block in blocks for point in block]
        super().__init__([point for point in points if point.finished], slots, gpus)
        self.total = len(points)
        self.blocks = deque(block for block in blocks if block)
        self.deadline = deadline
        self.keep, self.kept, self.kept_at = keep, self.done, time.monotonic()
        self.took = [seconds_of(point) for point in points if point.finished]
        self.open_blocks()

    def open_blocks(self) -> None:
        """Make the points of the next block the next to do, if none are left and there is time for it."""
        while not self.todo and self.blocks and self.fits(self.blocks[0]):
            self.todo.extend(point for point in self.blocks.popleft() if not point.finished)

    def to_start(self) -> list[float]:
        return [*super().to_start(), *(share for block in self.blocks for share in shares_to_make(block))]

    def fits(self, block: Sequence[Point]) -> bool:
        """Whether `block` would end in time. True as long as nothing is known of the time of a run."""
        todo = shares_to_make(block)
        if not todo or self.deadline.left <= 0:
            return not todo
        latest = self.took[-max(self.slots, len(block)) :]  # as fast as runs are side by side now
        needed = time_left(self.paces(), latest, todo, self.slots)
        return needed is None or SPARE * needed <= self.deadline.left

    def collect(self) -> None:
        super().collect()
        if self.deadline.left <= 0:
            self.todo.clear()
            self.elsewhere.clear()
            self.stop_late()
        elif self.is_time_to_keep():
            self.keep()
            self.kept, self.kept_at = self.done, time.monotonic()
        self.open_blocks()

    def is_time_to_keep(self) -> bool:
        """Whether there are new runs, a while has passed, and packing them makes nothing late."""
        due = time.monotonic() - self.kept_at >= PACK_EVERY_S
        return due and self.done > self.kept and self.deadline.left > PACKING_S

    def repeats(self) -> bool:
        return self.deadline.left > 0 and super().repeats()

    def stop_late(self) -> None:
        """Stop the runs that would not have made their steps GRACE_S after the time is up."""
        left = {slot: run_left(one.point.run_dir) for slot, one in self.running.items()}
        late = [slot for slot, seconds in left.items() if seconds is None or seconds >= GRACE_S + self.deadline.left]
        if late:
            log.info("the time is up: %d runs are stopped and can be continued", len(late))
            limit = max(STOP_S - GRACE_S, STOP_S + self.deadline.left)
            stop([self.running.pop(slot).child for slot in late], signal.SIGTERM, limit)


def shares_to_make(block: Sequence[Point]) -> list[float]:
    return [share_to_make(point.run_dir) for point in block if not point.finished]


def seconds_of(point: Point) -> float:
    """How long a finished run took."""
    return json.loads((point.run_dir / "done.json").read_text())["wall_s"]


def words_of_runs(design: Design, probes: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int, int], list[str]]:
    """The words of each run whose base was probed, by arm, base and seed; without a dose there is no run."""
    found: dict[tuple[str, int, int], list[str]] = {}
    for arm in design.arms:
        for record in probes:
            sigma = record["doses"].get(arm.name, {}).get("sigma")
            if not arm.dosed or sigma is not None:
                for seed in design.seeds:
                    found[arm.name, record["base"], seed] = design.words(arm, record["base"], seed, sigma)
    return found


def finished_runs(
    design: Design, probes: Sequence[Mapping[str, Any]], folder: Path | None = None
) -> dict[tuple[str, int, int], Run]:
    """The finished runs of the study below root, or those that the committed study `folder` holds."""
    found: dict[tuple[str, int, int], Run] = {}
    kept = {path.name for path in find_runs(folder)} if folder is not None else set()
    for key, words in words_of_runs(design, probes).items():
        point = design.point(words)
        if folder is None and point.finished:
            found[key] = load_run(point.run_dir)
        elif folder is not None and point.name in kept:
            found[key] = load_run(folder / point.name)
    return found


def gates_so_far(design: Design, probes: Sequence[Mapping[str, Any]]) -> list[Result]:
    """The gates of the study below root; those about training are open until an arm is finished on every base.

    A few bases, which is what a study has when it is continued, would pass or fail them by luck.
    """
    runs = finished_runs(design, probes)
    unfinished = {key[0] for key in words_of_runs(design, probes) if key not in runs}
    return gates(design, probes, {key: run for key, run in runs.items() if key[0] not in unfinished})


def blocks_of(design: Design, probes: Sequence[Mapping[str, Any]], left_out: Collection[str]) -> list[list[Point]]:
    """The points of each block: tier by tier, within it base by base, all seeds and all arms but those `left_out`.

    Raises ConfigError if an arm cannot run; its runs differ in nothing that a check could refuse, so one is checked.
    """
    words = words_of_runs(design, probes)
    firsts = {key[0]: point for key, point in reversed(words.items()) if key[0] not in left_out}
    check_points([*firsts.values()])
    blocks = []
    for tier in sorted({arm.tier for arm in design.arms}):
        arms = [arm for arm in design.arms if arm.tier == tier and arm.name not in left_out]
        for record in probes:
            keys = [(arm.name, record["base"], seed) for seed in design.seeds for arm in arms]
            blocks.append([design.point(words[key]) for key in keys if key in words])
    return blocks


def pack(
    design: Design,
    probes: Sequence[Mapping[str, Any]],
    results: Sequence[Result],
    arms_stopped: Mapping[str, list[str]],
    out: Path,
) -> None:
    """Write the finished runs of the study, its probes, gates and design to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    as_run = yaml.safe_load(design.path.read_text()) | {"common": design.common}
    texts = {
        "study.yaml": yaml.safe_dump(as_run, sort_keys=False),
        "probes.json": json.dumps(probes),
        "gates.json": to_json(results, arms_stopped),
        "gates.md": render(results) + "\n",
    }
    for name, text in texts.items():
        writing = out / f".{name}.writing"
        writing.write_text(text)
        writing.replace(out / name)
    paths = [run.path for run in finished_runs(design, probes).values()]
    if paths:
        runs, _, rows, _ = write_study(paths, out, mixed_code=True, metrics=("study",))
        log.info("%d runs, %d numbers: %s", runs, rows, out)


def parser_of(description: str | None) -> KeyValueParser:
    parser = KeyValueParser(description)
    parser.add_argument("study", type=Path, help="the YAML file of the study (gates/design.py)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="when to end (default: when all is done)")
    parser.add_argument("--slots", type=int, default=None, help="processes at a time (default: one per GPU, or one)")
    parser.add_argument("--bases", type=int, nargs="+", default=None, help="only these bases, such as bases=0,1,2,3")
    parser.add_argument("--words", nargs="+", default=[], help="in place of common words of the same keys")
    parser.add_argument("--despite", nargs="+", default=[], help="beginnings of the names of gates that stop nothing")
    parser.add_argument("--out", type=Path, default=None, help="folder for the packed results (default: ROOT/study)")
    return parser


def parsed(parser: KeyValueParser, words: Sequence[str] | None) -> Any:
    """The options of a command line; the folders of --config-dir are among its `words`, which runs and probes get."""
    search_path, others = split_search_path(sys.argv[1:] if words is None else words)
    options = parser.parse_args(others)
    options.words = [*options.words, *search_path]
    return options


def prepared(options: Any) -> tuple[Design, int, Deadline]:
    """What the options of a command line ask for. Raises ConfigError for values that cannot be."""
    kept = (STOP_S + PACKING_S) / 60
    require(
        options.minutes > kept,
        f"minutes must be above {kept:g}, which are kept for stopping and packing, got {options.minutes:g}",
    )
    require(options.slots is None or options.slots > 0, f"slots must be above 0, got {options.slots}")
    design = read_design(options.study, options.words)
    if options.bases is not None:
        unknown = sorted({*options.bases} - {*design.bases})
        require(not unknown, f"{options.study} has no bases {unknown}: it has {design.bases[0]} to {design.bases[-1]}")
        design = replace(design, bases=tuple(options.bases))
    return design, options.slots or max(1, len(visible_gpus())), Deadline(options.minutes)


def main(arguments: list[str] | None = None) -> None:
    log_to_stderr("qerl_bench", "hydra_plugins")
    parser = parser_of(__doc__)
    parser.add_argument("--tiers", type=int, nargs="+", default=None, help="run only arms of these, such as tiers=1")
    kept = "run code that is not committed, and keep its changes in out"
    parser.add_argument("--with-changes", action="store_true", help=kept)
    options = parsed(parser, arguments)
    design, slots, deadline = prepared(options)
    tiers = sorted({arm.tier for arm in design.arms})
    chosen = tiers if options.tiers is None else options.tiers
    require({*chosen} <= {*tiers}, f"{options.study} has the tiers {tiers}, got tiers={chosen}")
    out = options.out or design.root / "study"
    account_for_changes(design.path, out, options.with_changes)
    arms = [arm for arm in design.arms if arm.tier in chosen or arm is design.reference]
    probes, failed = probe_bases(design, options.words, slots, deadline, arms)
    results = override(gates_so_far(design, probes), options.despite)
    arms_stopped = stopped(results)
    log.info("before the runs\n%s", render(results))
    for name, by in arms_stopped.items():
        log.info("arm %s is stopped by: %s", name, ", ".join(by))
    not_chosen = {arm.name for arm in design.arms if arm.tier not in chosen}
    blocks = blocks_of(design, probes, {*arms_stopped} | not_chosen)

    def packed() -> list[Result]:
        results = override(gates_so_far(design, probes), options.despite)
        pack(design, probes, results, stopped(results), out)
        return results

    def keep() -> None:
        try:
            packed()
        except (OSError, ValueError) as error:  # the runs are worth more than a copy of them
            log.warning("finished runs could not be packed into %s: %s", out, error)

    try:
        failed += [
            f"{point.run_dir}: {reason}"
            for point, reason in Blocks(blocks, slots, visible_gpus(), deadline, keep).run()
        ]
    except BaseException:  # a signal too: what is packed may be all that is left of this machine
        keep()
        raise
    print(render(packed()), flush=True)
    left = sum(not is_finished(point.run_dir) for block in blocks for point in block)
    log.info(
        "%d of %d runs are left to do%s", left, sum(map(len, blocks)), ": the same command continues" if left else ""
    )
    if failed:
        raise TrainingStopped("\n".join(failed))
