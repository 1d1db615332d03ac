"""What the benches compute from their times, and which adapters they give to a layer; needs no GPU."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from qerl_kernels import decode_configs
from qerl_kernels.decode_configs import Config

BENCH = Path(__file__).parents[2] / "kernels" / "bench"


@pytest.fixture(autouse=True)
def _as_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bench finds `timing` in its own folder."""
    monkeypatch.syspath_prepend(str(BENCH))


def test_decode_speed_leaves_out_reading_and_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that reads in 100 ms, launches a step in 30, records in 80 and replays in 2; one round is slow."""
    bench, calls = importlib.import_module("decoding"), []

    def seconds(way: str, policy: Any, batch: int, prompt: int, new: int, limit: int) -> tuple[float, float]:
        calls.append((new, limit))
        slow = 0.5 if len(calls) in (8, 9, 10) else 0.0  # the first call compiles
        replays = new - 2
        return 0.1 + (0.03 if new > 1 else 0) + (0.08 + 0.002 * replays if new > 2 else 0) + slow * new, 1.0 + new

    monkeypatch.setattr(bench, "seconds", seconds)
    (row,) = bench.measure(None, "recorded", [8], prompt=256, new=256, repeats=5)
    assert calls == [(3, 256), *[(1, 256), (3, 256), (256, 256)] * 5]
    assert row["step_ms"] == pytest.approx(2.0) and row["step_ms_least"] == pytest.approx(2.0)
    assert row["step_ms_most"] == pytest.approx(502.0)
    assert row["decode_tok_s"] == pytest.approx(8 / 0.002)
    assert row["read_s"] == pytest.approx(0.1)
    assert row["record_s"] == pytest.approx(0.03 + 0.08 - 0.002)  # one step that was launched, and the recording
    assert row["peak_gib"] == 257.0 and row["repeats"] == 5
    (row,) = bench.measure(None, "transformers", [8], prompt=256, new=256, repeats=2)
    assert row["record_s"] is None


def test_it_runs_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--shape tiny --formats nvfp4 --ranks 4 --batches 2 --slow --prompt 5 --new 6 --repeats 1"
    monkeypatch.setattr(sys, "argv", ["decoding.py", *words.split(), "--out", str(tmp_path / "x.csv")])
    importlib.import_module("decoding").main()
    header, row = (tmp_path / "x.csv").read_text().splitlines()
    found = dict(zip(header.split(","), row.split(","), strict=True))
    assert (found["shape"], found["batch"], found["new"]) == ("tiny", "2", "6") and float(found["total_s"]) > 0
    monkeypatch.setattr(sys, "argv", ["decoding.py", "--new", "3"])
    with pytest.raises(SystemExit):
        importlib.import_module("decoding").main()
    assert "--new must be above 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("layer", "rank", "together"),
    [("7B qkv", 32, 96), ("32B gate_up", 32, 64), ("7B down", 32, 32), ("7B o", 128, 128), ("7B qkv", 43, 0),
     ("7B gate_up", 65, 0), ("7B qkv", 0, 0)],
)  # fmt: skip
def test_a_search_has_the_adapters_of_a_run(layer: str, rank: int, together: int) -> None:
    """Query, key and value are one layer with three adapters; more ranks than 128 are not fused."""
    assert importlib.import_module("gemm").concatenated_rank(layer, rank) == together


def test_a_table_keeps_the_rank_that_it_was_measured_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = decode_configs.cache_file("some GPU")
    first, second = Config(128, 16, 8, 3, 4, 3), Config(64, 8, 4, 2, 8, 2)
    decode_configs.write_table(path, {(64, 128): {16: first}}, lora_rank=32)
    decode_configs.write_table(path, {(64, 128): {8: second}})
    entries = json.loads(path.read_text())["64x128"]
    assert {size: entry["lora_rank"] for size, entry in entries.items()} == {"16": 32, "8": 0}
    assert decode_configs.table("some GPU") == {"64x128": {"16": first, "8": second}}
    decode_configs.table.cache_clear()
