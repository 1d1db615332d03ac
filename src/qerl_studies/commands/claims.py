"""Report what finished runs say about each claim of the QeRL paper, of later papers, or of one's own.

    qerl-bench claims runs/ out=figures/
    qerl-bench claims runs/ out=figures/ papers=literature
    qerl-bench claims runs/ out=figures/ --config-dir mine     # mine/claim/NAME.yaml too
    qerl-bench claims runs/ out=figures/ --all      # prints those without runs too

Writes claims.md, and claims.svg, all claims in one picture; for another family of claims, papers=FAMILY, FAMILY.md, a
table, and FAMILY.svg. Of a study with contrasts of its own primary.md comes first, what its looks show. With --format,
the table of verdicts for a paper too. `qerl-bench report` makes a page of the paper's claims with filters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from qerl_core.checks import require
from qerl_studies.claims.claim import ClaimResult, is_touched
from qerl_studies.claims.evaluate import evaluate_claims
from qerl_studies.claims.registry import QERL, families, shown_claims, with_own_folders
from qerl_studies.design.looks import shown_runs, with_primary
from qerl_studies.figures.forest import all_claims, svg
from qerl_studies.report.claims_page import markdown, page_table, summary_text, verdict_table
from qerl_studies.report.primary import primary_page
from qerl_studies.report.sessions import read_once
from qerl_studies.runs.comparable import check_comparable
from qerl_studies.runs.load import Run
from qerl_studies.runs.readable import readable
from qerl_studies.runs.script import parser_for
from qerl_studies.runs.settings import by_scope
from qerl_studies.tables.paper import add_format, write_table

COLUMNS = """from: what intervals are over, bases or the seeds of one base, with degrees of freedom (df)
detectable: the smallest true effect that such runs find in four cases of five
words of verdicts: {where}docs/claims.md#verdicts
"""


def main(arguments: list[str] | None = None) -> None:
    words = with_own_folders(arguments)
    parser = parser_for(__doc__)
    only = "only runs with this value of a config key, if several settings fit a primary contrast: lora.alpha=32"
    parser.add_argument("--where", nargs="+", metavar="KEY=VALUE", default=[], help=only)
    parser.add_argument("--papers", choices=[*families()], default=QERL, help="whose claims (default: qerl)")
    parser.add_argument("--all", action="store_true", help="claims without a run too; the files always have all")
    add_format(parser, default=None)
    options = parser.parse_args(words)

    found, left_out = readable(shown_runs(options.runs, options.without))
    check_comparable(found, options.mixed_code)
    runs = with_values(found, options.where)
    own = primary_pages(run.path.parent for run in runs)
    claims = shown_claims() if options.papers == QERL else families()[options.papers]
    results = {scope: evaluate_claims(claims, group) for scope, group in by_scope(runs).items()}
    if options.papers == QERL:
        whose, picture, files = "QeRL", "claims", {"claims.md": markdown(results, runs, left_out)}
    else:
        tables = [f"## {scope}\n\n{page_table(of_scope)}" for scope, of_scope in results.items()]
        whose = "later papers" if options.papers == "literature" else options.papers
        picture, files = options.papers, {f"{options.papers}.md": "\n".join(tables)}
    print(own, end="\n" * bool(own))
    for number, (scope, claim_results) in enumerate(results.items(), start=1):
        files[f"{picture}{'' if len(results) == 1 else f'_{number}'}.svg"] = svg(all_claims(claim_results, scope))
        print(scope, *shown_results(claim_results, everything=options.all), sep="\n\n", end="\n\n")
        if options.format:
            name = f"verdicts{'' if len(results) == 1 else f'_{number}'}"
            print(write_table(verdict_table(name, scope, claim_results, whose), options.format, options.out))
    if any(one.effect for of_scope in results.values() for result in of_scope for one in result.voting):
        print(COLUMNS.format(where="the first lines of claims.md, or " if "claims.md" in files else ""))
    files |= {"primary.md": own} if own else {}
    options.out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (options.out / name).write_text(text)
        print(options.out / name)


def shown_results(results: Sequence[ClaimResult], everything: bool) -> list[str]:
    """The table for a terminal: of the claims that these runs touch, and how many others there are."""
    told = [result for result in results if everything or is_touched(result)]
    others = len(results) - len(told)
    count = f"{len(told)} of {len(results)} claims touched by these runs; {others} need others."
    folded = [f"{count}\n--all shows them; the files name the commands that make their runs."] if others else []
    return [*([summary_text(results, told)] if told else []), *folded]


def primary_pages(folders: Iterable[Path]) -> str:
    """The pages of primary contrasts of the studies that these packed sessions belong to, as the last looks see them.

    Such a study is of its own contrasts, which its protocol named; claims are judged by the settings that they name.
    """
    studies = dict.fromkeys(with_primary(folder.resolve()) for folder in dict.fromkeys(folders))
    return "\n".join(primary_page(read_once(one)) for one in studies if one is not None)


def with_values(runs: list[Run], conditions: list[str]) -> list[Run]:
    """The runs with all these config values. Raises ConfigError for a malformed condition, or if no run is left."""
    for condition in conditions:
        key, equals, value = condition.partition("=")
        require(bool(equals), f"--where takes KEY=VALUE, such as lora.alpha=32, got {condition!r}")
        values = [str(run.config_items.get(key)) for run in runs]
        require(value in values, f"no run has {condition}; the values of {key} are: {', '.join(sorted({*values}))}")
        runs = [run for run, has in zip(runs, values, strict=True) if has == value]
    return runs
