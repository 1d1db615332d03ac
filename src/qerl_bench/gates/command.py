"""Find out whether a study could show anything: the gates that its bases and first runs must pass.

    qerl-bench gates docs/studies/worlds-2026/study.yaml [bases=0,1 slots=2 minutes=5 words=...]
    qerl-bench gates docs/studies/worlds-2026/study.yaml runs=FOLDER

Bases that were not measured yet are pretrained and measured now, without training any arm: their answers in each weight
format, and the noise that gives each its dose. Gates about training are read from the finished runs of the study, or
from the study that was packed into `runs`, and are open without them. Prints the table and writes gates.json and
gates.md to `out`; the exit code is 1 if a gate fails, or a probe.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from qerl_bench.checks import TrainingStopped
from qerl_bench.gates.assay import gates, render, stopped, to_json
from qerl_bench.gates.runner import finished_runs, parsed, parser_of, prepared, probe


def main(arguments: list[str] | None = None) -> None:
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.WARNING)
    logging.getLogger("qerl_bench").setLevel(logging.INFO)
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=Path, default=None, help="a packed study to read (default: the runs below root)")
    options = parsed(parser, arguments)
    design, slots, deadline = prepared(options)
    failed: list[str] = []
    if options.runs is not None and (options.runs / "probes.json").is_file():
        probes = json.loads((options.runs / "probes.json").read_text())
        probes = [one for one in probes if one["base"] in design.bases]
    else:
        probes, failed = probe(design, options.words, slots, deadline)
    results = gates(design, probes, finished_runs(design, probes, options.runs))
    arms_stopped = stopped(results, options.despite)
    out = options.out or options.runs or design.root / "study"
    out.mkdir(parents=True, exist_ok=True)
    (out / "gates.json").write_text(to_json(results, arms_stopped))
    (out / "gates.md").write_text(render(results) + "\n")
    print(render(results))
    for arm, by in arms_stopped.items():
        print(f"{arm} is stopped by: {', '.join(by)}")
    if failed:
        raise TrainingStopped("\n".join(failed))
    sys.exit(1 if arms_stopped else 0)
