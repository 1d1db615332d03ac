"""A program whose output cannot be written goes on, and one that has no output writes nothing into its files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src"
PROGRAM = """
import logging, os, sys
from qerl_core.process.terminal import lasting_output
with lasting_output():
    logging.basicConfig(level="INFO", stream=sys.stdout)
    file = open("record", "w")
    for line in range(20000):
        print("line", line)
    logging.getLogger().info("logged")
    print("told", file=sys.stderr, flush=True)
    os.system("echo from a child")
    file.write("whole")
"""


@pytest.mark.parametrize(
    ("redirection", "says"),
    [("| head -1", "line 0"), (">/dev/full", ""), (">&-", ""), ("<&- >&- 2>&-", ""), (">/dev/full 2>/dev/full", "")],
)
def test_output_may_end(tmp_path: Path, redirection: str, says: str) -> None:
    command = f'set -o pipefail; {sys.executable} -c "$PROGRAM" {redirection}'
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "PROGRAM": PROGRAM}
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == says
    assert done.stderr.strip() == ("" if "2>" in redirection else "told")
    assert (tmp_path / "record").read_text() == "whole"


IN_ORDER = """
import sys
from qerl_core.process.terminal import lasting_output
with lasting_output():
    for line in range(6):
        print(line, file=(sys.stdout, sys.stderr)[line % 2])
"""


def test_results_and_the_rest_keep_their_order_in_one_file() -> None:
    program = [sys.executable, "-c", IN_ORDER]
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    done = subprocess.run(program, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.stdout.split() == ["0", "1", "2", "3", "4", "5"]
