"""Find out whether a study could show anything: the gates that its bases and first runs must pass.

    qerl-bench gates studies/worlds-2026/study.yaml [bases=0,1 slots=2 minutes=5 words=...]
    qerl-bench gates studies/worlds-2026/study.yaml runs=FOLDER[,FOLDER out=DIR]

Bases that were not measured yet are pretrained and measured now, without training any arm: their answers in each weight
format, and the noise that gives each its dose. Gates about training are read from the runs of the study and open until
an arm is finished on every base, or from the sessions of it that were packed into `runs`. Prints the table and writes
gates.json, gates.md and, of probes with details, probes.md and its figures to `out`; the exit code is 1 if a gate
fails, or a probe.
"""

from __future__ import annotations

import sys
from pathlib import Path

from qerl_bench.conduct.archive import archive_probes
from qerl_bench.conduct.probe_queue import probe_bases
from qerl_bench.conduct.runner import check_options, gates_so_far, parse_options, parser_of
from qerl_core.checks import TrainingStopped, require
from qerl_core.process.mps import side_by_side
from qerl_core.process.terminal import log_to_stderr
from qerl_studies.design.gates import blocked, gates, override, render, to_json
from qerl_studies.design.looks import seen_runs
from qerl_studies.design.sessions import read_sessions
from qerl_studies.figures.style import save
from qerl_studies.report import probe_page


def main(arguments: list[str] | None = None) -> None:
    log_to_stderr()
    parser = parser_of(__doc__)
    told = "packed sessions of the study to read (default: the runs below root)"
    parser.add_argument("--runs", type=Path, nargs="+", action="extend", default=[], help=told)
    options = parse_options(parser, arguments)
    design, slots, deadline = check_options(options)
    out = options.out or (options.runs[0] if options.runs else design.root / "study")
    failed: list[str] = []
    require(options.out is not None or len(options.runs) < 2, "several runs= have no folder in common: give out=DIR")
    if options.runs:
        study = read_sessions(design, options.runs)
        probes = [*study.probes.values()]
        results = gates(design, probes, seen_runs(study))
    else:
        with side_by_side(options.mps):
            probes, failed = probe_bases(design, options.words, slots, deadline, out)
        archive_probes(design, probes, out)
        results = gates_so_far(design, probes)
    results = override(results, options.despite)
    blocked_arms = blocked(results)
    out.mkdir(parents=True, exist_ok=True)
    (out / "gates.json").write_text(to_json(results, blocked_arms))
    (out / "gates.md").write_text(render(results) + "\n")
    if page := probe_page.markdown(probes):
        (out / "probes.md").write_text(page)
        for name, draw in probe_page.figures(probes).items():
            save(draw(), out / name)
        print(page)
    print(render(results))
    for arm, by in blocked_arms.items():
        print(f"{arm} is stopped by: {', '.join(by)}")
    if failed:
        raise TrainingStopped("\n".join(failed))
    sys.exit(1 if blocked_arms else 0)
