"""Decodes one rollout after another for a policy, and keeps what can serve the next one: buffers and graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from qerl_bench.engine.base import Completion, Sampling
from qerl_bench.engine.decode_buffers import Buffers, BufferSize
from qerl_bench.engine.decoder_blocks import kv_bytes
from qerl_bench.engine.dequantized import copy_bytes
from qerl_bench.engine.hf_graph import Decoding
from qerl_bench.engine.rollout_queue import (
    Limits,
    Request,
    SharedPrompt,
    buckets,
    least_pages,
    most_pages,
    pages_of,
)
from qerl_bench.model.kernels import adapters_cast_to
from qerl_bench.model.policy import Policy
from qerl_bench.quant.linear import PackedLinear
from qerl_core.process.gpu_share import free_bytes, keepable_bytes, spare_bytes
from qerl_core.process.progress import bar
from qerl_kernels.decode import few_tokens
from qerl_kernels.decoder_layer import PAGE

FREE_SHARE = 0.8  # of the GPU's free memory that keys and values may take; prompts and graphs need the rest


def decode(
    policy: Policy,
    prompt_ids: list[list[int]],
    sampling: Sampling,
    keys: list[int],
    lengths: Sequence[int | None] | None = None,
    limits: Limits | None = None,
) -> list[Completion]:
    """The same as `hf_reference.decode`, up to rounding. On a CPU the step runs without a graph."""
    sampler = Sampler(policy, limits or Limits(rows=len(keys)))
    try:
        return sampler.decode(prompt_ids, sampling, keys, lengths)
    finally:
        sampler.release()


class Sampler:
    """Decodes for one policy. Buffers and graphs stay until `release`, or until `sleep` finds them too large."""

    def __init__(self, policy: Policy, limits: Limits) -> None:
        self.policy, self.limits = policy, limits
        self.kept: Buffers | None = None
        self.report: dict[str, float] = {}

    def decode(
        self,
        prompt_ids: list[list[int]],
        sampling: Sampling,
        keys: list[int],
        lengths: Sequence[int | None] | None = None,
    ) -> list[Completion]:
        """As `hf_reference.decode`. Whatever ends it early, the next call starts with new buffers."""
        try:
            with adapters_cast_to(self.policy.model, self.policy.model.dtype), _side_stream(self.policy.device):
                return self._decode(_requests(prompt_ids, sampling, len(keys), lengths), sampling, keys)
        except BaseException:
            self.release()
            raise

    def _decode(self, requests: list[Request], sampling: Sampling, keys: list[int]) -> list[Completion]:
        if not requests:
            return []
        size = self._size(requests)
        if self.kept is None or not self.kept.fits(size):
            self.release()  # first, so that its memory can be used again
            self.kept = Buffers(self.policy, self.limits, size)
        decoding = Decoding(self.kept, requests, sampling, keys)
        ended = decoding.run()
        if len(requests) > self.limits.rows:
            ended = bar(ended, "sampling", total=len(requests))
        completions = dict(ended)
        self._note(decoding)
        return [completions[index] for index in range(len(requests))]

    def sleep(self) -> dict[str, float]:
        """Release 16-bit copies, and what takes more than `kept_gib`. Returns the metrics of all calls since then."""
        if self.kept is not None:
            self.kept.forget_dequantized()
        most = keepable_bytes(self.limits.kept_gib * 2**30, self.policy.device.type)
        if self.kept is not None and self.kept.kept_bytes > most:
            self.release()
        report, self.report = self.report, {}
        return report

    @property
    def holds_memory(self) -> bool:
        return self.kept is not None

    def release(self) -> None:
        """Free all buffers and graphs."""
        if self.kept is not None:
            self.kept.forget_dequantized()
        self.kept = None

    def record(self) -> dict[str, Any]:
        """How it samples, for engine.json."""
        limits = self.limits
        return {
            "page_tokens": PAGE,
            "kv_bytes_per_token": kv_bytes(self.policy),
            "cache_gib": f"{FREE_SHARE} of the free memory" if limits.cache_gib is None else limits.cache_gib,
            "dequantized_gib": limits.dequantized_gib,
            "kept_gib": limits.kept_gib,
            "prefill_tokens": "one prompt" if limits.invariant else limits.prefill_tokens,
            "recorded_rows": [limits.rows] if limits.invariant else buckets(limits.rows)[::-1],
            **({"dequantized_above_rows": few_tokens(self.policy.device)} if limits.dequantized_gib else {}),
        }

    def _size(self, requests: list[Request]) -> BufferSize:
        rows = self.limits.rows if self.limits.invariant else min(self.limits.rows, len(requests))
        longest = max(len(request.prompt.ids) + request.limit for request in requests)
        pages, least = most_pages(requests, rows), 1 + max(map(least_pages, requests))
        page_bytes = PAGE * kv_bytes(self.policy)
        if self.limits.cache_gib is not None:
            pages = min(pages, int(self.limits.cache_gib * 2**30 / page_bytes))
        elif self.policy.device.type == "cuda" and (self.kept is None or pages > self.kept.size.pages):
            free = free_bytes() + spare_bytes()
            if self.kept is not None:
                free += self.kept.cache_bytes + self.kept.dequantized.bytes
            free -= self._dequantized_bytes(rows)
            pages = max(least, min(pages, int(FREE_SHARE * free / page_bytes)))
        if self.limits.page_share < 1:
            pages = max(least, int(self.limits.page_share * pages))
        tokens = max(request.limit for request in requests)
        return BufferSize(rows=rows, pages=pages, least_pages=least, columns=pages_of(longest), tokens=tokens)

    def _dequantized_bytes(self, rows: int) -> int:
        """What 16-bit copies will take at most."""
        if rows <= few_tokens(self.policy.device):
            return 0
        packed = [module for module in self.policy.model.modules() if isinstance(module, PackedLinear)]
        return min(int(self.limits.dequantized_gib * 2**30), copy_bytes(packed, self.policy.model.dtype))

    def _note(self, decoding: Decoding) -> None:
        added = {
            "rollout/rows_computed": decoding.rows_computed,
            "rollout/preempted": decoding.queue.preempted,
            "time/recording_s": decoding.recording_s,
        }
        report = {name: self.report.get(name, 0.0) + value for name, value in added.items()}
        buffers = decoding.buffers
        used = buffers.cache_bytes * decoding.queue.most_used / buffers.size.pages
        sizes = {"memory/cache_gib": buffers.cache_bytes, "memory/cache_used_gib": used}
        self.report = report | {name: max(self.report.get(name, 0.0), size / 2**30) for name, size in sizes.items()}


def _requests(
    prompt_ids: list[list[int]], sampling: Sampling, count: int, lengths: Sequence[int | None] | None
) -> list[Request]:
    samples = count // max(1, len(prompt_ids))
    prompts = [SharedPrompt(index=i, ids=ids, unfinished=samples) for i, ids in enumerate(prompt_ids)]
    return [
        Request(
            index=index,
            sample=index % samples,
            prompt=prompts[index // samples],
            limit=sampling.max_tokens if length is None else length,
            stops=length is None,
        )
        for index, length in enumerate(lengths or [None] * count)
    ]


@contextmanager
def _side_stream(device: torch.device) -> Iterator[None]:
    """The one stream of all captures: kernels keep work space for each stream they have run on."""
    if device.type != "cuda":
        yield
        return
    side, current = _stream(device), torch.cuda.current_stream(device)
    side.wait_stream(current)
    try:
        with torch.cuda.stream(side):
            yield
    finally:
        current.wait_stream(side)  # before buffers are freed


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
