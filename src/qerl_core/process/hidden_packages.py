"""Keeps transformers and PEFT from importing optional packages that no run needs from them.

bitsandbytes, torchao and scikit-learn take three of the seven seconds in which both are imported. An option that uses
one of them, such as quant=nf4, imports it by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

UNUSED = ("bitsandbytes", "sklearn", "torchao")


@contextmanager
def hidden_packages() -> Iterator[None]:
    """What is imported in this block finds none of UNUSED, unless it was imported before."""
    hidden = [name for name in UNUSED if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # how Python marks a module that cannot be imported
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
