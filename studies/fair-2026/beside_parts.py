"""The pages of parts 5, 6, 7 and FP8 of the fair test, as the protocols in nf4, full, ranks and fp8 say them.

    python studies/fair-2026/beside_parts.py

Arms of these parts are compared with those that another part trained on the same copies in the same session. Reads
nf4/SIZE/data/SESSION and data/SESSION of the others, and the data of parts 2 and 8, what `qerl-bench study ... out=`
packed; writes results/words.md of each. Runs are read, and contrasts fitted, as those of part 2. All was written
before the data.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from mechanism import FORMATS, MARGIN, read
from rates import FORMATS as OF_RATES
from rates import HERE as RATES_PART
from rates import LAST, SHARES, levels, numbers_of, read_size, require_whole, table_of, waits_for
from rates_analysis.contrasts import COPIES, RATES, Asked, Contrast, effect, has_trained, minus, own_best, tested

from qerl_core.exits import guarded
from qerl_core.options import user_options
from qerl_core.process.arguments import KeyValueParser
from qerl_core.rundir.durable import write_atomically
from qerl_studies.report.probe_page import points
from qerl_studies.tables.markdown import markdown_table

STUDY = Path(__file__).resolve().parent
OWN = FORMATS | {"nf4": "nf4", "rank-16": "nvfp4", "rank-64": "nvfp4", "full": "bf16", "fp8": "fp8"}  # answers in it
OWN |= {f"{kind}-{rate}": form for kind, form in OF_RATES.items() for rate in RATES}
NF4_FIRST: Asked = {"nf4 - nvfp4": (minus("nf4", "nvfp4"), "late"), "nf4 - bf16": (minus("nf4", "bf16"), "late")}
NF4_SECOND: Asked = {"nf4 - nvfp4, both in BF16": (minus("nf4", "nvfp4"), "sampled in bf16")}
PAIRS = (("rank-64", "rank-16"), ("rank-16", "nvfp4"), ("rank-64", "nvfp4"))
RANKS: Asked = {" - ".join(pair): (minus(*pair), "late") for pair in PAIRS}
OF_FP8: Asked = {
    "fp8 - bf16": (minus("fp8", "bf16"), "late"),
    "fp8 - bf16, both in BF16": (minus("fp8", "bf16"), "sampled in bf16"),
}
SAME = "no difference beyond the margin"
NF4_SAYS = {
    "lower": "NF4 ends lower than NVFP4, as the paper says",
    "higher": "NF4 ends higher than NVFP4, the opposite of what the paper says",
    SAME: "NF4 and NVFP4 differ by less than half of what NVFP4 cost before",
}
FP8_SAYS = {
    SAME: "FP8 ends within 2.3 points of BF16",
    "lower": "FP8 ends lower than BF16",
    "higher": "FP8 ends higher than BF16",
}


@dataclass(frozen=True)
class Pairing:
    """A design, the part that has what it is compared with, and how that part calls these arms."""

    design: Path
    other: Path
    names: Mapping[str, str]


NF4 = {
    "0.5B": Pairing(STUDY / "nf4" / "05b", STUDY / "mechanism", {"nvfp4": "nvfp4", "bf16": "bf16"}),
    "1.5B": Pairing(STUDY / "nf4" / "15b", STUDY / "rates" / "15b", {"nvfp4": "nvfp4-2e-4", "bf16": "bf16-2e-4"}),
}
NF4_COPIES = {"0.5B": 6, "1.5B": 6}
TRAINED = ("nvfp4", "four-six", "bf16")  # arms of part 2, at two rates
OF_FULL = Pairing(
    STUDY / "full",
    STUDY / "rates" / "15b",
    {f"{kind}-{rate}": f"{kind}-{rate}" for kind in TRAINED for rate in RATES},
)
FULL_COPIES = 6
FULL_SAYS = {
    "lower": "LoRA in NVFP4 ends below full training",
    "higher": "LoRA in NVFP4 ends above full training",
    SAME: "LoRA in NVFP4 matches full training, as the paper says",
}
OF_RANKS = Pairing(STUDY / "ranks", STUDY / "mechanism", {"nvfp4": "nvfp4"})
RANKS_COPIES = 7
FP8 = Pairing(STUDY / "fp8", STUDY / "mechanism", {"bf16": "bf16"})


def main(arguments: list[str] | None = None) -> None:
    KeyValueParser(__doc__).parse_args(arguments)
    user_options.use([STUDY / "conf"])
    pages = {
        "nf4": nf4_page(NF4),
        "full": full_page(OF_FULL, RATES_PART / "data"),
        "ranks": ranks_page(OF_RANKS),
        "fp8": fp8_page(FP8),
    }
    for name, page in pages.items():
        (STUDY / name / "results").mkdir(exist_ok=True)
        write_atomically(STUDY / name / "results" / "words.md", page)
        print(STUDY / name / "results" / "words.md")


def rows_of(pairing: Pairing) -> tuple[Any, list[int]]:
    """A row for each run of a whole copy, as part 2 reads it, and the copies that lack a run or a common session."""
    ours, others = read(pairing.design), read_other(pairing.other)
    arms = [arm.name for arm in ours.design.arms]
    rows, lacking = [], []
    for copy in ours.design.bases:
        runs = {(arm, copy, 0): ours.runs.get((arm, copy, 0)) for arm in arms}
        runs |= {(arm, copy, 0): others.runs.get((name, copy, 0)) for arm, name in pairing.names.items()}
        there = {key: run for key, run in runs.items() if run is not None}
        sessions = {run.path.parent.name for run in there.values()}
        if len(there) < len(runs) or len(sessions) > 1:
            lacking.append(copy)
            continue
        require_whole(pairing.design.name, there)
        for (arm, _, _), run in there.items():
            row = {"arm": arm, "copy": copy, "session": run.path.parent.name}
            apart = float(run.series("train", "mismatch/kl").iloc[-LAST:].mean())
            rows.append(row | numbers_of(OWN[arm], run, others=arm != "full") | {"mismatch": apart})
    return pd.DataFrame(rows), lacking


def read_other(part: Path) -> Any:
    """Of part 2 the data of a size lie beside those of others."""
    data = part.parent / "data" / part.name if part.parent.name == "rates" else part / "data"
    return read(part, data)


def nf4_page(sizes: Mapping[str, Pairing]) -> str:
    parts = ["# Is NF4 worse than NVFP4? The protocol's words", "Brackets are 95 % intervals; differences are points."]
    for size, pairing in sizes.items():
        rows, lacking = rows_of(pairing)
        parts += [f"## {size}", *(not_whole(lacking) or nf4_words(rows, NF4_COPIES[size]))]
    return "\n\n".join(parts) + "\n"


def nf4_words(rows: Any, copies: int) -> list[str]:
    first = tested(rows, NF4_FIRST, MARGIN, copies)
    said = NF4_SAYS.get(first["nf4 - nvfp4"].word, "Which of the two ends higher is not decided")
    second = tested(rows, NF4_SECOND, MARGIN, copies)
    return [table_of(first), f"**{said}.**", "### What learning costs", table_of(second), *shown(rows)]


def full_page(pairing: Pairing, data: Path) -> str:
    """`data` are those of part 2, whose eight copies say which rate is each arm's own best."""
    parts = [
        "# Does LoRA in NVFP4 equal full training? The protocol's words",
        "Brackets are 95 % intervals; differences are points.",
    ]
    (rows, lacking), part_2 = rows_of(pairing), read_size("1.5B", data)
    lacking = lacking or [int(name.split()[0]) for name in waits_for(part_2)]
    best = () if lacking else tuple(own_best(part_2.rows, kind) for kind in TRAINED)
    return "\n\n".join([*parts, *(not_whole(lacking) or full_words(rows, *best))]) + "\n"


def full_words(rows: Any, nvfp4: str, four_six: str, bf16: str) -> list[str]:
    """What the page says; the arms are those of part 2 at their own best rates."""
    main, late = f"{four_six} - full", "late"
    first = tested(
        rows,
        {main: (minus(four_six, "full"), late), f"{nvfp4} - full": (minus(nvfp4, "full"), late)},
        MARGIN,
        FULL_COPIES,
    )
    asked: Asked = {
        f"{bf16} - full": (minus(bf16, "full"), late),
        f"{four_six} - full, both in BF16": (minus(four_six, "full"), "sampled in bf16"),
    }
    said = FULL_SAYS.get(first[main].word, "Whether LoRA in NVFP4 matches full training is not decided")
    second = table_of(tested(rows, asked, MARGIN, FULL_COPIES))
    return [table_of(first), f"**{said}.**", "### LoRA by itself, and what learning costs", second, *shown(rows)]


def ranks_page(pairing: Pairing) -> str:
    parts = [
        "# Does the rank of the adapter matter? The protocol's words",
        "Brackets are 95 % intervals; differences are points.",
    ]
    rows, lacking = rows_of(pairing)
    return "\n\n".join([*parts, *(not_whole(lacking) or ranks_words(rows))]) + "\n"


def ranks_words(rows: Any) -> list[str]:
    found = tested(rows, RANKS, MARGIN, RANKS_COPIES)
    return [table_of(found), f"**{verdict(found.values())}.**", *rewards(rows, PAIRS), *shown(rows)]


def fp8_page(pairing: Pairing) -> str:
    parts = ["# Does FP8 learn as BF16? The protocol's words", "Brackets are 95 % intervals; differences are points."]
    rows, lacking = rows_of(pairing)
    return "\n\n".join([*parts, *(not_whole(lacking) or fp8_words(rows))]) + "\n"


def fp8_words(rows: Any) -> list[str]:
    found = tested(rows, OF_FP8, MARGIN)
    said = FP8_SAYS.get(found["fp8 - bf16"].word, "Whether FP8 learns as BF16 is not decided")
    if all(one.word == SAME for one in found.values()):
        said = "FP8 learns as BF16"
    if has_trained(rows, "bf16") and not has_trained(rows, "fp8") and rows["copy"].nunique() >= COPIES:
        said = "FP8 does not learn"
    apart = [[arm, f"{of['mismatch'].mean():.4f}"] for arm, of in rows.groupby("arm", sort=False)]
    return [
        table_of(found),
        f"**{said}.**",
        *rewards(rows, [("fp8", "bf16")]),
        "### `mismatch/kl` in the last eight steps, nats a token",
        markdown_table(["arm", "mean over copies"], apart),
        *shown(rows),
    ]


def rewards(rows: Any, pairs: Sequence[tuple[str, str]]) -> list[str]:
    found = [[" - ".join(pair), points(effect(rows, minus(*pair), "last"), 2, True)] for pair in pairs]
    return ["### Reward in the last eight steps, without words", markdown_table(["contrast", "reward"], found)]


def verdict(found: Collection[Contrast]) -> str:
    if any(one.word in ("higher", "lower") for one in found):
        return "The rank matters"
    little = all(one.word == SAME for one in found)
    return "The rank matters little, as the paper says" if little else "Whether the rank matters is not decided"


def not_whole(lacking: Sequence[int]) -> list[str]:
    listed = ", ".join(map(str, lacking))
    return [f"Not whole, so no words: copies {listed} lack a run in a common session."] if lacking else []


def shown(rows: Any) -> list[str]:
    return ["### Each arm, without words", levels(rows, SHARES)]


if __name__ == "__main__":
    guarded(main)
