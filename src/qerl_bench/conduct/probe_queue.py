"""Measures the bases of a study that were not measured yet, several at a time (probe_process.py), until a deadline."""

from __future__ import annotations

import json
import logging
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from qerl_bench.conduct.archive import archive_probes
from qerl_bench.conduct.deadline import STOP_S, Deadline
from qerl_bench.conduct.dose_key import dose_digest
from qerl_bench.config import build, compose
from qerl_bench.sweep.processes import POLL_S, environment_of
from qerl_core.checks import require
from qerl_core.process.cards import require_gpu, visible_gpus
from qerl_core.process.children import Child, signal_of, stop
from qerl_studies.design.design import Arm, Design

log = logging.getLogger(__name__)
STEP = re.compile(r"step \d+/\d+")  # how a run reports its progress


def probe_bases(
    design: Design,
    words: Sequence[str],
    slots: int,
    deadline: Deadline,
    out: Path | None = None,
) -> tuple[list[dict[str, Any]], list[str]]:
    """The probes of all bases of the design, and what became of those that failed, in a line each.

    Those that are missing or incomplete are made, `slots` at a time, and all are packed into `out` after each; formats
    that only the probe has and that cannot run here are left to another machine. Bases that could not be probed in time
    are left out with a warning. Raises ConfigError if an arm cannot run here, the GPU is not there, or a model cannot
    be read.
    """
    formats = _formats_here(design)
    _refuse_doses_of_others(design)
    gpus = visible_gpus()
    failed: dict[int, str] = {}
    ended: set[int] = set()
    todo = deque(base for base in design.bases if not probed(design, base, formats))
    if todo:
        require_gpu(design.option(design.reference, "device"))
    _check_models(design)
    running: dict[int, tuple[int, Child]] = {}
    try:
        while (todo and deadline.left > 0) or running:
            for slot in range(slots):
                if slot in running and running[slot][1].poll() is not None:
                    base, child = running.pop(slot)
                    code = child.poll()
                    log.info("probe of base %d ended with code %d", base, code)
                    if code != 0:
                        failed[base] = f"probe of base {base}: exit code {code}; {_probe_log(design, base)} says why"
                    else:
                        ended.add(base)
                        if out is not None:
                            archive_probes(design, records(design), out)
                if slot not in running and todo and deadline.left > 0:
                    environment = environment_of(slot, slots, gpus, len(todo) + len(running))
                    base = todo.popleft()
                    child = start_probe(design, words, base, formats, environment)
                    running[slot] = base, child
            if deadline.left <= 0:
                stop([child for _, child in running.values()], signal.SIGTERM, STOP_S)
                running.clear()
            time.sleep(POLL_S)
    except BaseException as error:
        stop([child for _, child in running.values()], signal_of(error))
        raise
    for base in design.bases:
        if base not in failed and not probed(design, base, formats):
            if base in ended:
                failed[base] = f"probe of base {base}: it ended, and {design.probe_file(base)} lacks some of it"
            else:
                log.warning("no time for the probe of base %d: %s", base, _last_step(_probe_log(design, base)))
    _refuse_doses_of_others(design)  # written meanwhile
    return records(design), [failed[base] for base in sorted(failed)]


def records(design: Design) -> list[dict[str, Any]]:
    """The probes of all bases that were measured in the formats of all arms."""
    measured = [base for base in design.bases if probed(design, base, design.formats_of_arms)]
    return [json.loads(design.probe_file(base).read_text()) for base in measured]


def _check_models(design: Design) -> None:
    """Raise ConfigError unless the models and questions that a study loads can be read, before any is loaded."""
    loaded: set[str] = set()
    for base in design.bases:
        tree = design.tree_of(design.reference, base)
        if "id" in tree["model"] and tree["model"]["id"] not in loaded:
            loaded.add(tree["model"]["id"])
            experiment = build(OmegaConf.create(tree))
            experiment.task.check()
            experiment.check_model()


def _formats_here(design: Design) -> list[str]:
    """The formats of the design that can run on this machine, found before any base is pretrained.

    Raises ConfigError if an arm could not run.
    """
    device = "cuda" if visible_gpus() else "cpu"

    def lacking(arm: Arm) -> str | None:
        words = design.words(arm, design.bases[0], design.seeds[0], sigma=1.0 if arm.dosed else None)
        experiment = build(compose(words))
        experiment.check_calibration()
        return experiment.quant.unsupported_reason(device)

    for arm in design.arms:
        reason = lacking(arm) or lacking(design.plain(design.format_of(arm)))
        require(
            reason is None,
            f"arm {arm.name} of {design.path} cannot run here: {reason} (tiers= leaves it out, which is of {arm.tier})",
        )
    reasons = {quant: lacking(design.plain(quant)) for quant in design.formats}
    for quant, reason in reasons.items():
        if reason is not None:
            log.info("bases are not measured in %s: %s", quant, reason)
    return [quant for quant, reason in reasons.items() if reason is None]


def _refuse_doses_of_others(design: Design) -> None:
    """Raise ConfigError where another study with the same folder has a dose by the name of an arm of this one."""
    known = {
        file: json.loads(file.read_text())["doses"] for file in map(design.probe_file, design.bases) if file.is_file()
    }
    for arm in design.arms:
        found = [(file, doses[arm.name]) for file, doses in known.items() if arm.dosed and arm.name in doses]
        if not found:
            continue
        own = dose_digest(build(compose(design.words(arm, design.bases[0], design.seeds[0], sigma=1.0))))
        for file, dose in found:
            require(
                dose.get("of", own) == own,
                f"{file} has a dose of noise for arm {arm.name} that is of another study's arm, with other options: "
                "rename the arm, or start this study in another folder",
            )


def probed(design: Design, base: int, formats: Sequence[str]) -> bool:
    """Whether a base has been measured in these formats, and has a dose, or none, for each arm in them."""
    file = design.probe_file(base)
    if not file.is_file():
        return False
    record = json.loads(file.read_text())
    arms = {arm.name for arm in design.arms if arm.dosed and design.format_of(arm) in formats}
    return {*formats} <= record["formats"].keys() and arms <= record["doses"].keys()


def _probe_log(design: Design, base: int) -> Path:
    return design.probe_file(base).parent / f"probe-{base}.log"


def _last_step(output: Path) -> str:
    """The last line about a step of pretraining; being stopped is told after it."""
    lines = output.read_text(errors="replace").splitlines() if output.is_file() else []
    said = next((line.strip() for line in reversed(lines) if STEP.match(line)), None)
    return "not begun" if said is None else f"{said} ({output}; the same command goes on from there)"


def start_probe(
    design: Design, words: Sequence[str], base: int, formats: Sequence[str], environment: dict[str, str]
) -> Child:
    file = _probe_log(design, base)
    file.parent.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "qerl_bench.conduct.probe_process",
        str(design.path),
        str(base),
        ",".join(formats),
        ",".join(arm.name for arm in design.arms),
        *words,
    ]
    with open(file, "ab") as output:
        return Child(command, environment, stdout=output, stderr=subprocess.STDOUT)
