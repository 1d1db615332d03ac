"""What checkpoints answered beside the study's evaluations (protocol, amendment 8), by copy and over copies.

    python studies/real-2026/questions.py
    python studies/real-2026/questions.py asked=FOLDER session=studies/real-2026/05b/data/SESSION

Reads questions.csv and tidy.parquet of each session of each size, and writes questions.md beside its study.yaml. With
`asked`, writes questions.csv of a session first: what its runs answered, FOLDER/RUN/KIND/eval.json, where KIND is t1,
words or in-nvfp4 (`qerl-bench eval RUN out=FOLDER/RUN/KIND ...`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from qerl_core.checks import require
from qerl_core.exits import guarded
from qerl_core.process.arguments import KeyValueParser
from qerl_core.rundir.durable import write_atomically
from qerl_core.statistics import mean_ci
from qerl_studies.design.design import read_design
from qerl_studies.design.sessions import read_sessions
from qerl_studies.report.probe_page import points
from qerl_studies.runs.committed import TIDY
from qerl_studies.tables.markdown import markdown_table

STUDY = Path(__file__).parent
LEAST = 3  # copies for an interval
IN_NVFP4 = "bf16 in nvfp4"  # the policy that was trained in 16 bits, rounded when it answers


@dataclass(frozen=True)
class Question:
    """What was asked of which arms, the metrics that its tables have, and the differences."""

    said: str
    metrics: dict[str, str]
    arms: tuple[str, ...] = ("bf16", "nvfp4", "nvfp4-noise")
    differences: tuple[tuple[str, str], ...] = (("nvfp4", "bf16"), ("nvfp4-noise", "nvfp4"))


ASKED = {
    "t1": Question(
        "256 held-out questions of GSM8K, 8 answers each at temperature 1",
        {"lenient_sampled": "by the last number", "pass_at_k": "pass@8 by the boxed one"},
    ),
    "words": Question(
        "1,000 generated word problems, greedy and at temperature 0.6",
        {"accuracy_greedy": "greedy, boxed", "accuracy_sampled": "sampled, boxed"},
    ),
    "in-nvfp4": Question(
        "1,319 held-out questions of GSM8K, greedy and at temperature 0.6, answered in the arm's format or in NVFP4",
        {"lenient_greedy": "greedy, last number", "lenient_sampled": "sampled, last number"},
        ("bf16", IN_NVFP4, "nvfp4"),
        ((IN_NVFP4, "bf16"), ("nvfp4", IN_NVFP4)),
    ),
}


def page(rows: Any) -> str:
    """Markdown with two tables for each kind of question: per cent of each copy, and differences over copies.

    `rows` has columns copy, arm, asked, step, metric and value, a share.
    """
    parts = ["# Questions to checkpoints"]
    for asked, question in ASKED.items():
        found = rows[rows.asked == asked].pivot_table("value", ["copy", "step"], ["metric", "arm"])
        if found.empty:
            continue
        columns = [(metric, arm) for metric in question.metrics for arm in question.arms]
        shares = 100 * found.reindex(columns=pd.MultiIndex.from_tuples(columns))
        lines = [
            [str(copy), str(step), *("-" if pd.isna(value) else f"{value:.1f}" for value in values)]
            for (copy, step), values in zip(shares.index, shares.to_numpy(), strict=True)
        ]
        heads = ["copy", "step", *(f"{question.metrics[metric]}, {arm}" for metric, arm in columns)]
        parts += [f"## {question.said}", markdown_table(heads, lines), *differences(shares, question)]
    return "\n\n".join(parts) + "\n"


def differences(shares: Any, question: Question) -> list[str]:
    """A table of differences in points, means and 95 % intervals over the copies that have both; none of few copies."""
    lines = []
    for step, of_step in shares.groupby(level="step"):
        for metric, said in question.metrics.items():
            for arm, other in question.differences:
                gaps = (of_step[metric, arm] - of_step[metric, other]).dropna()
                if len(gaps) >= LEAST and gaps.any():  # before training noise is none
                    shown = points(mean_ci(gaps.to_numpy() / 100), 1, signed=True)
                    lines.append([str(step), said, f"{arm} - {other}", str(len(gaps)), shown])
    return [markdown_table(["step", "right", "difference", "copies", "points"], lines)] if lines else []


def evaluations(tidy: Any, copies: set[int], steps: set[int]) -> Any:
    """The study's own evaluations of the arms without noise, as rows of the question `in-nvfp4`."""
    metrics = [f"eval/{metric}" for metric in ASKED["in-nvfp4"].metrics]
    own = tidy[(tidy.kind == "eval") & tidy.metric.isin(metrics) & (tidy.aqn == "none")]
    own = own[own.seed.isin(copies) & own.step.isin(steps)]
    named = own.assign(copy=own.seed, arm=own.quant, asked="in-nvfp4", metric=own.metric.str.removeprefix("eval/"))
    return named[["copy", "arm", "asked", "step", "metric", "value"]].astype({"metric": str, "arm": str})


def rows_of(session: Path) -> Any:
    """What was asked of a session's checkpoints, and beside answers in NVFP4 what the study asked."""
    asked = pd.read_csv(session / "questions.csv")
    in_nvfp4 = asked.asked == "in-nvfp4"
    own = evaluations(pd.read_parquet(session / TIDY), set(asked[in_nvfp4]["copy"]), set(asked[in_nvfp4].step))
    return pd.concat([asked.assign(arm=asked.arm.where(~in_nvfp4, IN_NVFP4)), own])


def asked_of(folder: Path, session: Path) -> Any:
    """The rows of questions.csv of a session, from what its runs answered in `folder`; without the gains."""
    study = read_sessions(read_design(session.parents[1] / "study.yaml"), [session])
    cells = {run.path.name: (copy, arm) for (arm, copy, _), run in study.runs.items()}
    rows = []
    for file in sorted(folder.glob("*/*/eval.json")):
        *_, run, kind, _ = file.parts
        require(run in cells, f"{file} is of no run of {session}")
        for record in json.loads(file.read_text()):
            metric = record["metric"].removeprefix("eval/")
            if not metric.startswith("gain_"):
                numbers = [record[key] for key in ("value", "stderr", "truncated")]
                shown = ["" if number is None else f"{round(number, 4):g}" for number in numbers]
                rows.append([*cells[run], kind, record["step"], metric, *shown, record["n"]])
    return pd.DataFrame(rows, columns=["copy", "arm", "asked", "step", "metric", "value", "stderr", "cut", "n"])


def pages() -> dict[Path, str]:
    """By its file, the page of each size that has such answers."""
    found = {}
    for size in sorted(STUDY.glob("*/study.yaml")):
        sessions = [file.parent for file in sorted(size.parent.glob("data/*/questions.csv"))]
        if sessions:
            found[size.with_name("questions.md")] = page(pd.concat([rows_of(session) for session in sessions]))
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = KeyValueParser(__doc__)
    parser.add_argument("--asked", type=Path)
    parser.add_argument("--session", type=Path)
    chosen = parser.parse_args(arguments)
    require((chosen.asked is None) == (chosen.session is None), "asked=FOLDER and session=FOLDER belong together")
    if chosen.asked is not None:
        asked_of(chosen.asked, chosen.session).to_csv(chosen.session / "questions.csv", index=False)
    for file, text in pages().items():
        write_atomically(file, text)
        print(file)


if __name__ == "__main__":
    guarded(main)
