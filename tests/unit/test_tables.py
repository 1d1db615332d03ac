"""Tables for a paper: the same numbers in three formats, and LaTeX that a compiler would take."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from qerl_bench.__main__ import main
from qerl_studies.claims.evaluate import evaluate_claims
from qerl_studies.claims.registry import QERL, claims_of
from qerl_studies.report.claims_page import verdict_table
from qerl_studies.runs.comparable import load_runs
from qerl_studies.runs.load import load_run
from qerl_studies.runs.measure import last_fifth_mean
from qerl_studies.tables.paper import Table
from qerl_studies.tables.runs import runs_table
from tests.run_folders import SHORT, write_run

CLAIMS = claims_of(QERL)
H200 = Path(__file__).parents[2] / "studies" / "h200"
NUMBERS = pd.DataFrame({"arm": ["a_b & c", "d"], "mean": [1 / 3, 2.0], "low": [0.1, 1.5], "high": [0.5, 2.5]})
SHOWN = pd.DataFrame({"arm": ["a_b & c", "d"], "mean": ["0.33 [0.10, 0.50]", "×2.00 [1.50, 2.50]"]})
TABLE = Table("t", NUMBERS, SHOWN, "n = 3 seeds; 95 % intervals.")
DOCUMENT = "\\documentclass{{article}}\\usepackage{{array,booktabs}}\\begin{{document}}{}\\end{{document}}"


def test_csv_has_the_numbers_unrounded() -> None:
    assert pd.read_csv(StringIO(TABLE.text("csv")))["mean"].tolist() == [1 / 3, 2.0]


def test_markdown_has_the_caption() -> None:
    lines = TABLE.text("markdown").splitlines()
    assert lines[2] == "| a_b & c | 0.33 [0.10, 0.50] |" and lines[-1] == TABLE.caption


def rows_of(latex: str) -> list[list[str]]:
    """The cells between the rules; every line has as many as there are columns."""
    body = latex[latex.index("\\toprule") : latex.index("\\bottomrule")]
    lines = [line for line in body.splitlines() if line.endswith("\\\\")]
    return [re.split(r"(?<!\\)&", line.removesuffix("\\\\")) for line in lines]


def test_latex_is_escaped_balanced_and_keeps_intervals_whole() -> None:
    latex = TABLE.text("latex")
    assert [len(row) for row in rows_of(latex)] == [2, 2, 2]
    assert "a\\_b \\& c" in latex and "[0.10,~0.50]" in latex and "$\\times$2.00" in latex
    assert "95 \\% intervals" in latex and "\\begin{tabular}{lr}" in latex
    assert latex.count("{") == latex.count("}") and latex.count("\\begin") == latex.count("\\end") == 2


def test_long_tables_are_wrapped_to_the_page() -> None:
    wide = SHOWN.assign(text="words and more words " * 6, other="another long column of text")
    (columns,) = re.findall(r"\\begin\{tabular\}\{(.*)\}", Table("t", NUMBERS, wide, "").text("latex"))
    widths = [float(width) for width in re.findall(r"p\{([\d.]+)\\linewidth\}", columns)]
    assert len(widths) == 2 and sum(widths) < 0.9


def test_the_verdicts_of_a_study() -> None:
    verdicts = verdict_table("verdicts", "7b", evaluate_claims(CLAIMS, load_runs([H200])))
    table = pd.read_csv(StringIO(verdicts.text("csv")))
    row = table[table["contrast"] == "nvfp4 - bf16"].iloc[0]
    assert row["verdict"] == "supported" and row["low"] < row["effect"] < row["high"] and row["n"] == 3
    latex = verdicts.text("latex")
    assert {len(row) for row in rows_of(latex)} == {5} and "Student's t" in latex


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no TeX")
def test_tex_compiles_it(tmp_path: Path) -> None:
    (tmp_path / "t.tex").write_text(DOCUMENT.format(TABLE.text("latex")))
    words: list[Any] = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "t.tex"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "Overfull" not in done.stdout, done.stdout[-2000:]


RUNS = Path(__file__).parents[1] / "assets" / "runs"


@pytest.mark.parametrize("kind", ["latex", "markdown", "csv"])
def test_the_table_of_runs_and_of_two_arms(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["figure", "runs", str(RUNS), f"out={tmp_path}", f"format={kind}"])
    arms = [str(RUNS / f"{quant}-none-*") for quant in ("nvfp4", "bf16")]
    main(["compare", *arms, f"out={tmp_path}", f"format={kind}"])
    ending = {"latex": "tex", "markdown": "md", "csv": "csv"}[kind]
    listed, compared = ((tmp_path / f"{name}.{ending}").read_text() for name in ("runs", "compare"))
    assert f"{tmp_path / 'compare'}.{ending}" in capsys.readouterr().out
    runs = load_runs([RUNS])
    first, second = ([run for run in runs if run.name.startswith(f"{quant}-none")] for quant in ("nvfp4", "bf16"))
    entropy = [last_fifth_mean("entropy")(run) for run in (*first, *second)]
    if kind == "csv":
        table, numbers = pd.read_csv(StringIO(listed)), pd.read_csv(StringIO(compared)).set_index("number")
        assert [*table["run"]] == [run.name for run in runs]
        last = [run.series("eval", "eval/accuracy_sampled").iloc[-1] for run in runs]
        assert table["sampled_final"].tolist() == pytest.approx(last)
        row = numbers.loc["entropy"]
        assert row["first"] == pytest.approx(sum(entropy[:2]) / 2) and row["second"] == pytest.approx(
            sum(entropy[2:]) / 2
        )
        assert row["difference"] == pytest.approx(row["first"] - row["second"])
        assert row["low"] < row["difference"] < row["high"] and row["n"] == 2
        assert math.isnan(numbers.loc["eval/accuracy_greedy", "low"])  # the same in both pairs
    elif kind == "latex":
        assert [len(row) for row in rows_of(listed)] == [9] * 9 and [len(row) for row in rows_of(compared)] == [5] * 5
        assert "$\\rightarrow$" in listed and "$\\pm$" in listed and "quant.name nvfp4 (first) and bf16" in compared
    else:
        lines = listed.splitlines()
        assert len([line for line in lines if line.startswith("| ")]) == 10 and "| 100.0 | +25.0 ±16.4 |" in listed
        assert "model tiny, rank 32" in lines[-1] and "±0.0" not in listed


def test_the_table_of_runs_that_did_not_train_says_so(tmp_path: Path) -> None:
    lines = [{"step": 0, "kind": "eval", "eval/accuracy_sampled": 0.25, "eval/accuracy_sampled_stderr": 0.1}]
    runs = [
        load_run(write_run(tmp_path / f"r{seed}", SHORT | {"seed": seed, "optim": {"lr": 1e-5 * (seed + 1)}}, lines))
        for seed in (0, 1)
    ]
    table = runs_table(runs)
    assert [*table.shown["sampled (%)"]] == ["25.0 ±10.0"] * 2 and "before any" in table.caption
    assert [*table.shown["other options"]] == [
        "optim.lr=1e-05",
        "optim.lr=2e-05",
    ] and "Not finished: r0, r1" in table.caption
