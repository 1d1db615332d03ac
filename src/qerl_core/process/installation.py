"""Where the files of this package are, in a checkout or in an installed wheel, and how to start it as a program."""

from __future__ import annotations

import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
_SHIPPED = PACKAGE / "conf"  # in a wheel, see pyproject.toml
CHECKOUT = None if _SHIPPED.is_dir() else PACKAGE.parents[1]  # None: installed from a wheel
CONF_DIR = CHECKOUT / "conf" if CHECKOUT else _SHIPPED


def run_command(ranks: int = 1) -> list[str]:
    """The words that start a run in a process of its own, or in `ranks` of them by torchrun; overrides follow."""
    start = [str(CHECKOUT / "src" / "run.py")] if CHECKOUT else ["-m", "qerl_bench", "run"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return [sys.executable, *torchrun, *start]
