"""The tensors of a step, against one sequence at a time, and FP32 matmuls of lower precision."""

from __future__ import annotations

import torch

from qerl_bench.train.batch import make_batch
from qerl_core.process.device import bf16_matmuls, tf32_matmuls


def test_a_batch_is_its_sequences_one_by_one() -> None:
    prompts, completions = [[5, 6, 7], [8], [9, 1]], [[2, 3], [4, 4, 4, 4], []]
    logprobs = [[-0.5, -1.0], [-2.0, -3.0, -4.0, -5.0], []]
    batch = make_batch(prompts, completions, 0, torch.device("cpu"), logprobs, torch.tensor([1.0, -1.0, 0.5]))
    assert batch.input_ids.shape == (3, 5)
    assert batch.lengths.tolist() == [5, 5, 2]
    assert batch.advantages.tolist() == [1.0, -1.0, 0.5]
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        padding = [0] * (5 - len(prompt) - len(completion))
        assert batch.input_ids[row].tolist() == [*prompt, *completion, *padding]
        assert batch.mask[row].tolist() == [False] * len(prompt) + [True] * len(completion) + [False] * len(padding)
        assert batch.sampler_logprobs[row].tolist() == [0.0] * len(prompt) + logprobs[row] + [0.0] * len(padding)


def test_without_logprobs_and_advantages_both_are_zero() -> None:
    batch = make_batch([[1]], [[2, 3]], 0, torch.device("cpu"))
    assert batch.sampler_logprobs.tolist() == [[0.0, 0.0, 0.0]]
    assert batch.advantages.tolist() == [0.0]


def test_lower_precision_ends_with_its_block_and_off_changes_nothing() -> None:
    before = torch.get_float32_matmul_precision()
    with tf32_matmuls(False):
        assert torch.get_float32_matmul_precision() == before
    with tf32_matmuls(True):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before


def test_bf16_matmuls_read_weights_anew_each_time() -> None:
    """A rounded copy that is kept would be out of date after the next optimizer step."""
    layer = torch.nn.Linear(8, 8, bias=False)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    with bf16_matmuls(True, "cpu"):
        before = layer(x)
        with torch.no_grad():
            layer.weight.mul_(2)
        assert before.dtype == torch.bfloat16 and torch.equal(layer(x), 2 * before)
    with bf16_matmuls(False, "cpu"):
        assert layer(x).dtype == torch.float32
