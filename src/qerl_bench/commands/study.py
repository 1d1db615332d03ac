"""Run a study within a time: bases and their probes, gates, then arms in order of priority.

    qerl-bench study studies/worlds-2026/study.yaml minutes=25 slots=24 mps=true out=results/
    qerl-bench study init=FOLDER model=... task=... contrast=aqn=none,exp ...   # writes a design

Every base is pretrained and probed first, `slots` processes at a time, each on a GPU if there are any; no run begins
before the last of them, because gates are about all bases. The gates then stop the arms that could
decide nothing; despite=GATE lets them run. Runs follow in blocks, all arms of a tier on one base, and no block begins
that would not end in time, so that an early end leaves a balanced study; tiers=1 leaves other tiers out, and their
formats and doses. What runs at the end of the time saves a checkpoint. The same command continues.
Code that is not committed is refused, or its changes are kept in `out` (with_changes=true). Finished runs of the whole
study and the gates are packed into `out`, which `qerl-bench claims` reads: every five minutes, for a machine that may
go, and when the runs end, which a signal may do. `qerl-bench study init=FOLDER --help` explains how a design is drafted
from a question.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

from qerl_bench.conduct.deadline import Deadline
from qerl_bench.conduct.draft import draft
from qerl_bench.conduct.probe_queue import probe_bases
from qerl_bench.conduct.provenance import account_for_changes
from qerl_bench.conduct.runner import Blocks, archive, blocks_of, check_options, gates_so_far, parse_options, parser_of
from qerl_bench.sweep.loaded_parent import forks_runs
from qerl_core.checks import TrainingStopped, require
from qerl_core.process.cards import visible_gpus
from qerl_core.process.mps import side_by_side
from qerl_core.process.terminal import log_to_stderr
from qerl_core.rundir.checkpoints import is_finished
from qerl_studies.design.design import Design
from qerl_studies.design.gates import Result, blocked, override, render

log = logging.getLogger(__name__)
ASKING = ("headroom", "longest", "gain", "above_half_time")  # gates that read answers after training


def main(arguments: list[str] | None = None) -> None:
    log_to_stderr("hydra_plugins")
    words = sys.argv[1:] if arguments is None else arguments
    if any(word.startswith(("init=", "--init")) for word in words):
        draft(words)
        return
    parser = parser_of(__doc__)
    parser.add_argument("--tiers", type=int, nargs="+", default=None, help="run only arms of these, such as tiers=1")
    kept = "run code that is not committed, and keep its changes in out"
    parser.add_argument("--with-changes", action="store_true", help=kept)
    forks = "fork runs from one process that imports once (default: on Linux without a GPU)"
    parser.add_argument("--preload", choices=("true", "false"), default=None, help=forks)
    options = parse_options(parser, arguments)
    design, slots, deadline = check_options(options)
    tiers = sorted({arm.tier for arm in design.arms})
    chosen = tiers if options.tiers is None else options.tiers
    require({*chosen} <= {*tiers}, f"{options.study} has the tiers {tiers}, got tiers={chosen}")
    out = options.out or design.root / "study"
    account_for_changes(design.path, out, options.with_changes)
    with side_by_side(options.mps):
        conduct(design, options, slots, deadline, chosen, out)


def conduct(design: Design, options: Any, slots: int, deadline: Deadline, tiers: Collection[int], out: Path) -> None:
    """Probe the bases, ask the gates, and run the arms of these tiers.

    Raises TrainingStopped if a process failed, or if gates stop every arm.
    """
    gpus = visible_gpus()
    preload = forks_runs({"true": True, "false": False}.get(options.preload), gpus)
    require_answers(design)
    chosen = replace(design, arms=tuple(arm for arm in design.arms if arm.tier in tiers or arm is design.reference))
    log.info(spent_first(chosen, options.minutes, slots))
    probes, failed = probe_bases(chosen, options.words, slots, deadline, out)
    results = override(gates_so_far(design, probes), options.despite)
    blocked_arms = blocked(results)
    log.info("before the runs\n%s", render(results))
    for name, by in blocked_arms.items():
        log.info("arm %s is stopped by: %s", name, ", ".join(by))
    if blocked_arms:
        gates = dict.fromkeys(gate.partition(",")[0] for by in blocked_arms.values() for gate in by)
        log.info("to let them run all the same, which the pages will say: despite=%s", quote(",".join(gates)))
    not_chosen = {arm.name for arm in design.arms if arm.tier not in tiers}
    blocks = blocks_of(design, probes, {*blocked_arms} | not_chosen)

    def packed() -> list[Result]:
        results = override(gates_so_far(design, probes), options.despite)
        archive(design, probes, results, blocked(results), out)
        return results

    def keep() -> None:
        try:
            packed()
        except (OSError, ValueError) as error:  # the runs are worth more than a copy of them
            log.warning("finished runs could not be packed into %s: %s", out, error)

    try:
        failed += [
            f"{point.run_dir}: {reason}"
            for point, reason in Blocks(blocks, slots, gpus, deadline, keep, preload=preload).run()
        ]
    except BaseException:  # a signal too: what is packed may be all that is left of this machine
        keep()
        raise
    print(render(packed()), flush=True)
    points = [point for block in blocks for point in block]
    left = sum(not is_finished(point.run_dir) for point in points)
    unprobed = sorted({*design.bases} - {one["base"] for one in probes})
    others = f", and those of the bases {unprobed}, which have no probe yet" if unprobed else ""
    continues = ": the same command continues" if left or unprobed else ""
    if not probes and not failed:
        failed.append("no base was probed in the time: give more with minutes=N")
    elif blocked_arms and not points:
        every = [point for block in blocks_of(design, probes, not_chosen) for point in block]
        if every and not unprobed and all(is_finished(point.run_dir) for point in every):  # which gates judge now
            log.info("0 of %d runs are left to do", len(every))
        else:
            failed.append("no arm may run: gates stop all of them")
    else:
        log.info("%d of %d runs are left to do%s%s", left, len(points), others, continues)
    if failed:
        raise TrainingStopped("\n".join(failed))


def require_answers(design: Design) -> None:
    """Raise ConfigError if a gate about training, or a control, asks for held-out answers that no run will give."""
    tree, limits = design.tree(design.reference), design.limits
    asked = [f"gates.{gate}" for gate in ASKING if getattr(limits, gate) is not None]
    asked += [f"the control {arm.name}" for arm in design.arms if arm.shows]
    require(
        not asked or tree["eval"]["name"] != "none",
        f"{design.path} asks for held-out answers by {', '.join(asked)}, and its runs have eval=none: choose "
        "eval=task, or leave these out",
    )
    half = tree["steps"] // 2
    require(
        limits.above_half_time is None or half in (0, *tree["eval"].get("at", ())),
        f"{design.path} has gates.above_half_time, and its runs are not evaluated at half time: add eval.at=[{half}]",
    )


def spent_first(design: Design, minutes: float, slots: int) -> str:
    """What the time is spent on, in order, before any of it is."""
    bases, arms, runs = len(design.bases), len(design.arms), len(design.bases) * len(design.arms) * len(design.seeds)
    asked = f"{design.probe.questions} questions x {design.probe.samples} answers in each weight format"
    limited = math.isfinite(minutes)
    limit = f"{minutes:g} minutes" if limited else "no limit of time"
    doses = ", and doses" if any(arm.dosed for arm in design.arms) else ""
    ending = ", as many blocks as end in time" if limited else ""
    return (
        f"{limit}, {slots} at a time: first {bases} probes, {asked}{doses}; then {runs} runs in blocks of {arms} arms"
        f"{ending}. What a run takes: qerl-bench estimate, or the first block"
    )
