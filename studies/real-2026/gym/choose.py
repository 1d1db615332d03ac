"""Applies the rule of protocol.md to what was packed: which family of reasoning-gym is studied, and its words.

python studies/real-2026/gym/choose.py FOLDER   # with a folder SIZE-FAMILY for each call of `qerl-bench gates`
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import yaml

from qerl_bench.commands.exits import guarded
from qerl_bench.process.arguments import KeyValueParser
from qerl_bench.studies.design.readings import Probe, mixed_groups, pass_at
from qerl_bench.studies.design.sessions import PROBES, read_probes
from qerl_bench.studies.probes.numbers import MOST_CUT
from qerl_bench.studies.tables.markdown import markdown_table

FAMILIES, PROBED = (yaml.safe_load(Path(__file__).with_name(f"{x}.yaml").read_text()) for x in ("families", "probes"))
SIZES, LIMITS, GROUP, ABOVE_A_GUESS = ("05b", "15b"), (128, 256, 384, 512), 8, 0.1
HEADS = ("pass@1", "mixed groups", "greedy cut", "lenient - strict", "tokens", "limit", "passes")


def main(arguments: list[str] | None = None) -> None:
    parser = KeyValueParser(__doc__)
    parser.add_argument("data", type=Path, help="what was packed")
    print(choice(parser.parse_args(arguments).data))


def choice(data: Path) -> str:
    """What each family shows that was asked whole, in Markdown, and the words of the one that the rule takes."""
    lines, passing = [], []
    for name, family in FAMILIES.items():
        looks = [read_probes(one) if [*one.glob(f"{PROBES}*")] else [] for one in (data / f"{x}-{name}" for x in SIZES)]
        if all(len(copies) == len(PROBED["units"]["dither"]) for copies in looks):
            sizes = [numbers(family["guess"], *copies) for copies in looks]
            lines += [[name, size, *(f"{x:.3g}" for x in of)] for size, of in zip(SIZES, sizes, strict=True)]
            _, mixed, _, _, tokens, limits, good = zip(*sizes, strict=True)
            passing += [(-round(min(mixed), 2), max(tokens), max(limits), name)] if all(good) else []
    table = markdown_table(["family", "size", *HEADS], lines)
    _, _, limit, taken = min(passing, default=(0, 0, 0, ""))
    words = " ".join([*FAMILIES[taken]["words"], f"task.max_completion_tokens={limit}"]) if taken else ""
    return f"{table}\n\n" + (f"The rule takes {taken}: `{words}`" if taken else "No family passes on both sizes.")


def numbers(guess: float, *copies: Probe) -> tuple[float, float, float, float, float, int, bool]:
    """Those of HEADS for one size in BF16: means over its copies; the limit is enough for each of them."""
    greedy, sampled = ([one["formats"]["bf16"]["temperatures"][at] for one in copies] for at in ("0", "1"))
    right, mixed = (fmean(of(one, "bf16", k) for one in copies) for of, k in ((pass_at, 1), (mixed_groups, GROUP)))
    cut = 1 - fmean(one["finished"] for one in greedy)
    gap = fmean(fmean(one["lenient"]) - fmean(one["correct"]) for one in sampled) / sampled[0]["samples"]
    limit = next(limit for limit in LIMITS if limit >= max(one["enough_tokens"] or LIMITS[-1] for one in greedy))
    (low, high), least, most = (PROBED["gates"][gate] for gate in ("pass_at_1", "mixed_groups", "strict_lenient"))
    good = max(low, guess + ABOVE_A_GUESS) <= right <= high and mixed >= least and cut <= MOST_CUT and abs(gap) <= most
    return right, mixed, cut, gap, fmean(one["tokens"] for one in sampled), limit, good


if __name__ == "__main__":
    guarded(main)
