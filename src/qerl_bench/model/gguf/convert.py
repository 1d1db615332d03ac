"""A GGUF file as an ordinary checkpoint folder: dequantized once, kept, and used by later runs.

Two matrices for embedding and head are one tied matrix if they differ by no more than their rounding; then the finer
one serves both. The folder has a file of its own, gguf.json, that says what the weights have been through.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from qerl_bench.model.digest import DIGITS, file_digest
from qerl_bench.model.gguf.architecture import EMBEDDING, HEAD, Architecture, architecture_of, config_of, places
from qerl_bench.model.gguf.header import Header, read_header, require_file
from qerl_bench.model.gguf.vocabulary import stop_tokens, write_tokenizer
from qerl_bench.model.gguf.weights import (
    Dither,
    bits_per_weight,
    cell_widths,
    check_kinds,
    chunks,
    dequantized,
    has_known_cells,
    values,
    was_rounded,
)
from qerl_bench.process.progress import phase
from qerl_bench.rundir.durable import atomically, make_folder
from qerl_bench.rundir.locks import wait_for_lock

log = logging.getLogger(__name__)
VERSION = 1  # of what is written here; another one is converted again
RECORD = "gguf.json"
SHARD_BYTES = 4 * 2**30
THREADS = 8  # each holds some CHUNKs of a tensor
ONE_ROUNDING = 1.5  # two roundings of one row differ by 0.85 to 1.07 of what their cells give


def describe(path: Path, dither: Dither | None, folder: Path) -> Header:
    """Check the file and write what it says of the model to `folder`: config.json and the tokenizer, no weights.

    Raises ConfigError for whatever keeps it from being read.
    """
    header = read_header(path)
    config = config_of(header)
    check_kinds(header, dither)
    write_tokenizer(header, folder)
    from transformers import PreTrainedTokenizerFast, __version__

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    ends = {"eos_token_id": stop_tokens(header, tokenizer)}
    for name, number in (("bos", tokenizer.bos_token_id), ("pad", tokenizer.pad_token_id)):
        ends[f"{name}_token_id"] = number
    _write(folder / "config.json", config | ends | {"transformers_version": __version__})
    _write(folder / "generation_config.json", ends)
    return header


def converted(path: Path, dither: Dither | None, dtype: str, cache: Path) -> Path:
    """The folder in `cache` with the weights of the file in `dtype`, made now if it is not there.

    Another path, size or time of change counts as another file: to hash one of 20 GB takes a minute, in every run.
    Raises ConfigError as `read_header`.
    """
    require_file(path)
    state = path.stat()
    file = hashlib.sha256(f"{path.resolve()} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()
    drawn = "" if dither is None else f"-dither{dither.seed}x{dither.scale:g}"
    folder = cache / f"{path.stem}-{file[:DIGITS]}-v{VERSION}-{dtype}{drawn}"
    make_folder(cache)
    with wait_for_lock(cache / f".{folder.name}.lock", f"the conversion of {path.name}"):
        if not folder.is_dir():
            told = f"dequantizing {path.name}, done once, then kept in {folder}"
            with atomically(folder) as writing, phase(told):
                writing.mkdir()
                _convert(path, dither, dtype, writing)
    return folder


def record_of(folder: Path | None) -> dict[str, Any] | None:
    """What the weights in a checkpoint folder have been through; None if they are not of a GGUF file."""
    file = None if folder is None else folder / RECORD
    return None if file is None or not file.is_file() else json.loads(file.read_text())


def told(record: Mapping[str, Any]) -> str | None:
    """A sentence about weights that were rounded before; None if they were not."""
    if not record["rounded"]:
        return None
    text = (
        f"{record['file']}: these {record['stored_bits']}-bit weights were rounded to {record['bits_per_weight']:.1f} "
        "bits a weight before"
    )
    seed, scale = record["dither"], record["dither_scale"]
    if seed is None:
        return text
    leaves = ", which leaves it" if scale > 1 else ""
    return f"{text}; model.dither={seed} moves each by {scale:g} times the variance of its rounding cell{leaves}"


def _convert(path: Path, dither: Dither | None, dtype: str, folder: Path) -> None:
    header = describe(path, dither, folder)
    config = json.loads((folder / "config.json").read_text())
    wanted = places(architecture_of(header), config["num_hidden_layers"])
    sources = {place: name for name, place in wanted.items() if name in header.tensors}
    tied = HEAD not in header.tensors or is_one_matrix(header)
    if tied and HEAD in header.tensors:
        del sources[wanted[HEAD]]
        sources[wanted[EMBEDDING]] = serving = finer(header)
        log.info("%s: embedding and head are one tied matrix, rounded twice; %s serves both", path.name, serving)
    _write(folder / "config.json", config | {"tie_word_embeddings": tied, "dtype": dtype})
    _write_weights(header, dither, dtype, sources, config, folder)
    kinds: dict[str, int] = {}
    for tensor in header.tensors.values():
        kinds[tensor.kind] = kinds.get(tensor.kind, 0) + 1
    record = {
        "file": path.name,
        "digest": f"sha256:{file_digest(path)[:DIGITS]}",
        "tensors": kinds,
        "rounded": was_rounded(header),
        "bits_per_weight": round(bits_per_weight(header), 3),
        "stored_bits": 32 if dtype == "float32" else 16,
        "tied": tied,
        "dither": dither and dither.seed,
        "dither_scale": dither and dither.scale,
    }
    _write(folder / RECORD, record)


def is_one_matrix(header: Header) -> bool:
    """Whether head and embedding differ, in each row, by no more than two roundings of the same numbers.

    False, and a line in the log, if one has a type whose cells are not known.
    """
    both = [header.tensors[name] for name in (EMBEDDING, HEAD)]
    kinds = [tensor.kind for tensor in both]
    if not all(map(has_known_cells, kinds)):
        log.info(
            "%s: %s and %s have the types %s; whether they are one tied matrix is not known of these, so both are kept",
            *(header.path.name, EMBEDDING, HEAD, " and ".join(kinds)),
        )
        return False
    for raws in zip(*(chunks(header, tensor) for tensor in both), strict=True):
        gap = np.square(np.subtract(*(values(raw, kind) for raw, kind in zip(raws, kinds, strict=True)))).mean(1)
        cells = sum(np.square(cell_widths(raw, kind)).mean(1) for raw, kind in zip(raws, kinds, strict=True))
        if (gap > ONE_ROUNDING**2 * cells / 12).any():
            return False
    return True


def finer(header: Header) -> str:
    """Embedding or head, whichever has the narrower cells."""
    widths = {}
    for name in (EMBEDDING, HEAD):
        tensor = header.tensors[name]
        widths[name] = sum(float(np.square(cell_widths(raw, tensor.kind)).sum()) for raw in chunks(header, tensor))
    return min(widths, key=lambda name: widths[name])


def _write_weights(
    header: Header,
    dither: Dither | None,
    dtype: str,
    sources: Mapping[str, str],
    config: Mapping[str, Any],
    folder: Path,
) -> None:
    """Write safetensors of `sources`, name in the model -> name in the file, in files of SHARD_BYTES at most."""
    import torch
    from safetensors.torch import save_file

    kept, architecture = getattr(torch, dtype), architecture_of(header)

    def read(place: str) -> torch.Tensor:
        name = sources[place]
        offset = architecture.norm_offset if name.endswith("norm.weight") else 0.0  # taken off before rounding
        rows = [torch.from_numpy(part - np.float32(offset)).to(kept) for part in dequantized(header, name, dither)]
        return _ordered(architecture, name, torch.cat(rows).reshape(header.tensors[name].shape), config)

    shards: list[list[str]] = [[]]
    size = 0
    for place, name in sources.items():
        length = header.tensors[name].count * kept.itemsize
        if shards[-1] and size + length > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(place)
        size += length
    index = {}
    for number, shard in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
            tensors = dict(zip(shard, pool.map(read, shard), strict=True))
        save_file(tensors, folder / file, {"format": "pt"})
        index |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        _write(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})


def _ordered(architecture: Architecture, name: str, kept: Any, config: Mapping[str, Any]) -> Any:
    """A tensor with its rows in the model's order: pairs of a rotation half a head apart, not side by side."""
    part = name.split(".")[-2]
    if not architecture.permuted or part not in ("attn_q", "attn_k"):
        return kept
    heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
    return kept.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def _write(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
