"""What finished runs say about each claim of the QeRL paper: claims.md, and claims.html, which needs nothing beside it.

python analysis/claims.py runs/ --out figures/
"""

import argparse
from pathlib import Path

from qerl_bench.results.judge import judge
from qerl_bench.results.load import Run, load_runs
from qerl_bench.results.paper import CLAIMS
from qerl_bench.results.report import markdown, page, report, summary
from qerl_bench.results.script import run


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write claims.md and claims.html.")
    parser.add_argument("runs", nargs="+", type=Path, help="folders that hold runs, or single runs")
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder to write to (default: figures)")
    parser.add_argument("--mixed-code", action="store_true", help="accept runs of different versions of the code")
    options = parser.parse_args(arguments)

    runs = load_runs(options.runs, options.mixed_code)
    scopes: dict[str, list[Run]] = {}
    for one in runs:
        scopes.setdefault(f"{one.option('model.name')} on {one.option('task.name')}", []).append(one)
    judged = {scope: judge(CLAIMS, group) for scope, group in sorted(scopes.items())}
    blocks = report(judged, runs)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "claims.md").write_text(markdown(blocks))
    (options.out / "claims.html").write_text(page(blocks))
    for scope, judgements in judged.items():
        print(scope, markdown([summary(judgements)]), sep="\n")
    print(options.out / "claims.md", options.out / "claims.html", sep="\n")


if __name__ == "__main__":
    run(main)
