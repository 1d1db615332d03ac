"""The command line of what reads runs and writes files: commands, and scripts of studies."""

from __future__ import annotations

import argparse
from pathlib import Path

from qerl_core.process.arguments import KeyValueParser, output_folder


def parser_for(description: str | None, out: str = "figures") -> argparse.ArgumentParser:
    """Takes runs, and the folder to write to."""
    parser = KeyValueParser(description)
    parser.add_argument("runs", nargs="+", type=Path, help="folders that hold runs, or single runs")
    without = "leave out runs by name, in which * stands for anything"
    parser.add_argument("--except", dest="without", nargs="+", metavar="NAME", default=[], help=without)
    parser.add_argument("--out", type=output_folder, default=out, help=f"folder to write to (default: {out})")
    parser.add_argument("--mixed-code", action="store_true", help="accept runs of different versions of the code")
    return parser
