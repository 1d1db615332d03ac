"""Who is in the batch of hf_graph.py, and which pages hold their keys and values: the host's part, without torch.

Requests enter in the order given, so a run of which the lengths are known beforehand is no faster than one in which
they are not, and the requests of a prompt are neighbours, which share its pages. A request enters as soon as a row and
pages are free. Requests take pages as they grow. If none is left, the request that entered last goes back to the queue
and starts again later: its tokens depend on its key alone, so it draws the same. Left out: pages that prompts with a
common beginning share, and copies of pages in the memory of the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from qerl_core.checks import require

PAGE = 64  # tokens
FULL_TILE = 64  # rows from which a bucket between two powers of two pays
LEAST_SHARE = 2**-5  # of the keys and values that would be kept, below which nothing is tried


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a rollout may use: the fields of engine=hf, and what a shortage of memory has made of them."""

    rows: int
    cache_gib: float | None = None
    dequantized_gib: float = 0.0
    kept_gib: float = 0.0
    prefill_tokens: int = 8192
    invariant: bool = False
    page_share: float = 1.0  # of the pages that it would have

    def smaller(self, requests: int) -> Limits | None:
        """What to try where memory ran out in so many requests: half as much of all; None if there is no less.

        Which tokens are drawn does not depend on it. Invariant rows stay as many, which their bits depend on.
        """
        used = min(self.rows, requests)
        least = self.page_share / 2 < LEAST_SHARE if self.invariant else used <= 1
        if least:
            return None
        rows, copies = (self.rows, self.dequantized_gib) if self.invariant else (used // 2, 0.0)
        tokens = max(1, self.prefill_tokens // 2)
        return replace(self, rows=rows, dequantized_gib=copies, prefill_tokens=tokens, page_share=self.page_share / 2)


@dataclass(eq=False, kw_only=True)
class SharedPrompt:
    """A prompt and the pages that its requests share: the whole ones, and the beginning of the next."""

    index: int
    ids: list[int]
    unfinished: int  # requests
    in_batch: int = 0
    pages: list[int] = field(default_factory=list)  # also of the last tokens, which fill no page
    is_read: bool = False  # keys and values are in the pages
    first: list[tuple[int, float, float]] = field(default_factory=list)  # token, log-probability, entropy by sample
    whole_pages: int = field(init=False)

    def __post_init__(self) -> None:
        self.whole_pages = len(self.ids) // PAGE


@dataclass(eq=False, kw_only=True)
class Request:
    """One sample of one prompt. While it is in the batch: its row of the results, its pages, where it is."""

    index: int
    sample: int
    prompt: SharedPrompt
    limit: int  # tokens
    stops: bool  # at a stop token
    place: int = -1
    pages: list[int] = field(default_factory=list)  # behind the whole pages of the prompt
    token: int = -1
    drawn: int = 0
    done: bool = False
    longest: int = field(init=False)  # the most keys that it ever stores

    def __post_init__(self) -> None:
        self.longest = len(self.prompt.ids) + self.limit - 1

    @property
    def length(self) -> int:
        """Keys that are stored: of the prompt and of all drawn tokens but the latest."""
        return len(self.prompt.ids) + max(0, self.drawn - 1)

    def missing_pages(self, steps: int) -> int:
        """Pages that it needs for the keys of so many more steps."""
        length = self.length
        until = min(length + steps, max(self.longest, length + 1))
        return pages_of(until) - self.prompt.whole_pages - len(self.pages)


class RolloutQueue:
    """Requests that wait, the batch, and `pages` pages of which page 0 belongs to no request.

    `batch` is in the order in which requests entered. Raises ConfigError if some request could never enter.
    """

    def __init__(self, requests: Sequence[Request], rows: int, pages: int) -> None:
        largest = max((least_pages(request) for request in requests), default=0)
        require(
            pages > largest,
            f"engine.cache_gib has room for {max(0, pages - 1)} pages of {PAGE} tokens, and the longest request needs "
            f"{largest}; make engine.cache_gib larger, or the completion limit smaller",
        )
        self.rows, self.pages = rows, pages
        self.waiting = deque(requests)
        self.batch: list[Request] = []
        self.prompts: list[SharedPrompt] = []  # that have pages
        self.free_pages = list(range(pages - 1, 0, -1))
        self.free_places = list(range(rows - 1, -1, -1))
        self.preempted = 0
        self.most_used = 0  # pages at a time

    def admit(self) -> list[Request]:
        """Move requests from the queue to the batch while there is room, with a page left for each row that grows.

        A prompt that has to be read gets its pages; a request gets the page of its next key.
        """
        entered: list[Request] = []
        growing = sum(request.missing_pages(PAGE) > 0 for request in self.batch)
        while self.waiting and len(self.batch) < self.rows:
            request = self.waiting[0]
            prompt = request.prompt
            needed = 1 + (0 if prompt.pages else pages_of(len(prompt.ids)))
            if not self._make_room(needed + growing, prompt):
                break
            self.waiting.popleft()
            if not prompt.pages:
                prompt.pages = self._take(pages_of(len(prompt.ids)))
                self.prompts.append(prompt)
            prompt.in_batch += 1
            request.place, request.pages = self.free_places.pop(), self._take(1)
            self.batch.append(request)
            entered.append(request)
            growing += request.missing_pages(PAGE) > 0
        assert self.batch or not self.waiting, "no request can enter an empty batch"
        return entered

    def grow(self, steps: int) -> bool:
        """Give every row the pages of its next `steps` keys, the oldest first. Returns whether anything changed.

        Where pages run out, the rows that entered last leave the batch.
        """
        changed = False
        for request in list(self.batch):
            if request.place < 0:  # has left for an older one
                continue
            missing = request.missing_pages(steps)
            if missing <= 0:
                continue
            while not self._make_room(missing, request.prompt):
                self._preempt(self.batch.pop())
                changed = True
                if request.place < 0:
                    break
            else:
                request.pages += self._take(missing)
                changed = True
        return changed

    def retire(self) -> list[Request]:
        """Take the requests that are done out of the batch. Their places hold what they drew until `admit`."""
        finished = [request for request in self.batch if request.done]
        self.batch = [request for request in self.batch if not request.done]
        for request in finished:
            self._give_back(request)
            request.prompt.unfinished -= 1
            if request.prompt.unfinished == 0:
                self._release(request.prompt)
        return finished

    def steps(self, most: int) -> int:
        """Steps until the next look: at most as many as the request with the most tokens left can draw."""
        return min(most, max(request.limit - request.drawn for request in self.batch))

    def _make_room(self, count: int, kept: SharedPrompt) -> bool:
        """Whether `count` pages are free, if need be after prompts without rows, except `kept`, give up theirs."""
        if count <= len(self.free_pages):
            return True
        for prompt in self.prompts[::-1]:
            if prompt.in_batch == 0 and prompt is not kept:
                self._release(prompt)
                if count <= len(self.free_pages):
                    return True
        return False

    def _preempt(self, request: Request) -> None:
        self._give_back(request)
        request.token, request.drawn, request.place = -1, 0, -1
        self.waiting.appendleft(request)
        self.preempted += 1

    def _give_back(self, request: Request) -> None:
        """Give back what a request had in the batch, in which it is no more."""
        self.free_pages += request.pages
        self.free_places.append(request.place)
        request.pages = []
        request.prompt.in_batch -= 1

    def _release(self, prompt: SharedPrompt) -> None:
        self.free_pages += prompt.pages
        prompt.pages, prompt.is_read = [], False
        self.prompts.remove(prompt)

    def _take(self, count: int) -> list[int]:
        taken = [self.free_pages.pop() for _ in range(count)]
        self.most_used = max(self.most_used, self.pages - 1 - len(self.free_pages))
        return taken


def pages_of(tokens: int) -> int:
    return -(-tokens // PAGE)


def least_pages(request: Request) -> int:
    """The most pages that one request can need: those of its prompt, and its own at full length."""
    last = max(request.longest, len(request.prompt.ids) + 1)
    return pages_of(last) - request.prompt.whole_pages + pages_of(len(request.prompt.ids))


def most_pages(requests: Sequence[Request], rows: int) -> int:
    """Pages with which no request ever waits for one: of the `rows` largest, of as many prompts, and page 0."""
    prompts = {request.prompt.index: pages_of(len(request.prompt.ids)) for request in requests}
    own = [least_pages(request) - prompts[request.prompt.index] for request in requests]
    return 1 + sum(sum(sorted(pages)[-rows:]) for pages in (own, prompts.values()))


def buckets(rows: int) -> list[int]:
    """Sizes of the batch for which a step is recorded, the largest first: powers of two and, above 64, 3/2 of them."""
    sizes = {rows}
    size = 1
    while size < rows:
        sizes |= {size} | ({3 * size // 2} if size >= FULL_TILE and 3 * size // 2 < rows else set())
        size *= 2
    return sorted(sizes, reverse=True)


def reading_chunks(prompts: Sequence[SharedPrompt], tokens: int) -> list[list[SharedPrompt]]:
    """`prompts` in order, in chunks of at most so many tokens; a longer prompt is a chunk of its own."""
    chunks: list[list[SharedPrompt]] = []
    room = 0
    for prompt in prompts:
        if len(prompt.ids) > room or not chunks:
            chunks.append([])
            room = tokens
        chunks[-1].append(prompt)
        room -= len(prompt.ids)
    return chunks
