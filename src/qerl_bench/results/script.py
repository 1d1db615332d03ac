"""How every script of analysis/ ends: what a user did wrong, and what was left out of a run, is said in a line each."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable

from qerl_bench.errors import BadInput


def run(main: Callable[[], None]) -> None:
    """Call `main`; print warnings without their place in the code, and leave with exit code 2 on BadInput."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_place, **_more: print(message, file=sys.stderr)
        try:
            main()
        except BadInput as error:
            print(error, file=sys.stderr)
            sys.exit(2)
