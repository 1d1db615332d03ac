"""The cards of `card=`, by what their data sheets say: memory, its bandwidth, and BF16 without sparsity.

Sources: NVIDIA's data sheets of H200 and H100 SXM (2024), A100 80 GB SXM (2021), and the Ada whitepaper (2022), whose
number for the RTX 4090 is that of FP32 accumulation. Left out: other cards, which are refused by name.
"""

from __future__ import annotations

from typing import NamedTuple

from qerl_core.checks import require
from qerl_core.process.cards import listed_gpus


class Card(NamedTuple):
    """One kind of GPU."""

    name: str
    model: str  # as nvidia-smi names it, or a part of that
    gib: float  # that a process finds
    bandwidth: float  # bytes a second
    flops: float  # of dense BF16 matmuls, a second


CARDS = {
    card.name: card
    for card in (
        Card("h200", "H200", 139.8, 4.8e12, 989e12),
        Card("h100", "H100", 79.1, 3.35e12, 989e12),
        Card("a100", "A100", 79.1, 2.04e12, 312e12),
        Card("4090", "RTX 4090", 23.5, 1.01e12, 165e12),
    )
}
MEASURED = "h200"  # the card of the committed tables


def card_of(wanted: str | None) -> Card | None:
    """The card called `wanted`, or the first that is here; None without one. Raises ConfigError for any other."""
    if wanted is not None:
        require(
            wanted in CARDS, f"card must be one of {', '.join(CARDS)}, got {wanted}; of other cards nothing is known"
        )
        return CARDS[wanted]
    there = next(iter(listed_gpus().values()), None)
    if there is None:
        return None
    found = next((card for card in CARDS.values() if card.model in there), None)
    require(found is not None, f"nothing is known of {there}: name a card that is, card={'|'.join(CARDS)}")
    return found
