"""What the scripts in analysis/ share: their command line, and how they report errors."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

from qerl_bench.arguments import KeyValueParser
from qerl_bench.checks import ConfigError


def parser_for(description: str | None) -> argparse.ArgumentParser:
    """The command line of a script that reads runs and writes files."""
    parser = KeyValueParser(description)
    parser.add_argument("runs", nargs="+", type=Path, help="folders that hold runs, or single runs")
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder to write to (default: figures)")
    parser.add_argument("--mixed-code", action="store_true", help="accept runs of different versions of the code")
    return parser


def guarded(main: Callable[[], None]) -> None:
    """Run a script's main: a warning becomes one line, a ConfigError its message and exit code 2."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_place, **_more: print(message, file=sys.stderr)
        try:
            main()
        except ConfigError as error:
            print(error, file=sys.stderr)
            sys.exit(2)
