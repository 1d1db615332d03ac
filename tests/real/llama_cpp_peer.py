"""What llama.cpp computes of a GGUF file, to compare with.

On packed blocks llama.cpp rounds activations to 8 bits, so it gets a copy of the file with every tensor in F32. Its
keys and values stay in F32 too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, dequantize

from qerl_bench.model.gguf.architecture import EMBEDDING, HEAD

WRITTEN_ANYHOW = ("GGUF.", "general.architecture")  # by the writer


def f32_copy(file: Path, to: Path, tied: bool) -> Path:
    """The file with all tensors in F32. If it is `tied`, the matrix of a head takes the place of the embedding."""
    reader = GGUFReader(file)
    writer = GGUFWriter(to, str(reader.fields["general.architecture"].contents()))
    for key, field in reader.fields.items():
        if not key.startswith(WRITTEN_ANYHOW):
            inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], inner)
    head = any(tensor.name == HEAD for tensor in reader.tensors)
    for tensor in reader.tensors:
        if tied and head and tensor.name == EMBEDDING:
            continue
        plain = tensor.tensor_type == GGMLQuantizationType.F32
        numbers = tensor.data if plain else dequantize(tensor.data, tensor.tensor_type)
        shape = [int(length) for length in reversed(tensor.shape)]
        name = EMBEDDING if tied and tensor.name == HEAD else tensor.name
        writer.add_tensor(name, np.ascontiguousarray(numbers, dtype=np.float32).reshape(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


class Peer:
    """A model in llama.cpp."""

    def __init__(self, file: Path, context: int = 1024) -> None:
        import llama_cpp

        words: dict[str, Any] = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
        words |= {"n_ctx": context, "n_batch": context, "logits_all": True, "flash_attn": False, "verbose": False}
        self.model = llama_cpp.Llama(str(file), **words)

    def ids(self, text: str) -> list[int]:
        return self.model.tokenize(text.encode(), add_bos=True, special=True)

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """(T, V) of the token behind each prefix."""
        self.model.reset()
        self.model.eval(ids)
        return torch.from_numpy(np.array(self.model.scores[: len(ids)])).float().log_softmax(-1)


def logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    """(T, V) of the token behind each prefix, by transformers."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
