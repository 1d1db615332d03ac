"""benchmarks/vllm_decoding.py, with a vLLM that samples on the CPU."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "benchmarks" / "vllm_decoding.py"


def test_even_batches_groups_and_ragged_rollouts(tmp_path: Path) -> None:
    """Each completion has the length that was asked for, or the bench ends."""
    sizes = "--batches 2 --group-batches 8 --ragged 8 --mean 5 --limit 9 --prompt 5 --new 6 --rows 8 --repeats 1"
    model = (
        "--shape tiny --format bf16 --rank 4 --memory 0.2 --words model.hidden_size=64 model.heads=1 model.kv_heads=1"
    )
    command = [sys.executable, str(BENCH), *sizes.split(), *model.split(), "--out", str(tmp_path / "x.csv")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    with (tmp_path / "x.csv").open() as file:
        even, groups, ragged = csv.DictReader(file)
    assert [(row["batch"], row["group"]) for row in (even, groups, ragged)] == [("2", "1"), ("8", "8"), ("8", "8")]
    for row in (even, groups):
        step_s = (float(row["total_s"]) - float(row["read_s"])) / 5
        assert float(row["decode_tok_s"]) == pytest.approx(int(row["batch"]) / step_s, rel=1e-6)
    assert float(ragged["tok_s"]) == pytest.approx(int(ragged["tokens"]) / float(ragged["total_s"]), rel=1e-6)
    assert {row["way"] for row in (even, groups, ragged)} == {"vllm"} and ragged["decode_tok_s"] == ""
