"""What finished runs say about each claim of the QeRL paper: claims.md, and claims.html, which needs nothing beside it.

python analysis/claims.py runs/ --out figures/
"""

from qerl_bench.results.judge import judge
from qerl_bench.results.load import Run, load_runs
from qerl_bench.results.paper import CLAIMS
from qerl_bench.results.report import markdown, page, report, summary
from qerl_bench.results.script import guarded, parser_for


def main(arguments: list[str] | None = None) -> None:
    options = parser_for(__doc__).parse_args(arguments)

    runs = load_runs(options.runs, options.mixed_code)
    scopes: dict[str, list[Run]] = {}
    for run in runs:
        scopes.setdefault(f"{run.option('model.name')} on {run.option('task.name')}", []).append(run)
    judged = {scope: judge(CLAIMS, group) for scope, group in sorted(scopes.items())}
    blocks = report(judged, runs)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "claims.md").write_text(markdown(blocks))
    (options.out / "claims.html").write_text(page(blocks))
    for scope, judgements in judged.items():
        print(scope, markdown([summary(judgements)]), sep="\n")
    print(options.out / "claims.md", options.out / "claims.html", sep="\n")


if __name__ == "__main__":
    guarded(main)
