"""The rotary embedding that a GGUF file asks for, in the words of transformers' `rope_parameters`.

A scaling that is not written here is refused by its name: transformers' own loader leaves it out without a word, and
then the model computes other numbers.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from qerl_bench.model.gguf.header import Header, Tensor
from qerl_core.checks import require

FREQUENCIES = "rope_freqs.weight"  # (head_dim / 2,) by which Llama 3 divides the frequencies
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LOCAL_THETA = 10_000.0  # of Gemma 3's layers with a window, where the file has no rope.freq_base_swa
KEYS = frozenset(  # behind the name of the architecture; those of a scaling, but for type and factor, only with YaRN
    {
        "rope.freq_base",
        "rope.freq_base_swa",
        "rope.dimension_count",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
    }
)


def rope_parameters(header: Header, head_dim: int) -> dict[str, Any]:
    """`rope_parameters` of the config. Raises ConfigError for a scaling that cannot be set."""
    parameters = {"rope_theta": shortest(header.need(f"{header.architecture}.rope.freq_base")), **_scaling(header)}
    if FREQUENCIES in header.tensors:
        require(
            parameters["rope_type"] == "default" and header.architecture == "llama",
            f"model.id={header.path} has {FREQUENCIES} beside {header.architecture}.rope.scaling.type="
            f"{parameters['rope_type']}, a rotary embedding that is not known; choose another file",
        )
        parameters |= _llama3(header, parameters["rope_theta"], head_dim)
    if header.architecture != "gemma3":
        return parameters
    local = header.metadata.get("gemma3.rope.freq_base_swa", LOCAL_THETA)
    return {
        "full_attention": parameters,
        "sliding_attention": {"rope_type": "default", "rope_theta": shortest(local)},
    }


def _scaling(header: Header) -> dict[str, Any]:
    prefix = f"{header.architecture}.rope.scaling."
    given = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    kind, factor = given.get("type", "none"), given.get("factor")
    if kind == "none" and factor in (None, 0.0, 1.0):
        return {"rope_type": "default"}
    written = f"model.id={header.path}: {prefix}type={kind} with factor {factor}"
    remedy = "readable are none, linear and yarn, each with its factor; choose another file"
    require(kind in ("linear", "yarn") and bool(factor), f"{written} is a scaling that is not known; {remedy}")
    assert factor is not None
    if kind == "linear":
        return {"rope_type": "linear", "factor": shortest(factor)}
    original = given.get("original_context_length")
    require(bool(original) and header.architecture != "gemma3", f"{written} needs original_context_length; {remedy}")
    return {"rope_type": "yarn", "factor": shortest(factor), "original_max_position_embeddings": original}


def _llama3(header: Header, theta: float, head_dim: int) -> dict[str, Any]:
    """The parameters of Llama 3 whose divisors are those in the file; its other three numbers are always LLAMA3."""
    stored = tensor_in_file(header, header.tensors[FREQUENCIES])
    parameters = {"rope_type": "llama3", "factor": float(stored.max()), **LLAMA3}
    expected = _divisors(theta, head_dim, **{key: value for key, value in parameters.items() if key != "rope_type"})
    require(
        stored.shape == expected.shape and bool(np.allclose(stored, expected, rtol=1e-4)),
        f"model.id={header.path}: {FREQUENCIES} is not what Llama 3 computes with a factor of {stored.max():g} and "
        f"{', '.join(f'{key}={value:g}' for key, value in LLAMA3.items())}; choose another file",
    )
    return parameters


def _divisors(
    theta: float,
    head_dim: int,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> np.ndarray:
    """What Llama 3 divides the frequencies by, (head_dim / 2,)."""
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = original_max_position_embeddings / wavelength
    smooth = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def tensor_in_file(header: Header, tensor: Tensor) -> np.ndarray:
    """A tensor of 32-bit numbers."""
    require(tensor.kind == "F32", f"model.id={header.path}: {FREQUENCIES} is {tensor.kind}; choose another file")
    return np.fromfile(header.path, dtype="<f4", count=tensor.count, offset=tensor.start)


def shortest(value: float) -> float:
    """The shortest number that is `value` in 32 bits: 1e-6, not 9.999999974752427e-07."""
    return float(str(np.float32(value)))
