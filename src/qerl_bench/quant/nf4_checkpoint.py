"""Reads layers that bitsandbytes has packed in NF4, byte for byte."""

from __future__ import annotations

import json

import torch

from qerl_bench.quant.checkpoint import CheckpointReader
from qerl_bench.quant.nf4 import NESTED_BLOCK, NF4
from qerl_bench.quant.weight_files import REMEDY
from qerl_core.checks import ConfigError, require

STATE = ".quant_state.bitsandbytes__nf4"
NF4_PARTS = {"absmax", "quant_map", "nested_absmax", "nested_quant_map", STATE[1:]}
UNPACKED = "give the unquantized model, which is packed while it is read"
_STATE_KEYS = {"quant_type", "blocksize", "dtype", "shape", "nested_blocksize", "nested_dtype", "nested_offset"}
_STORAGES = (torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32)  # bnb_4bit_quant_storage
_SAME_TABLE = 1e-6  # tables of earlier versions differ in the last bit


def read_nf4(
    reader: CheckpointReader, name: str, shape: tuple[int, int], weight_format: NF4
) -> dict[str, torch.Tensor]:
    """The packed tensors of a layer in NF4."""
    from bitsandbytes.functional import create_dynamic_map, get_4bit_type

    key = f"{name}.weight"
    try:
        state = json.loads(bytes(reader.read(key + STATE).cpu().tolist()))
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ConfigError(f"{reader.folder}: {key + STATE} is not readable; {REMEDY}") from None
    double = "nested_offset" in state
    require(
        state.get("blocksize") == NF4.block
        and tuple(state.get("shape", ())) == shape
        and state.get("nested_blocksize", NESTED_BLOCK) == NESTED_BLOCK
        and state.get("quant_type", "nf4") == "nf4"
        and double == weight_format.double_quant
        and state.keys() <= _STATE_KEYS,
        f"{reader.files[key]}: {key} is packed with {state}; readable are NF4, blocks of {NF4.block}, nested blocks of "
        f"{NESTED_BLOCK}, and the shape {shape}; {UNPACKED}",
    )
    for table, known in {"quant_map": get_4bit_type("nf4", "cpu"), "nested_quant_map": create_dynamic_map()}.items():
        if (name := f"{key}.{table}") in reader:
            stored = reader.read(name).cpu().float()
            same = stored.shape == known.shape and torch.allclose(stored, known, rtol=0, atol=_SAME_TABLE)
            require(same, f"{reader.files[name]}: {name} is another table than that of NF4; {UNPACKED}")
    blocks = shape[0] * shape[1] // NF4.block
    packed = {
        "weight": _bytes(reader, key, shape[0] * shape[1] // 2),
        "absmax": _scales(reader, f"{key}.absmax", blocks),
    }
    if double:
        packed["nested_absmax"] = reader.read(f"{key}.nested_absmax", (-(-blocks // NESTED_BLOCK),))
        packed["nested_offset"] = torch.tensor([state["nested_offset"]], device=packed["absmax"].device)
    dtype = torch.uint8 if double else torch.float32
    require(packed["absmax"].dtype == dtype, f"{key}.absmax is stored as {packed['absmax'].dtype}, not as {dtype}")
    return packed


def _scales(reader: CheckpointReader, key: str, blocks: int) -> torch.Tensor:
    """The scales `key` (blocks,). Raises ConfigError if bitsandbytes has put them in the order of its CPU kernel."""
    stored = reader.read(key)
    require(
        stored.dim() == 1 or stored.numel() != blocks,
        f"{reader.files[key]}: {key} has the shape {tuple(stored.shape)} and {stored.dtype}, in which bitsandbytes "
        "keeps scales on a CPU after a model has generated there, transposed and rounded. Save the checkpoint before "
        f"it generates, or from a GPU; or {UNPACKED}",
    )
    reader.check_shape(key, stored.shape, (blocks,))
    return stored


def _bytes(reader: CheckpointReader, key: str, count: int) -> torch.Tensor:
    """The codes `key` as bytes (count, 1), which bitsandbytes may store as numbers of 16 or 32 bits."""
    stored = reader.read(key)
    require(
        stored.dtype in _STORAGES,
        f"{reader.files[key]}: {key} is stored as {stored.dtype}; bnb_4bit_quant_storage may be "
        f"{', '.join(str(dtype).removeprefix('torch.') for dtype in _STORAGES)}; {UNPACKED}",
    )
    codes = stored.contiguous().flatten().view(torch.uint8).view(-1, 1)
    reader.check_shape(key, codes.shape, (count, 1))
    return codes
