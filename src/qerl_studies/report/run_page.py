"""The page of one run's samples: each kept group token by token, and what training changed on held-out questions.

Everything was written by the run: rollouts.jsonl (train/rollout_records.py) and samples.parquet. Runs from before token
numbers show texts and rewards alone.
"""

from __future__ import annotations

import json
import re
from itertools import groupby
from pathlib import Path
from typing import Any

from qerl_core.checks import require
from qerl_core.records import PER_NAT
from qerl_core.rundir.read_files import read_table
from qerl_studies.report.page import page

MOST_STEPS = 40  # of a page, evenly spread, with the first and the last
MOST_QUESTIONS = 100  # held-out ones, those whose answer changed first
LISTED = ("step", "prompt", "question", "completion", "gold", "correct", "finished", "advantage", "reward")
KINDS = {  # of answers, by whether they were right before training and after it; in the order of the page
    (False, True): "wrong, then right",
    (True, False): "right, then wrong",
    (False, False): "wrong twice",
    (True, True): "right twice",
}
PER_TOKEN = ("tokens", "entropy", "sampled", "trained", "noisy")
# How tokens are colored: what is shown, and the columns that it is the difference of (first minus second).
SCALES = {
    "entropy of the sampler": ("entropy", None),
    "noise: log-probability as trained minus with the sampler's noise": ("trained", "noisy"),
    "kernels: log-probability of the trainer minus the sampler's, same noise": ("noisy", "sampled"),
    "both: log-probability as trained minus as sampled": ("trained", "sampled"),
}


def has_samples(run: Path) -> bool:
    """Whether there is anything for a page: the folder of a run that kept completions."""
    path = run / "rollouts.jsonl"
    return path.is_file() and path.stat().st_size > 0


def run_page(run: Path, study: str) -> str:
    """The page of the samples of `run`; `study` is the address of its study's page. ConfigError for a damaged file."""
    records = _records(run / "rollouts.jsonl")
    steps = [(step, [*rows]) for step, rows in groupby(records, key=lambda record: record["step"])]
    shown = [steps[place] for place in evenly(len(steps), MOST_STEPS)]
    data = {
        "per_nat": PER_NAT,
        "scales": [{"name": name, "first": first, "second": second} for name, (first, second) in SCALES.items()],
        "steps": [{"step": step, "groups": _groups(rows)} for step, rows in shown],
    }
    asked = run / "prompt.txt"
    return page(
        "run",
        data,
        name=run.name,
        study=study,
        steps=data["steps"],
        all_steps=len(steps),
        prompt=asked.read_text(errors="replace") if asked.is_file() else None,
        changed=_changed(run),
    )


def evenly(count: int, most: int) -> list[int]:
    """At most `most` of range(count), with the first and the last."""
    if count <= most:
        return [*range(count)]
    return sorted({round(place * (count - 1) / (most - 1)) for place in range(most)})


def _records(path: Path) -> list[dict[str, Any]]:
    """The lines of a run that may still be writing: a last one without its end is left out."""
    lines = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line) if line.strip() else None
            if record is not None:
                records.append(record | {key: record[key] for key in ("step", "prompt", "completion")})
        except (ValueError, KeyError, TypeError) as error:
            require(
                number == len(lines),
                f"{path}, line {number}: no completion ({error}). Remove this line, or leave the run out",
            )
    return records


def _groups(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    groups = []
    for prompt, members in groupby(rows, key=lambda record: record["prompt"]):
        completions = [*members]
        first = completions[0]
        groups.append(
            {
                "prompt": prompt,
                "question": first.get("question", prompt),
                "gold": first.get("gold", ""),
                "completions": [
                    {
                        "text": one["completion"],
                        "correct": one.get("correct"),
                        "finished": one.get("finished"),
                        "reward": one.get("reward"),
                        "advantage": one.get("advantage"),
                        "parts": {key: part for key, part in one.items() if key not in (*LISTED, *PER_TOKEN)},
                        **{name: one[name] for name in PER_TOKEN if name in one},
                    }
                    for one in completions
                ],
            }
        )
    return groups


def _changed(run: Path) -> dict[str, Any] | None:
    """Greedy answers to held-out questions before training and after it; None without two evaluations."""
    if not (run / "samples.parquet").is_file():
        return None
    by_step: dict[int, dict[str, dict[str, Any]]] = {}
    columns = ["mode", "step", "question", "gold", "completion", "correct"]
    for row in read_table(run / "samples.parquet", columns).to_dict("records"):
        if row["mode"] == "greedy":
            by_step.setdefault(row["step"], {})[row["question"]] = {str(key): value for key, value in row.items()}
    last = max(by_step, default=0)
    if last == 0 or 0 not in by_step:
        return None
    questions = [
        {
            "question": question,
            "gold": before["gold"],
            "before": _without_gaps(before["completion"]),
            "after": _without_gaps(after["completion"]),
            "kind": KINDS[bool(before["correct"]), bool(after["correct"])],
        }
        for question, before in by_step[0].items()
        if (after := by_step[last].get(question))
    ]
    counts = {kind: sum(one["kind"] == kind for one in questions) for kind in KINDS.values()}
    listed = [*KINDS.values()]
    ordered = sorted(questions, key=lambda one: (listed.index(one["kind"]), one["before"] == one["after"]))
    return {"step": last, "counts": counts, "questions": ordered[:MOST_QUESTIONS], "all": len(questions)}


def _without_gaps(text: str) -> str:
    """Where nothing but lines end, how often: an untrained model may say nothing else, over pages."""
    return re.sub(r"\n{3,}", lambda gap: f"[{len(gap[0])} line ends]\n", text)
