"""Presents our policy and engine to lm-eval as a model, without a second copy of the weights.

Imports lm-eval, so import this module only where it is used. Left out: sampling, beam search, images, chat templates
applied by lm-eval (a context is the finished prompt), and stopping early at an `until` string (the text is cut later).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.defaults import DEFAULT_MAX_GEN_TOKS
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from qerl_bench.engine.base import RolloutEngine, Sampling
from qerl_bench.model.context import longest_context
from qerl_bench.model.policy import Policy
from qerl_bench.model.token_ids import require_rows
from qerl_bench.parallel import ALONE, World
from qerl_bench.task.chat_template import plain_ids
from qerl_bench.train.batch import make_batch
from qerl_core.checks import require
from qerl_core.process.out_of_memory import whole_or_halves
from qerl_core.records import RENDERED, Message, Prompt, Rollout

BATCH_SIZE = 16  # sequences scored in one forward pass
SAMPLING_OPTIONS = {"do_sample", "temperature", "top_k", "top_p"}  # without effect on greedy decoding


class EngineLM(TemplateLM):
    """Greedy completions from `engine`, log-likelihoods from `policy`, both of texts that begin as the tokenizer begins
    one: with BOS where it writes that.

    As in all models of lm-eval, white space at the end of a context is moved to the start of the continuation.
    lm-eval gives each rank of `world` the requests for every n-th question, and rank 0 the results of all.
    """

    def __init__(self, policy: Policy, engine: RolloutEngine, world: World = ALONE) -> None:
        super().__init__()
        self.policy = policy
        self.engine = engine  # that of all ranks
        self.world = world
        self._rank, self._world_size = world.rank, world.size
        self.rollouts: list[Rollout] = []  # of the last generate_until, one per question of all ranks, not cut

    @property
    def eot_token_id(self) -> int:
        return self.policy.tokenizer.eos_token_id  # type: ignore[return-value]

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context."""
        bos = self.policy.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos  # type: ignore[return-value]

    @property
    def max_length(self) -> int:
        """The model's context in tokens."""
        return longest_context(self.policy.model) or sys.maxsize

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.world.gather(tensor))

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        objects = self.world.gather(obj)
        return objects if self.rank == dst else None

    def barrier(self) -> None:
        self.world.gather(None)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: object) -> list[int]:
        if add_special_tokens is not False:
            return plain_ids(self.policy.tokenizer, string)
        return self.policy.tokenizer(string, add_special_tokens=False)["input_ids"]  # type: ignore[return-value]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy completions, cut before the first of their `until` strings; one engine call per token limit.

        The call is for the questions of all ranks, each once, in their order: it is that of a single process.
        Raises ConfigError if a request does not ask for greedy decoding.
        """
        options = [greedy_options(request) for request in requests]
        questions = [(request.task_name, request.doc_id) for request in requests]
        mine = {
            question: (self._prompt(request), option["max_gen_toks"])
            for question, request, option in zip(questions, requests, options, strict=True)
        }
        asked = {question: asks for of_rank in self.world.gather(mine) for question, asks in of_rank.items()}
        rollouts: dict[Any, Rollout] = {}
        for limit in sorted({limit for _, limit in asked.values()}):
            those = [question for question in sorted(asked) if asked[question][1] == limit]
            sampling = Sampling(samples=1, temperature=0.0, max_tokens=limit, seed=0)  # greedy, so unused
            written = self.engine.generate([asked[question][0] for question in those], sampling)
            rollouts |= zip(those, written, strict=True)
        self.rollouts = [rollouts[question] for question in sorted(asked)]
        return [
            cut(rollouts[question].text, option["until"]) for question, option in zip(questions, options, strict=True)
        ]

    def _prompt(self, request: Instance) -> Prompt:
        """What the request asks: our messages if it comes from our task, or its context as plain text."""
        text = request.arguments[0]
        messages: tuple[Message, ...] = ({"role": RENDERED, "content": text},)
        if "messages" in request.doc:
            messages = tuple(request.doc["messages"])
            assert self.policy.prompt_text(messages) == text, "lm-eval changed a prompt"
        return Prompt(id=f"{request.task_name}/{request.doc_id}", messages=messages, answer="")

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each whole text in nats. In a text longer than the context, each token is predicted once,
        from the tokens before it in its window."""
        totals = []
        for request in requests:
            (text,) = request.arguments
            ids = self.tok_encode(text, add_special_tokens=False)  # the prefix stands in the place of BOS
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length - 1, 1)
            scores = self._loglikelihood_tokens([(("", text), *make_disjoint_window(window)) for window in windows])
            totals.append(sum(logprob for logprob, _ in scores))
        return totals

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: object
    ) -> list[tuple[float, bool]]:
        """Sum of log-probabilities in nats of each continuation, and whether greedy decoding would write it."""
        results: list[tuple[float, bool]] = []
        for start in range(0, len(requests), BATCH_SIZE):
            results += whole_or_halves(self._scores, requests[start : start + BATCH_SIZE])
        return results

    def _scores(self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]]) -> list[tuple[float, bool]]:
        """`_loglikelihood_tokens` in one forward pass."""
        contexts, continuations = [], []
        for _, context, continuation in requests:
            room = self.max_length - len(continuation)
            require(
                room >= 1,
                f"a text of {len(continuation)} tokens cannot be scored: the model reads {self.max_length} tokens, "
                "and one must precede the text",
            )
            contexts.append(context[-room:])
            continuations.append(continuation)
        require_rows(self.policy.tokenizer, [*contexts, *continuations], self.policy.rows, "a text of lm-eval")
        batch = make_batch(contexts, continuations, self.policy.pad_id, self.policy.device)
        with torch.no_grad():
            stats = self.policy.token_stats(batch.input_ids, batch.mask, 1.0)
        totals = stats.logprobs.double().sum(1)  # (B,)
        greedy = stats.likeliest.sum(1) == batch.mask.sum(1)
        return [*zip(totals.tolist(), greedy.tolist(), strict=True)]


def greedy_options(request: Instance) -> dict[str, Any]:
    """The request's `until` and `max_gen_toks`. Raises ConfigError unless it asks for plain greedy decoding."""
    _, gen_kwargs = request.arguments
    options: dict[str, Any] = dict(normalize_gen_kwargs(gen_kwargs, DEFAULT_MAX_GEN_TOKS))
    task = f"lm-eval task {request.task_name}"
    require(
        not options["do_sample"],
        f"{task}: decoding is greedy here, but its generation_kwargs ask for sampling "
        f"(do_sample or temperature {options.get('temperature')}); set do_sample: false",
    )
    unknown = sorted(options.keys() - SAMPLING_OPTIONS - {"until", "max_gen_toks"})
    require(not unknown, f"{task}: generation_kwargs {', '.join(unknown)} are not supported here; leave them out")
    return options


def cut(text: str, until: list[str]) -> str:
    """`text` up to the first of the `until` strings; empty ones are ignored, as lm-eval does."""
    return text[: min((at for stop in until if stop and (at := text.find(stop)) >= 0), default=len(text))]
