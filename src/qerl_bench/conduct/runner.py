"""What `qerl-bench study` runs within its time, and packs: blocks of points, all arms of a tier on one base.

No block begins that would not end in time, so that an early end leaves a balanced study. What runs at the end of the
time saves a checkpoint.
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

from qerl_bench.conduct.archive import archive_probes
from qerl_bench.conduct.deadline import ARCHIVING_S, GRACE_S, STOP_S, Deadline
from qerl_bench.sweep.check import check_points
from qerl_bench.sweep.processes import Sweep
from qerl_core.checks import require
from qerl_core.options.user_options import split_search_path
from qerl_core.process.arguments import KeyValueParser, output_folder
from qerl_core.process.cards import visible_gpus
from qerl_core.process.children import stop
from qerl_core.rundir.durable import write_atomically
from qerl_core.sweeps.pace import run_left, share_to_make, time_left
from qerl_core.sweeps.points import Point
from qerl_studies.design.design import Design, read_design
from qerl_studies.design.gates import Result, gates, render, to_json
from qerl_studies.design.looks import seen_runs
from qerl_studies.design.sessions import Sessions, finished_runs, words_of_runs
from qerl_studies.runs.collect import write_study

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
        keep_every_s: float = PACK_EVERY_S,
        preload: bool = False,
    ) -> None:
        points = [point for block in blocks for point in block]
        super().__init__(points, slots, gpus, preload)
        self.todo.clear()  # until their block begins
        self.blocks = deque(block for block in blocks if block)
        self.deadline = deadline
        self.keep, self.kept, self.kept_at = keep, self.done, time.monotonic()
        self.keep_every_s = keep_every_s
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
        due = time.monotonic() - self.kept_at >= self.keep_every_s
        return due and self.done > self.kept and self.deadline.left > ARCHIVING_S

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


def gates_so_far(design: Design, probes: Sequence[Mapping[str, Any]]) -> list[Result]:
    """The gates of the study below root; those about training are open until an arm is finished on every base.

    A few bases, which is what a study has when it is continued, would pass or fail them by luck. Of a study with
    primary contrasts they are open until its first look, too.
    """
    finished = finished_runs(design, probes)
    runs = seen_runs(Sessions(design, {one["base"]: dict(one) for one in probes}, finished))
    unfinished = {key[0] for key in words_of_runs(design, probes) if key not in finished}
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
            for arm in dict.fromkeys(key[0] for key in keys if key not in words):
                log.warning("arm %s does not run on base %s: no size of noise gave it its dose", arm, record["base"])
            blocks.append([design.point(words[key]) for key in keys if key in words])
    return blocks


def archive(
    design: Design,
    probes: Sequence[Mapping[str, Any]],
    results: Sequence[Result],
    blocked_arms: Mapping[str, list[str]],
    out: Path,
) -> None:
    """Write the finished runs of the study, its probes, gates and design to `out`."""
    archive_probes(design, probes, out)
    write_atomically(out / "gates.json", to_json(results, blocked_arms))
    write_atomically(out / "gates.md", render(results) + "\n")
    paths = [run.path for run in finished_runs(design, probes).values()]
    if paths:
        runs, _, rows, _ = write_study(paths, out, mixed_code=True, metrics=("study",))
        log.info("%d runs, %d numbers: %s", runs, rows, out)


def parser_of(description: str | None) -> KeyValueParser:
    parser = KeyValueParser(description)
    parser.add_argument("study", type=Path, help="the YAML file of the study (qerl_studies/design/design.py)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="when to end (default: when all is done)")
    parser.add_argument("--slots", type=int, default=None, help="processes at a time (default: one per GPU, or one)")
    parser.add_argument("--mps", action="store_true", help="processes of one GPU side by side, by NVIDIA's MPS")
    parser.add_argument("--bases", type=int, nargs="+", default=None, help="only these bases, such as bases=0,1,2,3")
    parser.add_argument("--words", nargs="+", default=[], help="in place of common words of the same keys")
    parser.add_argument("--despite", nargs="+", default=[], help="beginnings of the names of gates that stop nothing")
    parser.add_argument(
        "--out", type=output_folder, default=None, help="folder for the packed results (default: ROOT/study)"
    )
    return parser


def parse_options(parser: KeyValueParser, words: Sequence[str] | None) -> Any:
    """The options of a command line; the folders of --config-dir are among its `words`, which runs and probes get."""
    search_path, others = split_search_path(sys.argv[1:] if words is None else words)
    options = parser.parse_args(others)
    options.words = [*options.words, *search_path]
    return options


def check_options(options: Any) -> tuple[Design, int, Deadline]:
    """What the options of a command line ask for. Raises ConfigError for values that cannot be."""
    kept = (STOP_S + ARCHIVING_S) / 60
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
    names = [one.gate for one in gates_so_far(design, [])]
    for word in options.despite:
        if not any(name.startswith(word) for name in names):
            log.warning("despite=%s: no gate of this study begins so; it has: %s", word, "; ".join(names))
    return design, options.slots or max(1, len(visible_gpus())), Deadline(options.minutes)
