"""Put the verdicts of several studies side by side: a line for each claim, a column for each model and task of a study.

    qerl-bench matrix community studies/tiny studies/h200 out=community

Each study is judged by itself, because its runs share code, machines and bases; no test is made across studies. Writes
matrix.md, or another --format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from qerl_core.checks import require
from qerl_studies.claims.claim import NO_RUNS, Claim, ClaimResult
from qerl_studies.claims.evaluate import evaluate_claims
from qerl_studies.claims.registry import QERL, claims_of
from qerl_studies.design.looks import shown_runs
from qerl_studies.runs.comparable import load_runs
from qerl_studies.runs.find import by_folder
from qerl_studies.runs.load import Run
from qerl_studies.runs.script import parser_for
from qerl_studies.runs.settings import by_scope
from qerl_studies.tables.paper import Table, add_format, write_table

CAPTION = (
    "Verdicts on the claims of QeRL by study, model and task. Effects are means over n paired units (base models, or "
    "seeds of one) with 95 % intervals (Student's t, not adjusted); each study is judged alone."
)


def main(arguments: list[str] | None = None) -> None:
    parser = parser_for(__doc__)
    add_format(parser, default="markdown")
    options = parser.parse_args(arguments)
    folders = by_folder(shown_runs(options.runs, options.without))
    names = [folder.name for folder in folders]
    twice = {name for name in names if names.count(name) > 1}
    require(
        not twice,
        f"several folders are called {', '.join(sorted(twice))}, which names their columns: give each study a folder "
        "of another name, or pass them one by one",
    )
    studies = {folder.name: load_runs(paths, options.mixed_code) for folder, paths in folders.items()}
    print(write_table(matrix(studies), options.format, options.out))


def matrix(studies: Mapping[str, Sequence[Run]]) -> Table:
    """The table of verdicts; a claim that no study has runs for is left out."""
    claims = claims_of(QERL)
    columns: dict[str, Sequence[ClaimResult]] = {}
    for name, runs in studies.items():
        columns |= {f"{name}: {scope}": evaluate_claims(claims, group) for scope, group in by_scope(runs).items()}
    lines = [_line(index, claim, columns) for index, claim in enumerate(claims)]
    frame = pd.DataFrame([line for line in lines if any(list(line.values())[1:])], columns=["claim", *columns])
    return Table("matrix", frame, frame, CAPTION)


def _line(index: int, claim: Claim, columns: Mapping[str, Sequence[ClaimResult]]) -> dict[str, str]:
    cells = {name: _cell(results[index]) for name, results in columns.items()}
    return {"claim": f"{index + 1}. {claim.title}"} | cells


def _cell(result: ClaimResult) -> str:
    """The verdict, and the effect of each contrast that votes or why there is none; empty without runs."""
    measure = result.claim.measure
    effects = [
        f"{one.contrast.label} {measure.estimate_text(effect.whole)}, n = {effect.whole.n}"
        for one in result.voting
        if one.primary and (effect := one.primary.effect)
    ]
    if not effects and result.reason == NO_RUNS:
        return ""
    return f"{result.verdict}: {'; '.join(effects) or result.reason}"
