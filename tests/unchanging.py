"""What a run asks of its checkout, and no test changes without saying so, is asked once in a process.

Reads of all sources and three commands of git take as long as a step of a tiny model.
"""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

from qerl_core.rundir import checkout, environment

compute, ask_git = environment.code_digest, checkout._run


@cache
def _digest(read: object) -> str:
    return compute()


@cache
def _git(*words: str) -> subprocess.CompletedProcess[bytes] | None:
    return ask_git(*words)


def _run(*words: str, folder: Path | None = None) -> subprocess.CompletedProcess[bytes] | None:
    ours = folder is None and Path(__file__).resolve().parents[1] == checkout.CHECKOUT
    return _git(*words) if ours else ask_git(*words, folder=folder)


environment.code_digest = lambda: _digest(Path.read_bytes)
checkout._run = _run
