"""What a packed checkpoint says about its bytes, and what of that is read.

`quantization_config` of config.json says it; older checkpoints of ModelOpt have hf_quant_config.json instead. How
activations and the KV cache were to be rounded is left out, and named in `PackedFormat.unused`. Any other field may
change what the weights mean, so one that is unknown here is refused by its name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from qerl_bench.quant.base import BlockFormat, WeightFormat
from qerl_bench.quant.foreign import BITSANDBYTES, COMPRESSED, MODELOPT, RELEASED, SQUARES, Foreign
from qerl_bench.quant.mxfp4 import MXFP4
from qerl_bench.quant.mxfp8 import MXFP8
from qerl_bench.quant.nf4 import NF4
from qerl_bench.quant.nvfp4 import NVFP4
from qerl_bench.quant.symmetric import FP8, INT4, INT8
from qerl_bench.quant.weight_files import REMEDY
from qerl_core.checks import ConfigError, require

PACK_FORMATS: dict[str, type[BlockFormat]] = {  # of compressed-tensors
    "nvfp4-pack-quantized": NVFP4,
    "mxfp4-pack-quantized": MXFP4,
    "mxfp8-quantized": MXFP8,
    "float-quantized": FP8,
    "int-quantized": INT8,
    "pack-quantized": INT4,  # or INT8, as `num_bits` says
}
ALGORITHMS = ("NVFP4", "W4A16_NVFP4")  # of ModelOpt
MIXED = "MIXED_PRECISION", "mixed-precision"  # then groups or layers say more
_READABLE = (
    f"{', '.join(PACK_FORMATS)} of compressed-tensors, {', '.join(ALGORITHMS)} of modelopt, nf4 of bitsandbytes, "
    "gpt-oss's mxfp4, and fp8 in squares of 128 x 128"
)
_ORIGINAL = "give the unquantized model, which is packed while it is read"
_ENTRIES = ("quantization_config", "compression_config")  # of config.json; the second is the earlier name
_SQUARE = {"strategy": "block"}  # what compressed-tensors would say of scales for squares
_KV_CACHE = ("kv_cache_scheme", "kv_cache_quant_algo")
_ACTIVATIONS = ("input_activations", "output_activations")
_KNOWN = {  # fields that are read elsewhere, or say nothing about the weights
    *("quant_method", "quant_algo", "producer", "version", "format", "quantization_status", "run_compressed"),
    *("config_groups", "quantized_layers", "ignore", "exclude_modules", "targets", "weights"),
    *("scale_dtype", "zp_dtype", "observer", "observer_kwargs", "global_compression_ratio"),
}
_KNOWN_OF = {  # the same, of one method alone
    BITSANDBYTES: {
        *("load_in_4bit", "_load_in_4bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant"),
        *("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "llm_int8_skip_modules", "llm_int8_threshold"),
        *("llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight"),
    },
    RELEASED: {"modules_to_not_convert", "dequantize"},
    SQUARES: {
        *("modules_to_not_convert", "ignored_layers", "dequantize", "activation_scheme", "weight_block_size", "fmt"),
        "scale_fmt",  # whatever it is, scales are read by their dtype
    },
}


@dataclass(frozen=True)
class PackedFormat:
    """`method` is quant_method. `unused` says what the checkpoint asks for beyond its weights."""

    method: str
    weight_format: type[BlockFormat]
    unused: tuple[str, ...] = ()


def quantization_config(folder: Path) -> dict[str, Any] | None:
    """What the checkpoint in `folder` says of its packing, without ModelOpt's nesting; None if it is plain."""
    config = _read(folder / "config.json")
    entries = [
        part.get(key) for part in (config, config.get("text_config")) for key in _ENTRIES if isinstance(part, dict)
    ]
    entry = next((entry for entry in entries if entry is not None), None)
    separate = folder / "hf_quant_config.json"
    if entry is None and separate.is_file():
        entry = {"quant_method": MODELOPT} | _read(separate)
    if isinstance(entry, dict) and isinstance(nested := entry.get("quantization"), dict):
        entry = {key: value for key, value in entry.items() if key != "quantization"} | nested
    if entry is not None and not isinstance(entry, dict):
        raise ConfigError(f"{folder}: quantization_config={entry!r} of config.json is no mapping; {REMEDY}")
    return entry


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        content = None
    if not isinstance(content, dict):
        raise ConfigError(f"{file.parent} has no readable {file.name}; {REMEDY}")
    return content


def packing_of(folder: Path, requested: WeightFormat) -> PackedFormat:
    """How the weights in `folder` are packed. Raises ConfigError unless that is readable, and is `requested`."""
    config = _as_read(quantization_config(folder) or {})
    method = str(config.get("quant_method")).removesuffix("_fp4")  # vLLM says modelopt_fp4
    name, stored = _stored(folder, method, config)
    require(
        isinstance(requested, stored),
        f"{folder} is packed as {name}, and the run asks for quant={requested.name}; "
        f"use quant={stored.__name__.lower()}",
    )
    assert isinstance(requested, BlockFormat)
    try:
        said = _weights(config) if method == COMPRESSED else [_SQUARE if method == SQUARES else config]
        requested.check_stored(str(folder), said)
        return PackedFormat(method, stored, tuple(dict.fromkeys(_unused(folder, config, requested))))
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder}: its quantization config is not of {method} ({error}); {_ORIGINAL}") from None


def _as_read(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` without entries that say nothing about the weights by their values, and with what compressed-tensors
    takes where an entry of a group's weights is left out."""
    plain = {key: value for key, value in config.items() if not _is_void(key, value)}
    groups = plain.get("config_groups")
    if plain.get("quant_method") == COMPRESSED and isinstance(groups, Mapping):
        plain["config_groups"] = {name: _group_as_read(group) for name, group in groups.items()}
    return plain


def _is_void(key: str, value: Any) -> bool:
    """Whether an entry of the whole checkpoint asks for nothing: weights that are not sparse, or no rotation."""
    if not isinstance(value, Mapping):
        return False
    return (key == "sparsity_config" and value.get("format") == "dense") or (
        key == "transform_config" and not value.get("config_groups")
    )


def _group_as_read(group: Any) -> Any:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        return group
    size, said = weights.get("group_size"), dict(weights)
    if said.get("strategy") is None:
        said["strategy"] = "tensor" if size is None else "channel" if size == -1 else "group"
    if said["strategy"] == "channel" and size == -1:
        del said["group_size"]
    if str(said.get("actorder")).lower() in ("static", "weight"):  # in which order GPTQ chose codes that lie as always
        del said["actorder"]
    return {**group, "weights": said}


def _stored(folder: Path, method: str, config: Mapping[str, Any]) -> tuple[str, type[BlockFormat]]:
    """Name and class of the format in which all packed layers are stored."""
    readable: Mapping[str, type[BlockFormat]] = {}
    if method == COMPRESSED:
        named, readable = _named(config, "format", "config_groups"), PACK_FORMATS
        bits = {int(weights["num_bits"]) for weights in _weights(config) if weights.get("num_bits")}
        require(
            "int-quantized" not in named.values() or bits <= {8},
            f"{folder} is packed as int-quantized with num_bits={min(bits, default=8)}, which are codes of "
            f"fewer bits in a byte each; no format here stores them, {_ORIGINAL}",
        )
        if 8 in bits:
            readable = PACK_FORMATS | {"pack-quantized": INT8}
    elif method == MODELOPT:
        named, readable = _named(config, "quant_algo", "quantized_layers"), {name: NVFP4 for name in ALGORITHMS}
    elif method == RELEASED:
        named, readable = {"": method}, {RELEASED: MXFP4}
    elif method == SQUARES:
        size, kind = config.get("weight_block_size"), config.get("fmt") or "e4m3"
        require(
            size == [128, 128] and kind == "e4m3",
            f"{folder} is packed as fp8 with weight_block_size={size}, fmt={kind}; readable are codes in e4m3 with a "
            f"scale for each 128 x 128, {_ORIGINAL}",
        )
        named, readable = {"": method}, {SQUARES: FP8}
    else:
        named = {"": str(config.get("bnb_4bit_quant_type") or "")}
        if method == BITSANDBYTES and config.get("load_in_4bit"):
            readable = {"nf4": NF4}
    for place, name in named.items():
        at = f" in {place}" if place else ""
        require(
            name in readable,
            f"{folder} is packed by {method}{f' as {name}' if name else ''}{at}; readable are {_READABLE}. Otherwise "
            f"{_ORIGINAL}",
        )
    formats = {readable[name]: name for name in named.values()}
    require(len(formats) == 1, f"{folder} mixes {' and '.join(formats.values())}; {_ORIGINAL}")
    ((stored, name),) = formats.items()
    return name, stored


def _named(config: Mapping[str, Any], key: str, parts: str) -> dict[str, str]:
    """Format names by config path: one of a uniform checkpoint, several of a mixed one."""
    whole, places = config.get(key), config.get(parts)
    if isinstance(places, Mapping) and places and whole in (None, *MIXED):
        named = {f"{parts}.{place}": part for place, part in places.items()}
        return {place: str(part.get(key) if isinstance(part, Mapping) else part) for place, part in named.items()}
    return {"": str(whole)}


def _weights(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What compressed-tensors says of the weights, for each group of layers."""
    groups = config.get("config_groups")
    parts = groups.values() if isinstance(groups, Mapping) else ()
    return [part["weights"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("weights"), dict)]


def foreign_of(weight_format: WeightFormat) -> Foreign:
    """The names of a format in checkpoints. Raises ConfigError if it has none, or packs nothing."""
    name, foreign = weight_format.name, weight_format.foreign()
    require(
        isinstance(weight_format, BlockFormat),
        f"quant={name} packs nothing to export; use a format that does: quant=nvfp4",
    )
    if foreign is None:
        raise ConfigError(
            f"quant={name} has no name in checkpoints of other programs, such as {COMPRESSED} and {BITSANDBYTES}, so "
            "its codes cannot be exported. What a run in it has trained is written in 16 bits: qerl-bench export "
            "runs/NAME out=DIR"
        )
    return foreign


def config_entry(weight_format: WeightFormat, ignore: list[str], dtype: str) -> dict[str, Any]:
    """`quantization_config` of config.json. `ignore` names the linear layers that are not packed.

    Raises ConfigError for a format that has no name there.
    """
    foreign = foreign_of(weight_format)
    if foreign.method == BITSANDBYTES:
        own = {"bnb_4bit_compute_dtype": dtype, "llm_int8_skip_modules": ignore}
        return {"quant_method": foreign.method, **foreign.scheme, **own}
    name, weights = foreign.names[0], dict(foreign.scheme)
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "format": name}
    return {
        "quant_method": foreign.method,
        "format": name,
        "quantization_status": "compressed",
        "ignore": ignore,
        "config_groups": {"group_0": group},
    }


def _allowed(foreign: Foreign) -> dict[str, tuple[Any, ...]]:
    """The values that what compressed-tensors says of weights in a format can have."""
    scheme = {key: value for key, value in foreign.scheme.items() if key not in _KNOWN and value is not False}
    allowed: dict[str, tuple[Any, ...]] = {key: (value,) for key, value in scheme.items()}
    allowed["format"] = (*foreign.names, *MIXED)
    if scheme["strategy"] == "tensor_group":
        allowed["strategy"] = ("tensor_group", "group")
    return allowed


def _unused(folder: Path, config: Mapping[str, Any], requested: BlockFormat) -> Iterator[str]:
    """What `config` asks for beyond the weights. Raises ConfigError at a field that it does not know, or its value."""
    known = _KNOWN | _KNOWN_OF.get(str(config.get("quant_method")), set())
    foreign = foreign_of(requested)
    allowed = _allowed(foreign) if foreign.method == COMPRESSED else {}
    parts: dict[str, Any] = {"": config}
    parts |= {f"config_groups.{name}": group for name, group in (config.get("config_groups") or {}).items()}
    parts |= {f"{place}.weights": part["weights"] for place, part in parts.items() if place and part.get("weights")}
    for place, part in parts.items():
        for key, value in part.items():
            if key in _KV_CACHE and value:
                yield key
            elif key in _ACTIVATIONS and value:
                yield f"{key} in {value['num_bits']} bits"
            elif key == "activation_scheme" and value:
                yield f"{key}={value}"
            elif value not in allowed[key] if key in allowed and value is not None else value and key not in known:
                raise ConfigError(
                    f"{folder}: its quantization config has {f'{place}.{key}'.lstrip('.')}={shorten(str(value), 80)}, "
                    f"which nothing here can read and which may change what the weights mean; {_ORIGINAL}"
                )
