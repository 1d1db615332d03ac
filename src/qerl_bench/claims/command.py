"""Report what finished runs say about each claim of the QeRL paper.

    qerl-bench claims runs/ out=figures/

Writes claims.md, claims.html (one file with its figures inside) and claims.svg, all claims in one picture.
"""

from __future__ import annotations

from qerl_bench.checks import require
from qerl_bench.claims.judge import judge
from qerl_bench.claims.match import facts_of
from qerl_bench.claims.paper import CLAIMS
from qerl_bench.claims.report import markdown, page, report, summary
from qerl_bench.figures.forest import all_claims, svg
from qerl_bench.study.load import Run, load_runs
from qerl_bench.study.script import parser_for


def main(arguments: list[str] | None = None) -> None:
    parser = parser_for(__doc__)
    only = "only runs with this value of a config key, where several settings fit a primary contrast: lora.alpha=32"
    parser.add_argument("--where", nargs="+", metavar="KEY=VALUE", default=[], help=only)
    options = parser.parse_args(arguments)

    runs = chosen(load_runs(options.runs, options.mixed_code), options.where)
    scopes: dict[str, list[Run]] = {}
    for run in runs:
        scopes.setdefault(f"{run.option('model.name')} on {run.option('task.name')}", []).append(run)
    judged = {scope: judge(CLAIMS, group) for scope, group in sorted(scopes.items())}
    blocks = report(judged, runs)
    options.out.mkdir(parents=True, exist_ok=True)
    files = {"claims.md": markdown(blocks), "claims.html": page(blocks)}
    for place, (scope, judgements) in enumerate(judged.items(), start=1):
        files[f"claims{'' if len(judged) == 1 else f'_{place}'}.svg"] = svg(all_claims(judgements, scope))
        print(scope, markdown([summary(judgements)]), sep="\n")
    for name, text in files.items():
        (options.out / name).write_text(text)
        print(options.out / name)


def chosen(runs: list[Run], conditions: list[str]) -> list[Run]:
    """The runs that have all these values. Raises ConfigError for a condition that is none, or that leaves no run."""
    for condition in conditions:
        key, equals, value = condition.partition("=")
        require(bool(equals), f"--where takes KEY=VALUE, such as lora.alpha=32, got {condition!r}")
        kept = [run for run in runs if str(facts_of(run).get(key)) == value]
        values = ", ".join(sorted({str(facts_of(run).get(key)) for run in runs}))
        require(bool(kept), f"no run has {condition}; the values of {key} are: {values}")
        runs = kept
    return runs
