"""Report what finished runs say about each claim of the QeRL paper.

    qerl-bench claims runs/ out=figures/

Writes claims.md, claims.html (one file with its figures inside) and claims.svg, all claims in one picture. With
--format, the table of verdicts for a paper too.
"""

from __future__ import annotations

from qerl_bench.checks import require
from qerl_bench.claims.evaluate import evaluate_claims
from qerl_bench.claims.paper import CLAIMS
from qerl_bench.claims.report import pages, summary_text, verdict_table
from qerl_bench.figures.forest import all_claims, svg
from qerl_bench.study.load import Run, load_runs
from qerl_bench.study.script import parser_for
from qerl_bench.study.tables import add_format, write_table


def main(arguments: list[str] | None = None) -> None:
    parser = parser_for(__doc__)
    only = "only runs with this value of a config key, if several settings fit a primary contrast: lora.alpha=32"
    parser.add_argument("--where", nargs="+", metavar="KEY=VALUE", default=[], help=only)
    add_format(parser, default=None)
    options = parser.parse_args(arguments)

    runs = with_values(load_runs(options.runs, options.mixed_code), options.where)
    scopes: dict[str, list[Run]] = {}
    for run in runs:
        scopes.setdefault(f"{run.option('model.name')} on {run.option('task.name')}", []).append(run)
    results = {scope: evaluate_claims(CLAIMS, group) for scope, group in sorted(scopes.items())}
    files = pages(results, runs)
    for number, (scope, claim_results) in enumerate(results.items(), start=1):
        files[f"claims{'' if len(results) == 1 else f'_{number}'}.svg"] = svg(all_claims(claim_results, scope))
        print(scope, summary_text(claim_results), sep="\n\n", end="\n\n")
        if options.format:
            name = f"verdicts{'' if len(results) == 1 else f'_{number}'}"
            print(write_table(verdict_table(name, scope, claim_results), options.format, options.out))
    options.out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (options.out / name).write_text(text)
        print(options.out / name)


def with_values(runs: list[Run], conditions: list[str]) -> list[Run]:
    """The runs with all these config values. Raises ConfigError for a malformed condition, or if no run is left."""
    for condition in conditions:
        key, equals, value = condition.partition("=")
        require(bool(equals), f"--where takes KEY=VALUE, such as lora.alpha=32, got {condition!r}")
        values = [str(run.config_items.get(key)) for run in runs]
        require(value in values, f"no run has {condition}; the values of {key} are: {', '.join(sorted({*values}))}")
        runs = [run for run, has in zip(runs, values, strict=True) if has == value]
    return runs
