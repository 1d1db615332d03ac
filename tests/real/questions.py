"""Questions in the shape of GSM8K: word problems whose worked solutions end with `#### ANSWER`."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

NAMES = ("Ana", "Ben", "Chioma", "Dmitri", "Emre", "Fatima", "Goro", "Hana")
THINGS = ("apples", "books", "candles", "pencils", "tickets", "bricks", "cups", "coins")


def question(draw: Random) -> dict[str, str]:
    """Two steps of whole numbers, with GSM8K's annotations of a calculator."""
    name, friend = draw.sample(NAMES, 2)
    things = draw.choice(THINGS)
    boxes, each, given = draw.randrange(3, 12), draw.randrange(4, 25), draw.randrange(2, 12)
    made, left = boxes * each, boxes * each - given
    return {
        "question": f"{name} has {boxes} boxes with {each} {things} in each of them. {name} gives {given} {things} to "
        f"{friend}. How many {things} does {name} have left?",
        "answer": f"The boxes hold {boxes} * {each} = <<{boxes}*{each}={made}>>{made} {things}.\n"
        f"Without those for {friend} there are {made} - {given} = <<{made}-{given}={left}>>{left} {things}.\n"
        f"#### {left}",
    }


def write_questions(folder: Path, counts: dict[str, int], seed: int = 0) -> None:
    """NAME.jsonl of as many questions as `counts` says of NAME, no two alike."""
    draw = Random(seed)
    known: dict[str, dict[str, str]] = {}
    while len(known) < sum(counts.values()):
        row = question(draw)
        known[row["question"]] = row
    rows = iter(known.values())
    for name, count in counts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(next(rows)) + "\n" for _ in range(count)))
