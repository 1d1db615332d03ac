"""What a packed checkpoint says beside its bytes: values decide whether that changes the weights, not keys."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from qerl_bench.quant.packed_config import config_entry, packing_of
from qerl_core.checks import ConfigError
from qerl_core.options.names import option

PACKED = ("nvfp4", "mxfp4", "mxfp8", "fp8", "int8", "int4")


def entry_of(name: str) -> dict[str, Any]:
    """What an export of the format says."""
    return json.loads(json.dumps(config_entry(option("quant", name), ["lm_head"], "bfloat16")))


def packing(folder: Path, name: str, entry: dict[str, Any]) -> Any:
    (folder / "config.json").write_text(json.dumps({"quantization_config": entry}))
    return packing_of(folder, option("quant", name))


def weights_of(entry: dict[str, Any]) -> dict[str, Any]:
    weights: dict[str, Any] = entry["config_groups"]["group_0"]["weights"]
    return weights


# --- checkpoints of GPTQ: https://github.com/neuralmagic/nm-vllm/issues/405 and ---------------------------------------
# https://github.com/vllm-project/llm-compressor/issues/1815


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("order", ["static", "weight", "STATIC", False, None])
def test_the_order_in_which_codes_were_chosen_changes_no_weight(tmp_path: Path, name: str, order: object) -> None:
    plain, entry = packing(tmp_path, name, entry_of(name)), entry_of(name)
    weights_of(entry)["actorder"] = order
    assert packing(tmp_path, name, entry) == plain


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("order", ["group", "dynamic", True])
def test_an_order_that_needs_an_index_is_refused(tmp_path: Path, name: str, order: object) -> None:
    entry = entry_of(name)
    weights_of(entry)["actorder"] = order
    with pytest.raises(ConfigError, match=rf"actorder={order}.*give the unquantized model"):
        packing(tmp_path, name, entry)


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_a_group_of_all_weights_is_a_row(tmp_path: Path, name: str) -> None:
    plain = packing(tmp_path, name, entry_of(name))
    for said in ({"strategy": "channel", "group_size": -1}, {"strategy": None, "group_size": -1}):
        entry = entry_of(name)
        weights_of(entry).update(said)
        assert packing(tmp_path, name, entry) == plain
    for said in ({"strategy": None, "group_size": None}, {"strategy": "channel", "group_size": 64}):
        entry = entry_of(name)
        weights_of(entry).update(said)
        with pytest.raises(ConfigError, match=r"strategy=tensor|group_size=64"):
            packing(tmp_path, name, entry)


@pytest.mark.parametrize("name", PACKED)
def test_entries_that_ask_for_nothing_are_passed_over_and_others_named(tmp_path: Path, name: str) -> None:
    plain, entry = packing(tmp_path, name, entry_of(name)), entry_of(name)
    dense = {"sparsity_config": {"format": "dense"}, "transform_config": {"config_groups": {}}}
    assert packing(tmp_path, name, entry | dense) == plain
    for key, value in {
        "sparsity_config": {"format": "sparse-24-bitmask"},
        "transform_config": {"config_groups": {"R1": {"type": "hadamard"}}},
    }.items():
        with pytest.raises(ConfigError, match=rf"{key}=.*give the unquantized model"):
            packing(tmp_path, name, entry | {key: value})


# --- advice in a circle: W4AFP8 of llm-compressor ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int4", "int8"])
def test_codes_of_four_bits_in_bytes_are_refused_at_once(tmp_path: Path, name: str) -> None:
    entry = entry_of("int4")
    entry["format"] = entry["config_groups"]["group_0"]["format"] = "int-quantized"
    with pytest.raises(ConfigError, match=r"num_bits=4.*give the unquantized model") as caught:
        packing(tmp_path, name, entry)
    assert "use quant" not in str(caught.value)


VALUES: dict[str, tuple[Any, ...]] = {
    "num_bits": (2, 4, 8, 16), "type": ("int", "float"), "symmetric": (False,), "dynamic": (True,),
    "strategy": ("tensor", "channel", "group", "block", "token", None), "group_size": (-1, 0, 16, 32, 128, None),
}  # fmt: skip


@pytest.mark.parametrize("asked", [*PACKED, "bf16", "nf4"])
def test_advice_ends_at_a_format_or_at_the_unquantized_model(tmp_path: Path, asked: str) -> None:
    for name, (key, values) in product(PACKED, VALUES.items()):
        for value in values:
            weights_of(entry := entry_of(name))[key] = value
            tried: list[str | None] = [None, asked]
            while word := tried[-1]:
                try:
                    tried.append(packing(tmp_path, word, entry) and None)
                except ConfigError as error:
                    found = re.search(r"use quant=(\w+)", str(error))
                    assert found or re.search(r"give the unquantized model|use quant\.", str(error)), (entry, error)
                    tried.append(found and found[1])
                assert len(tried) <= 4, (entry, tried)


# --- scales that bitsandbytes keeps in the order of its CPU kernel, and saves so --------------------------------------


def test_transposed_scales_of_nf4_are_refused_with_their_cause(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from safetensors.torch import save_file

    from qerl_bench.quant.checkpoint import CheckpointReader
    from qerl_bench.quant.nf4_checkpoint import STATE, read_nf4

    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [8, 128]}
    tensors = {
        "layer.weight": torch.arange(8 * 64, dtype=torch.uint8).view(-1, 1),
        f"layer.weight{STATE}": torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8),
    }
    scales = torch.linspace(0.5, 1.5, 16)

    def read(absmax: torch.Tensor) -> dict[str, torch.Tensor]:
        save_file(tensors | {"layer.weight.absmax": absmax}, tmp_path / "model.safetensors")
        return read_nf4(CheckpointReader(tmp_path, "cpu"), "layer", (8, 128), option("quant", "nf4"))

    assert torch.equal(read(scales)["absmax"], scales)
    for shape in ((2, 8), (8, 2), (16, 1), (1, 16), (4, 4), (2, 2, 4)):
        with pytest.raises(
            ConfigError, match=rf"absmax has the shape {re.escape(str(shape))}.*CPU.*before.*it generates"
        ):
            read(scales.view(8, 2).T.reshape(shape).contiguous().bfloat16())
    for wrong in (scales[:-1], scales.repeat(2), scales.bfloat16(), scales.half(), scales.double(), scales.byte()):
        with pytest.raises(ConfigError, match="absmax"):
            read(wrong)
