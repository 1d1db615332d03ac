"""A GGUF file as an ordinary checkpoint folder: dequantized once, kept, and used by later runs.

All cores take chunks of all tensors and write each at its place, so that no tensor is ever in memory as a whole. The
folder has a file of its own, gguf.json, that says what the weights have been through. A folder whose files are not
those that were written is made again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from qerl_bench.model.digest import DIGITS, file_digest
from qerl_bench.model.gguf.architecture import EMBEDDING, HEAD, architecture_of, config_of, places
from qerl_bench.model.gguf.header import Header, read_header, require_file
from qerl_bench.model.gguf.safetensors import lay_out, rounded, write_at
from qerl_bench.model.gguf.tied import finer_of_one
from qerl_bench.model.gguf.vocabulary import stop_tokens, write_tokenizer
from qerl_bench.model.gguf.weights import Dither, bits_per_weight, check_kinds, chunks, dequantized, was_rounded
from qerl_core.file_state import file_state, file_states, require_unchanged
from qerl_core.process.progress import phase
from qerl_core.rundir.durable import atomically, make_folder
from qerl_core.rundir.locks import wait_for_lock

log = logging.getLogger(__name__)
VERSION = 2  # of what is written here; another one is converted again
RECORD = "gguf.json"
DIGESTS = "digests.json"  # of all files, by name
SHARD_BYTES = 4 * 2**30


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
        if folder.is_dir() and (changed := _changed(folder)):
            log.warning("%s is not what was written; %s is converted again", folder / changed, path.name)
            shutil.rmtree(folder)
        source = cache / f".{folder.name}.source"  # beside it, since others may be reading the folder
        if folder.is_dir() and not _is_of(folder, path, source):
            log.warning("%s is another file than the one that was converted before: it is converted again", path)
            shutil.rmtree(folder)
        if not folder.is_dir():
            told, state = f"dequantizing {path.name}, done once, then kept in {folder}", json.dumps(file_state(path))
            with atomically(folder) as writing, phase(told):
                writing.mkdir()
                _convert(path, dither, dtype, writing)
                _write(writing / DIGESTS, {file.name: file_digest(file) for file in writing.iterdir()})
            source.write_text(state)  # that of the file that was converted, whatever has its place now
    return folder


def _changed(folder: Path) -> str | None:
    """The first file of a conversion that is missing or another than was written, as far as digests see."""
    try:
        digests = dict(json.loads((folder / DIGESTS).read_text()))
    except (OSError, ValueError, TypeError):
        return DIGESTS
    files = ((folder / name, digest) for name, digest in digests.items())
    return next((file.name for file, digest in files if not file.is_file() or file_digest(file) != digest), None)


def _is_of(folder: Path, path: Path, source: Path) -> bool:
    """Whether a conversion is of this file: of its state, which `source` has, or else of its digest."""
    state = json.dumps(file_state(path))
    if source.is_file() and source.read_text() == state:
        return True
    record = record_of(folder)
    same = record is not None and record["digest"] == f"sha256:{file_digest(path)[:DIGITS]}"
    if same:
        source.write_text(state)
    return same


def record_of(folder: Path | None) -> dict[str, Any] | None:
    """What the weights in a checkpoint folder have been through; None if they are not of a GGUF file."""
    file = None if folder is None else folder / RECORD
    return None if file is None or not file.is_file() else json.loads(file.read_text())


def rounding_notice(record: Mapping[str, Any]) -> str | None:
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
    """Fill `folder`. Raises ConfigError if the file is replaced or written to meanwhile."""
    before = file_states([path])
    digest = file_digest(path)
    header = describe(path, dither, folder)
    config = json.loads((folder / "config.json").read_text())
    wanted = places(architecture_of(header), config["num_hidden_layers"])
    sources = {place: name for name, place in wanted.items() if name in header.tensors}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        serving = EMBEDDING if HEAD not in header.tensors else finer_of_one(header, pool)
        if serving is not None and HEAD in header.tensors:
            del sources[wanted[HEAD]]
            sources[wanted[EMBEDDING]] = serving
            log.info("%s: embedding and head are one tied matrix, rounded twice; %s serves both", path.name, serving)
        tied = serving is not None
        _write(folder / "config.json", config | {"tie_word_embeddings": tied, "dtype": dtype})
        _write_weights(header, dither, dtype, sources, config, folder, pool)
    require_unchanged(before)
    record = {
        "file": path.name,
        "digest": f"sha256:{digest[:DIGITS]}",
        "tensors": Counter(tensor.kind for tensor in header.tensors.values()),
        "rounded": was_rounded(header),
        "bits_per_weight": round(bits_per_weight(header), 3),
        "stored_bits": 32 if dtype == "float32" else 16,
        "tied": tied,
        "dither": dither and dither.seed,
        "dither_scale": dither and dither.scale,
    }
    _write(folder / RECORD, record)


def _write_weights(
    header: Header,
    dither: Dither | None,
    dtype: str,
    sources: Mapping[str, str],
    config: Mapping[str, Any],
    folder: Path,
    pool: Executor,
) -> None:
    """Write safetensors of `sources`, name in the model -> name in the file, in files of SHARD_BYTES at most."""
    import torch

    kept = getattr(torch, dtype)
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for place, name in sources.items():
        tensor = header.tensors[name]
        if shards[-1] and size + tensor.count * kept.itemsize > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][place] = tensor.shape
        size += tensor.count * kept.itemsize
    index = {}
    for number, shard in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        starts = lay_out(folder / file, shard, dtype)
        writings = [
            pool.submit(_write_rows, folder / file, starts[place], header, sources[place], dither, kept, config, rows)
            for place in shard
            for rows in chunks(header.tensors[sources[place]], _rows_together(header, sources[place], config))
        ]
        for writing in writings:
            writing.result()
        index |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        _write(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})


def _write_rows(
    file: Path,
    start: int,
    header: Header,
    name: str,
    dither: Dither | None,
    kept: Any,
    config: Mapping[str, Any],
    rows: range,
) -> None:
    """Write some rows of a tensor, which begins at byte `start`, in the dtype `kept` and the model's order."""
    tensor = header.tensors[name]
    per_row = tensor.count // tensor.shape[0]
    weights = dequantized(header, name, dither, rows)
    if name.endswith("norm.weight"):
        weights = weights - np.float32(architecture_of(header).norm_offset)  # taken off before rounding
    together = _rows_together(header, name, config)
    if together > 1:  # pairs of a rotation half a head apart, not side by side
        weights = weights.reshape(-1, together // 2, 2, per_row).swapaxes(1, 2)
    write_at(file, start + rows.start * per_row * kept.itemsize, rounded(weights, kept))


def _rows_together(header: Header, name: str, config: Mapping[str, Any]) -> int:
    """How many rows change places among themselves on the way into the model: those of a head, or 1."""
    part = name.split(".")[-2]
    if not architecture_of(header).permuted or part not in ("attn_q", "attn_k"):
        return 1
    heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
    return header.tensors[name].shape[0] // heads


def _write(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
