"""What the untouched model writes: transformers' own `generate`, greedily and by given random numbers.

In FP32, each prompt alone, without packing, kernels or adapter (`model/reference_model.py`). One call writes both
continuations of a prompt, as two rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from qerl_bench.engine import hf_reference
from qerl_bench.engine.base import Sampling
from qerl_bench.engine.hf import request_key
from qerl_bench.model.context import longest_context
from qerl_bench.model.policy import Policy
from qerl_bench.model.reference_model import Origin, stock_model
from qerl_bench.model.structure import probe_ids
from qerl_core.checks import ConfigError, TrainingStopped
from qerl_core.process.gpu_share import release
from qerl_core.process.out_of_memory import shortage
from qerl_core.records import Prompt
from qerl_kernels.sampling import draw, uniforms

TOKENS = 12  # of each continuation
SHORT, LONG = 5, 80  # tokens of the prompts
LONGEST_WINDOW = 1024  # tokens: the long prompt ends just before the end of a window up to here
SEED = 0  # of the prompts' tokens and of the draws
TEMPERATURES = (0.0, 1.0)  # of the two continuations of a prompt


@dataclass(frozen=True)
class Written:
    """A continuation of `prompt` by the untouched model."""

    prompt: Prompt
    temperature: float
    ids: list[int]
    logprobs: torch.Tensor  # (TOKENS, V)
    numbers: torch.Tensor  # (TOKENS,) of the draw

    def __str__(self) -> str:
        return f"{'drawn' if self.temperature else 'greedy'} after {len(self.prompt.token_ids or ())} tokens"


def written_by_stock(policy: Policy, source: Origin, count: int | None, where: str) -> list[Written]:
    """A greedy and a drawn continuation of each prompt."""
    model = stock_model(policy, source, count, where)
    try:
        return [written for prompt in prompts_of(policy) for written in _continued(model, prompt, where)]
    finally:
        del model
        release()


def prompts_of(policy: Policy) -> list[Prompt]:
    """The short and the long prompt, which fit into the context."""
    context = longest_context(policy.model) or torch.inf
    windows = [getattr(layer, "sliding_window", None) for layer in hf_reference.cache_of(policy).layers]
    crossing = [window - TOKENS // 2 for window in windows if window and LONG < window <= LONGEST_WINDOW]
    ordinary = probe_ids(policy.model, 256)
    generator, prompts = torch.Generator().manual_seed(SEED), []
    for length in (SHORT, max([LONG, *crossing])):
        chosen = torch.randint(len(ordinary), (int(min(length, context - TOKENS)),), generator=generator)
        ids = ordinary[chosen.to(policy.device)].tolist()
        prompts.append(
            Prompt(id=f"preflight/{length}", messages=(), answer="", token_ids=tuple(ids), new_tokens=(TOKENS,))
        )
    return prompts


def _continued(model: PreTrainedModel, prompt: Prompt, where: str) -> list[Written]:
    assert prompt.token_ids is not None
    ids = torch.tensor([prompt.token_ids] * 2, device=model.device)
    numbers = torch.from_numpy(uniforms([request_key(sampling_at(1.0), prompt, 0)], TOKENS)).to(model.device)  # (1, T)
    settings = GenerationConfig(
        max_new_tokens=TOKENS, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    with refusing_model_errors(f"transformers cannot continue a text with {where}"):
        said: Any = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=settings,
            logits_processor=LogitsProcessorList([_GivenDraws(ids.shape[1], numbers)]),
        )
    new, logits = said.sequences[:, ids.shape[1] :], torch.stack(said.logits, 1)
    logprobs = torch.log_softmax(logits.float(), -1)  # (2, T, V)
    return [
        Written(prompt, temperature, new[row].tolist(), logprobs[row], numbers[0])
        for row, temperature in enumerate(TEMPERATURES)
    ]


class _GivenDraws(LogitsProcessor):
    """Leaves the first row to `generate`, which takes its likeliest token, and draws the token of the second."""

    def __init__(self, prompt_tokens: int, numbers: torch.Tensor) -> None:
        self.prompt_tokens, self.numbers = prompt_tokens, numbers

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        token, *_ = draw(scores[1:], 1.0, self.numbers[:, input_ids.shape[1] - self.prompt_tokens])
        return torch.cat([scores[:1], torch.full_like(scores[1:], -torch.inf).scatter(1, token[:, None], 0.0)])


def sampling_at(temperature: float) -> Sampling:
    """How both sides complete the prompts."""
    return Sampling(samples=1, temperature=temperature, max_tokens=TOKENS, seed=SEED)


@contextmanager
def refusing_model_errors(failed: str, reason: str = "", remedy: str = "another model") -> Iterator[None]:
    """Turns an exception of a third-party model into a ConfigError, except a shortage of memory."""
    try:
        yield
    except (ConfigError, TrainingStopped):
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        if shortage(error):
            raise
        said = str(error).strip().partition("\n")[0].rstrip(".")
        raise ConfigError(f"{failed}: {said} ({type(error).__name__}). {reason}Use {remedy}") from error
