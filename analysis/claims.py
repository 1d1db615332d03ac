"""What finished runs say about each claim of the QeRL paper: claims.md, and claims.html, which needs nothing beside it.

python analysis/claims.py runs/ --out figures/
"""

import argparse
import sys
from pathlib import Path

from qerl_bench.errors import BadInput
from qerl_bench.results.judge import judge
from qerl_bench.results.load import Run, load_runs
from qerl_bench.results.paper import CLAIMS
from qerl_bench.results.report import markdown, page, report, summary


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write claims.md and claims.html.")
    parser.add_argument("runs", nargs="+", type=Path, help="folders that hold runs, or single runs")
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder to write to (default: figures)")
    parser.add_argument("--mixed-code", action="store_true", help="accept runs of different versions of the code")
    options = parser.parse_args(arguments)

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
    try:
        main()
    except BadInput as error:
        print(error, file=sys.stderr)
        sys.exit(2)
