"""The page of a probe of one model, in Markdown: tables by answer format, weight format and noise, then advice.

Intervals are 95 % and over questions: they hold for this model, whose weights were rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qerl_core.statistics import Estimate, mean_ci
from qerl_studies.effects.estimate import of_shares, share
from qerl_studies.probes.numbers import accuracy, of_scale, pass_at, signal
from qerl_studies.probes.over_units import DRAFTS, mean_of, minus, right_at
from qerl_studies.tables.markdown import markdown_table

Table = tuple[list[str], list[list[str]]]  # heads, rows


def markdown(record: Mapping[str, Any]) -> str:
    """The page; `record` is what probe.json holds."""
    return _page(record, f"# Probe of {record['model']}", "\n".join(f"- {line}" for line in record["advice"]))


def so_far(record: Mapping[str, Any]) -> str:
    """The page of a probe that goes on. The last weight format may have some of its temperatures, and nothing else."""
    return _page(record, f"# Probe of {record['model']}, so far", "The same command goes on behind what is here.")


def _page(record: Mapping[str, Any], title: str, words: str) -> str:
    parts = [title, asked(record), words]
    for heading, several in tables(record).items():
        parts += [f"## {heading}", *(markdown_table(*one) for one in several)]
    return "\n\n".join(parts) + "\n"


def asked(record: Mapping[str, Any]) -> str:
    """What was asked, where, and what the numbers are."""
    options = record["options"]
    card = record["environment"]["gpu"] or record["environment"]["cpu"]
    return (
        f"{options['questions']} {options['split'].replace('_', '-')} questions of task={record['task']}, at most "
        f"{record['max_completion_tokens']} tokens, on {card}. Accuracies are per cent, intervals 95 % over questions, "
        "differences to the first weight format on the same ones. Temperatures below 1 have top-p 0.95."
    )


def tables(record: Mapping[str, Any]) -> dict[str, list[Table]]:
    """The tables by title."""
    found = {"Answer formats": [answer_formats(record["answer_formats"])]} if record["answer_formats"] else {}
    whole = {quant: one for quant, one in record["formats"].items() if "kl" in one}
    if record["formats"]:
        found["Weight formats"] = [accuracies(record), *([sizes(whole)] if whole else [])]
    if any(one["curve"] for one in whole.values()):
        found["Noise"] = [noise(whole)]
    if record.get("contamination"):
        found["Questions completed from their beginnings"] = [contamination(record["contamination"])]
    return found


def answer_formats(found: Mapping[str, Any]) -> Table:
    heads = ["task.answer_format", "right", "lenient", "answer found", "cut off", "tokens"]
    return heads, [[name, *_shares(one)] for name, one in found.items()]


def accuracies(record: Mapping[str, Any]) -> Table:
    """A row for each weight format and temperature."""
    reference = next(iter(record["formats"]))
    heads = ["quant", "temperature", "right", "difference", "lenient", "answer found", "cut off", "tokens"]
    heads += ["entropy", "pass@k", "mixed groups"]
    lines = []
    for quant, found in record["formats"].items():
        for at, one in found["temperatures"].items():
            right, *others = _shares(one)
            gap = mean_of([record], quant, minus(reference, right_at(at)))
            several = one["samples"] > 1
            best = f"{100 * pass_at(one, one['samples']).value:.1f} of {one['samples']}" if several else ""
            mixed = f"{signal(one, record['group']).value:.0%}" if several else ""
            shown = "" if quant == reference else interval(gap)
            lines.append([quant, at, right, shown, *others, f"{one['entropy']:.3f}", best, mixed])
    return heads, lines


def sizes(formats: Mapping[str, Any]) -> Table:
    """KL, entropy ratio, worth as a draft, speed and memory of each weight format."""
    quiet = next(iter(formats.values()))["entropy"]
    drafts = DRAFTS if all("draft" in one for one in formats.values()) else {}
    heads = ["quant", "entropy ratio", "KL on own answers", "KL on answers of the first", *drafts, "tokens/s"]
    heads += ["weights GiB", "peak GiB"]
    lines = [
        [
            quant,
            f"{one['entropy'] / quiet:.3f}",
            f"{one['kl']['own']:.2g}",
            f"{one['kl']['of_reference']:.2g}",
            *(mean_of([{"formats": formats}], quant, of).text("{:.3f}".format) for of in drafts.values()),
            f"{one['tokens_per_s']:.0f}",
            f"{one['weights_gib']:.2f}",
            f"{one['memory_gib']:.1f}",
        ]
        for quant, one in formats.items()
    ]
    return heads, lines


def noise(formats: Mapping[str, Any]) -> Table:
    """A row for each weight format and sigma; ratios are to the same format without noise."""
    lines = [
        [
            quant,
            f"{dose['sigma']:g}",
            of_scale(one, dose["sigma"]),
            f"{dose['entropy'] / one['curve'][0]['entropy']:.3f}",
            f"{dose['kl']:.2g}",
            f"{100 * dose['accuracy']:.1f}",
        ]
        for quant, one in formats.items()
        for dose in one["curve"]
    ]
    return ["quant", "sigma", "of the median norm scale", "entropy ratio", "KL", "right"], lines


def contamination(found: Mapping[str, Sequence[Mapping[str, int]]]) -> Table:
    """A row for each kind of questions: how many were completed to their end, and how much of the ends."""
    lines = []
    for kind, each in found.items():
        whole = share([one["first"] == one["left"] for one in each])
        first, common = (of_shares(mean_ci([one[part] / one["left"] for one in each])) for part in ("first", "common"))
        left = sum(one["left"] for one in each) / len(each)
        shares = [interval(one, ".1f") for one in (whole, first, common)]
        lines.append([kind, f"{len(each)}", f"{left:.0f}", *shares])
    return ["questions", "number", "tokens left out", "completed to the end", "right up to there", "ROUGE-L"], lines


def interval(estimate: Estimate, form: str = "+.1f") -> str:
    """A percentage, with its interval if questions, or units, differ."""
    return estimate.text(lambda share: format(100 * share, form))


def _shares(found: Mapping[str, Any]) -> list[str]:
    """Right, with its interval, lenient, answer found, cut off, and tokens."""
    right = accuracy(found)
    lenient = "-" if found["lenient"] is None else f"{100 * accuracy(found, 'lenient').value:.1f}"
    return [
        interval(right, ".1f"),
        lenient,
        f"{found['found']:.0%}",
        f"{1 - found['finished']:.0%}",
        f"{found['tokens']:.0f}",
    ]
