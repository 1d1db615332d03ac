"""Ctrl-C while the program imports what it consists of: one line, code 130, whatever is half imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from qerl_core.process.first_imports import ends_in_a_line

STOPPED_WHILE = """
import os, signal, sys

class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # which whatever started the tests may have ignored
sys.meta_path.insert(0, Stop())
from qerl_bench.__main__ import main
"""


@pytest.mark.parametrize("module", ["difflib", "hydra", "omegaconf.base", "qerl_core.exits"])
def test_ctrl_c_in_the_first_imports_ends_in_one_line(module: str) -> None:
    words = [sys.executable, "-c", STOPPED_WHILE.format(module=module)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "stopped; nothing was begun\n")


def test_behind_them_ctrl_c_is_what_it_was() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with ends_in_a_line():
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with ends_in_a_line():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
