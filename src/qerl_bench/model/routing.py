"""Which experts a mixture sends tokens to: noise on a norm that feeds a router changes that.

Read from the calls of the experts, which transformers tells the experts of each token. Left out: Llama 4, whose experts
get all tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

MAX_TOKENS = 1024  # of a forward pass


@contextmanager
def chosen_experts(experts: Sequence[torch.nn.Module], places: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Context for one forward pass. Gives, for each of the modules `experts`, the experts (R, k) of some of its tokens.

    `places` (M,) are the tokens that count; the first MAX_TOKENS of them are recorded.
    """
    chosen: list[torch.Tensor] = []
    some = places[:MAX_TOKENS]

    def record(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        chosen.extend(value[some] for value in values if not value.is_floating_point())

    with ExitStack() as stack:
        for module in experts:
            stack.callback(module.register_forward_pre_hook(record, with_kwargs=True).remove)
        yield chosen


def changed_choices(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> torch.Tensor:
    """For each choice in `after` whether it was none in `before`, whatever its rank; both (R, k) for each layer."""
    pairs = zip(before, after, strict=True)
    return torch.cat([(new[:, :, None] != old[:, None, :]).all(-1).flatten() for old, new in pairs])
