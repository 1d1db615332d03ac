"""Functions that fail when a test says so."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest


@contextmanager
def failing(
    owner: Any,
    name: str,
    error: BaseException | type[BaseException],
    calls: Collection[int] | None = None,
    midway: bool = False,
) -> Iterator[list[int]]:
    """In this block these calls of a function fail, counted from 1 (None: all); yields all calls.

    They do nothing or, `midway`, what they are for.
    """
    function, made = getattr(owner, name), []

    def call(*given: Any, **named: Any) -> Any:
        made.append(len(made) + 1)
        fails = calls is None or made[-1] in calls
        result = None if fails and not midway else function(*given, **named)
        if fails:
            raise error
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call)
        yield made


def shortages(owner: Any, name: str, *calls: int) -> AbstractContextManager[list[int]]:
    """In this block no memory is left in the middle of these calls, counted from 1; yields all calls."""
    import torch

    return failing(owner, name, torch.OutOfMemoryError("Tried to allocate 2.00 GiB"), calls, midway=True)
