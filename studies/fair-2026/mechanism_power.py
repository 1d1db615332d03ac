"""How often mechanism/protocol.md gives each word, in per cent of studies: higher / lower / no difference.

    python studies/fair-2026/mechanism_power.py studies=5000     # some minutes

Plants points above `bf16`; a run has an error of 1.6 points, each of two sessions one of 0.7, as in simulate.py.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from mechanism import ACTS, FIRST_TABLE, FORMATS, MARGIN
from rates_analysis.contrasts import tested

from qerl_core.process.arguments import KeyValueParser
from qerl_studies.tables.markdown import markdown_table

PLANTED = {  # of the arms in FORMATS
    "nothing": (0, 0, 0, 0, 0),
    "damage alone": (0, -4.7, 0, -4.7, -4.7),
    "entropy alone": (0, -4.7, -4.7, 0, 0),
    "half is entropy": (0, -4.7, -2.35, -2.35, -2.35),
    "damage, and entropy helps": (0, -4.7, 2.35, -7.05, -7.05),
}


def main(arguments: list[str] | None = None) -> None:
    parser = KeyValueParser(__doc__)
    parser.add_argument("--studies", type=int, default=1000, help="a row (default: 1000)")
    studies, lines = parser.parse_args(arguments).studies, []
    places = pd.MultiIndex.from_product([FORMATS, range(8)], names=["arm", "copy"]).to_frame(index=False)
    rows = places.assign(session=places["copy"] // 4, first=0.0, last=1.0)
    for name, planted in PLANTED.items():
        draw, found = np.random.default_rng(0), []
        for _ in range(studies):
            shift = 0.7 * draw.standard_normal(2)
            late = np.repeat(planted, 8) + shift[rows["session"]] + 1.6 * draw.standard_normal(len(rows))
            words = tested(rows.assign(late=late / 100), FIRST_TABLE, MARGIN)
            found.append([[one.word == word for word in ACTS] for one in words.values()])
        shares = 100 * np.mean(found, axis=0)
        lines.append([name, *(" / ".join(f"{share:.0f}" for share in each) for each in shares)])
    print(markdown_table(["planted", *FIRST_TABLE], lines))


if __name__ == "__main__":
    main()
