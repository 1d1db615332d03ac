"""Fix a claim before there are runs: what is measured, the margin, how many units, at how many one looks, and the time.

    qerl-bench register mine/claim/first_entropy.yaml out=studies/mine units=12 looks=8,12

Writes a copy of the claim and registered.json to the folder of the study, and prints their seal: post it where you
announce the study, since files can be changed and a post has a date. `qerl-bench check STUDY` refuses a study whose
claim changed afterwards, or whose runs began before.
"""

from __future__ import annotations

from pathlib import Path

from qerl_core.process.arguments import KeyValueParser, output_folder, printable
from qerl_studies.claims.registration import REGISTERED, register


def main(words: list[str]) -> None:
    parser = KeyValueParser(__doc__)
    parser.add_argument("claim", type=Path, help="the file of the claim, claim/NAME.yaml (docs/how-to/own-claim.md)")
    parser.add_argument("--out", type=output_folder, required=True, help="folder of the study, which has no runs yet")
    parser.add_argument("--units", type=int, required=True, help="how many bases, copies or seeds each arm will have")
    looks = "numbers of units at which arms are compared, the last of them all (default: once, at all)"
    parser.add_argument("--looks", type=int, nargs="+", help=looks)
    given = parser.parse_args(words)
    made = register(given.claim, given.units, given.looks or [given.units], given.out)
    for name, value in (
        ("claim", f"{made.title} ({made.expected})"),
        ("measure", f"{made.measure}, margin {made.margin}"),
        ("contrasts", "; ".join(made.contrasts)),
        ("units", f"{made.units}, looks at {', '.join(map(str, made.looks))}"),
        ("date", made.date),
        ("seal", made.seal),
    ):
        print(printable(f"{name:10} {value}"))
    print(given.out / REGISTERED)
