"""Find out whether a study could show anything: the gates that its bases and first runs must pass.

    qerl-bench gates docs/studies/worlds-2026/study.yaml [bases=0,1 slots=2 minutes=5 words=...]
    qerl-bench gates docs/studies/worlds-2026/study.yaml runs=FOLDER[,FOLDER out=DIR]

Bases that were not measured yet are pretrained and measured now, without training any arm: their answers in each weight
format, and the noise that gives each its dose. Gates about training are read from the finished runs of the study, or
from the sessions of it that were packed into `runs`, and are open without them. Prints the table and writes gates.json
and gates.md to `out`; the exit code is 1 if a gate fails, or a probe.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qerl_bench.checks import TrainingStopped, require
from qerl_bench.gates.assay import Runs, gates, render, stopped, to_json
from qerl_bench.gates.design import Design
from qerl_bench.gates.runner import finished_runs, parsed, parser_of, prepared, probe
from qerl_bench.study.load import Run


def packed(design: Design, folders: Sequence[Path]) -> tuple[list[dict[str, Any]], Runs]:
    """The probes and runs of several sessions. A base belongs to the session that trained it, or else to the last one.

    Each session pretrains its bases, so that those of the same number differ. Raises ConfigError if two trained one.
    """
    probes: dict[int, dict[str, Any]] = {}
    runs: dict[tuple[str, int, int], Run] = {}
    for folder in folders:
        file = folder / "probes.json"
        require(file.is_file(), f"there is no {file}: runs= takes folders that qerl-bench study has written")
        here = [one for one in json.loads(file.read_text()) if one["base"] in design.bases]
        found = finished_runs(design, here, folder)
        trained = {base for _, base, _ in runs}
        twice = sorted(trained & {base for _, base, _ in found})
        require(not twice, f"{folder} has runs of the bases {twice}, and so has a folder before it: leave one out")
        probes |= {one["base"]: one for one in here if one["base"] not in trained}
        runs |= found
    return [probes[base] for base in sorted(probes)], runs


def main(arguments: list[str] | None = None) -> None:
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.WARNING)
    logging.getLogger("qerl_bench").setLevel(logging.INFO)
    parser = parser_of(__doc__)
    told = "packed sessions of the study to read (default: the runs below root)"
    parser.add_argument("--runs", type=Path, nargs="+", action="extend", default=[], help=told)
    options = parsed(parser, arguments)
    design, slots, deadline = prepared(options)
    failed: list[str] = []
    require(options.out is not None or len(options.runs) < 2, "several runs= have no folder in common: give out=DIR")
    if options.runs:
        probes, runs = packed(design, options.runs)
    else:
        probes, failed = probe(design, options.words, slots, deadline)
        runs = finished_runs(design, probes)
    results = gates(design, probes, runs)
    arms_stopped = stopped(results, options.despite)
    out = options.out or (options.runs[0] if options.runs else design.root / "study")
    out.mkdir(parents=True, exist_ok=True)
    (out / "gates.json").write_text(to_json(results, arms_stopped))
    (out / "gates.md").write_text(render(results) + "\n")
    print(render(results))
    for arm, by in arms_stopped.items():
        print(f"{arm} is stopped by: {', '.join(by)}")
    if failed:
        raise TrainingStopped("\n".join(failed))
    sys.exit(1 if arms_stopped else 0)
