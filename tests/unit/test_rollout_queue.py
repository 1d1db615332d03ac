"""The host's part of a rollout: every request ends, no page has two owners, and none is lost."""

from __future__ import annotations

import random

import pytest

from qerl_bench.engine.rollout_queue import (
    PAGE,
    Request,
    RolloutQueue,
    SharedPrompt,
    buckets,
    least_pages,
    most_pages,
    pages_of,
    reading_chunks,
)
from qerl_core.checks import ConfigError


def _requests(lengths: list[int], samples: int, limits: list[int]) -> list[Request]:
    prompts = [SharedPrompt(index=i, ids=[0] * length, unfinished=samples) for i, length in enumerate(lengths)]
    return [
        Request(index=i, sample=i % samples, prompt=prompts[i // samples], limit=limit, stops=True)
        for i, limit in enumerate(limits)
    ]


def _check(queue: RolloutQueue, steps: int) -> None:
    """Every page but page 0 has one owner or is free; every row has room for the keys of so many steps."""
    owned = [page for request in queue.batch for page in request.pages]
    owned += [page for prompt in queue.prompts for page in prompt.pages]
    assert sorted(owned + queue.free_pages) == list(range(1, queue.pages))
    assert len(queue.batch) <= queue.rows
    places = [request.place for request in queue.batch]
    assert sorted(places + queue.free_places) == list(range(queue.rows))
    for request in queue.batch:
        assert len(request.prompt.pages) == pages_of(len(request.prompt.ids))
        held = request.prompt.whole_pages + len(request.pages)
        assert held * PAGE >= min(request.length + steps, request.longest)


def _run(queue: RolloutQueue, ends: dict[int, int], steps: int = 16) -> list[int]:
    """Serve the queue as hf_graph.py does, without a model; a request draws ends[index] tokens. Returns who ended."""
    finished, rounds = [], 0
    while True:
        for request in queue.admit():
            request.drawn = 1
            request.done = ends[request.index] == 1
        _check(queue, 0)
        if not queue.batch:
            assert not queue.waiting
            return finished
        most = queue.steps(steps)
        queue.grow(most)
        _check(queue, most)
        for request in queue.batch:
            request.drawn = min(ends[request.index], request.drawn + most)
            request.done = request.drawn == ends[request.index]
        finished += [request.index for request in queue.retire()]
        rounds += 1
        assert rounds < 10_000


@pytest.mark.parametrize("seed", range(20))
def test_every_request_ends_however_few_pages_there_are(seed: int) -> None:
    """From the fewest pages that suffice for the largest request to more than are ever needed."""
    rng = random.Random(seed)
    samples, rows = rng.randint(1, 5), rng.choice([1, 2, 7, 30])
    lengths = [rng.choice([1, 63, 64, 65, rng.randint(1, 400)]) for _ in range(8)]
    limits = [rng.choice([1, 2, 64, rng.randint(1, 500)]) for _ in range(8 * samples)]
    ends = {i: rng.choice([limit, rng.randint(1, limit)]) for i, limit in enumerate(limits)}
    requests = _requests(lengths, samples, limits)
    least, most = 1 + max(map(least_pages, requests)), most_pages(requests, rows)
    for pages in (least, (least + most) // 2, most, most + 9):
        requests = _requests(lengths, samples, limits)
        queue = RolloutQueue(requests, rows, pages)
        assert sorted(_run(queue, ends)) == list(range(len(limits)))
        assert len(queue.free_pages) == pages - 1 and len(queue.free_places) == rows
        assert pages < most or queue.preempted == 0
        assert queue.most_used < pages
    with pytest.raises(ConfigError, match=rf"engine\.cache_gib .* {least - 2} pages .* needs {least - 1}"):
        RolloutQueue(_requests(lengths, samples, limits), rows, least - 1)


def test_a_prompt_is_stored_once_and_read_once() -> None:
    """Eight completions of a prompt of 200 tokens: four pages for all, and two for each up to 328 tokens."""
    requests = _requests([200], 8, [128] * 8)
    queue = RolloutQueue(requests, 8, most_pages(requests, 8))
    assert len(queue.admit()) == 8 and queue.most_used == 4 + 8
    assert len({page for request in requests for page in request.pages}) == 8
    queue.grow(1000)
    assert queue.most_used == 4 + 8 * 3 == queue.pages - 1
    few = _requests([200], 8, [128] * 8)
    assert sorted(_run(RolloutQueue(few, 3, most_pages(few, 3)), dict.fromkeys(range(8), 128))) == list(range(8))
    assert few[0].prompt.pages == []


def test_sizes_of_batches_and_of_what_is_read() -> None:
    assert buckets(1) == [1] and buckets(6) == [6, 4, 2, 1] and buckets(64) == [64, 32, 16, 8, 4, 2, 1]
    assert buckets(256) == [256, 192, 128, 96, 64, 32, 16, 8, 4, 2, 1] and buckets(200)[:3] == [200, 192, 128]
    prompts = [request.prompt for request in _requests([3, 4, 9, 1, 1], 1, [1] * 5)]
    chunks = [[len(prompt.ids) for prompt in chunk] for chunk in reading_chunks(prompts, 8)]
    assert chunks == [[3, 4], [9], [1, 1]]
    assert [len(chunk) for chunk in reading_chunks(prompts, 0)] == [1] * 5
