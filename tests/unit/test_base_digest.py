"""What env.json says about the base weights of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from qerl_bench.config import Experiment
from qerl_bench.model.digest import digest_of
from qerl_bench.model.hub import HubModel


def local(folder: Path) -> HubModel:
    return HubModel(name="local", id=str(folder), revision=None, dtype="bfloat16", lr=1e-5)


def test_one_file_has_the_digest_that_sha256sum_prints(
    tmp_path: Path, make_experiment: Callable[..., Experiment]
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text("{}")
    expected = "sha256:" + hashlib.sha256(b"weights").hexdigest()[:16]
    assert digest_of(local(tmp_path), None) == expected
    assert digest_of(make_experiment().model, tmp_path) == expected  # its warm start


def test_any_content_and_any_name_changes_the_digest_of_several_files(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.safetensors").write_text(name)
    found = [digest_of(local(tmp_path), None)]
    (tmp_path / "b.safetensors").write_text("c")
    found.append(digest_of(local(tmp_path), None))
    (tmp_path / "b.safetensors").rename(tmp_path / "c.safetensors")
    found.append(digest_of(local(tmp_path), None))
    assert len(set(found)) == 3


def test_of_a_large_file_blocks_from_the_first_to_the_last_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in (("MAX_WHOLE_BYTES", 20), ("BLOCK_BYTES", 4), ("BLOCKS", 3)):
        monkeypatch.setattr(f"qerl_bench.model.digest.{key}", value)
    content = bytes(range(30))  # blocks at 0, 13 and 26
    (tmp_path / "model.safetensors").write_bytes(content)
    expected = hashlib.sha256(b"30" + content[:4] + content[13:17] + content[26:]).hexdigest()
    assert digest_of(local(tmp_path), None) == f"sha256:{expected[:16]}"


def test_weights_that_are_not_stored_are_told_by_seed_and_shape(
    tmp_path: Path, make_experiment: Callable[..., Experiment]
) -> None:
    assert digest_of(make_experiment("model.seed=3").model, None) == (
        "untrained: hidden_size=32, layers=2, heads=2, kv_heads=1, intermediate_size=64, warm_start_steps=0, seed=3"
    )
    assert digest_of(local(tmp_path), None) is None  # a folder without safetensors
