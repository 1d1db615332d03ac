"""Applies the rule of protocol.md to what was packed: which family of reasoning-gym is studied, and its words.

python studies/real-2026/gym/choose.py FOLDER   # with a folder SIZE-FAMILY for each call of `qerl-bench gates`
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import yaml

from qerl_core.exits import guarded
from qerl_core.process.arguments import KeyValueParser
from qerl_studies.design.readings import Probe, mixed_groups, pass_at
from qerl_studies.design.sessions import PROBES, read_probes
from qerl_studies.probes.numbers import MOST_CUT
from qerl_studies.tables.markdown import markdown_table

FAMILIES, PROBED = (yaml.safe_load(Path(__file__).with_name(f"{x}.yaml").read_text()) for x in ("families", "probes"))
SIZES, LIMITS, GROUP, ABOVE_A_GUESS = ("05b", "15b"), (128, 256, 384, 512), 8, 0.1
HEADS = ("pass@1", "mixed groups", "greedy cut", "lenient - strict", "tokens", "limit", "passes")


class Numbers(NamedTuple):
    """What a family shows on one size, in the order of HEADS."""

    right: float
    mixed: float
    cut: float
    gap: float
    tokens: float
    limit: int
    passes: bool


def main(arguments: list[str] | None = None) -> None:
    parser = KeyValueParser(__doc__)
    parser.add_argument("data", type=Path, help="what was packed")
    print(choice(parser.parse_args(arguments).data))


def choice(data: Path) -> str:
    """What each family shows that was asked whole, in Markdown, and the words of those that the rule takes."""
    shown: dict[str, dict[str, Numbers]] = {size: {} for size in SIZES}
    for size in SIZES:
        for name, family in FAMILIES.items():
            folder = data / f"{size}-{name}"
            copies = read_probes(folder) if [*folder.glob(f"{PROBES}*")] else []
            if len(copies) == len(PROBED["units"]["dither"]):
                shown[size][name] = numbers(family["guess"], *copies)
    lines = [[name, size, *(f"{x:.3g}" for x in of)] for size in SIZES for name, of in shown[size].items()]
    said = taken(shown, "both sizes") or "\n".join(filter(None, (taken({size: shown[size]}, size) for size in SIZES)))
    return f"{markdown_table(['family', 'size', *HEADS], lines)}\n\n{said or 'No family passes.'}"


def taken(shown: dict[str, dict[str, Numbers]], where: str) -> str:
    """What the rule takes of the families that pass on all sizes of `shown`; empty if none does."""
    passing: list[tuple[float, float, int, str]] = []
    for name in FAMILIES:
        sizes = [of[name] for of in shown.values() if name in of]
        if len(sizes) == len(shown) and all(of.passes for of in sizes):
            mixed, tokens = min(of.mixed for of in sizes), max(of.tokens for of in sizes)
            passing.append((-round(mixed, 2), tokens, max(of.limit for of in sizes), name))
    if not passing:
        return ""
    _, _, limit, name = min(passing)
    return f"On {where} the rule takes {name}: `{' '.join(FAMILIES[name]['words'])} task.max_completion_tokens={limit}`"


def numbers(guess: float, *copies: Probe) -> Numbers:
    """Those of one size in BF16: means over its copies; the limit is enough for each of them."""
    greedy, sampled = ([one["formats"]["bf16"]["temperatures"][at] for one in copies] for at in ("0", "1"))
    right, mixed = (fmean(of(one, "bf16", k) for one in copies) for of, k in ((pass_at, 1), (mixed_groups, GROUP)))
    cut = 1 - fmean(one["finished"] for one in greedy)
    gap = fmean(fmean(one["lenient"]) - fmean(one["correct"]) for one in sampled) / sampled[0]["samples"]
    limit = next(limit for limit in LIMITS if limit >= max(one["enough_tokens"] or LIMITS[-1] for one in greedy))
    (low, high), least, most = (PROBED["gates"][gate] for gate in ("pass_at_1", "mixed_groups", "strict_lenient"))
    good = max(low, guess + ABOVE_A_GUESS) <= right <= high and mixed >= least and cut <= MOST_CUT and abs(gap) <= most
    return Numbers(right, mixed, cut, gap, fmean(one["tokens"] for one in sampled), limit, good)


if __name__ == "__main__":
    guarded(main)
