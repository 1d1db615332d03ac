"""probe.html: what a probe of one model found, the prompt, and some answers, in one file that asks no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from qerl_studies.figures.forest import svg
from qerl_studies.figures.probe import ProbePanel, in_panels
from qerl_studies.probes.numbers import accuracy
from qerl_studies.probes.page import asked, tables
from qerl_studies.report.page import page

MOST_ANSWERS = 16  # that are shown


def model_page(record: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """The page; `record` is what probe.json holds, `rows` those of answers.parquet."""
    return page(
        "model",
        record=record,
        asked=asked(record),
        tables=tables(record),
        drawing=Markup(svg(in_panels([right_answers(record)], "Right answers with 95 % intervals over questions."))),
        answers=shown(record, rows),
    )


def right_answers(record: Mapping[str, Any]) -> ProbePanel:
    """By temperature, a line for each weight format."""
    temperatures = [*next(iter(record["formats"].values()))["temperatures"]]
    lines = {
        quant: [
            (100 * one.value, 100 * one.low, 100 * one.high)
            for one in (accuracy(found["temperatures"][at]) for at in temperatures)
        ]
        for quant, found in record["formats"].items()
    }
    return ProbePanel(title="right answers", axis="temperature", at=temperatures, lines=lines, label="per cent")


def shown(record: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Answers of the first weight format, in the answer format that was chosen and at its lowest temperature."""
    quant = next(iter(record["formats"]))
    kept = [
        row
        for row in rows
        if row["completion"] is not None
        and (row["quant"], row["answer_format"]) == (quant, record["answer_format"])
        and row["sample"] == 0
    ]
    lowest = min((row["temperature"] for row in kept), default=None)
    by_question = {row["question"]: row for row in kept if row["temperature"] == lowest}  # asked in formats, and again
    return [*by_question.values()][:MOST_ANSWERS]
