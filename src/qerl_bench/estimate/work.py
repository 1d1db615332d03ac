"""What one run computes: completions, tokens and weights, as numbers. From a flat config, new or of a committed run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qerl_bench.estimate.sizes import BYTES, Sizes


@dataclass(frozen=True, kw_only=True)
class Work:
    """One run of a dense model with engine=hf on a GPU. `rank` 0: every weight is trained."""

    sizes: Sizes
    quant: str
    bits: float  # of a weight in the blocks
    width: int  # bytes of all other numbers
    rank: int
    targets: str | tuple[str, ...]
    prompts: int
    group: int
    prompt_tokens: float
    tokens: float  # of a completion, on average
    limit: int
    rows: int
    recompute: str
    modules: bool
    micro_batch: int | None
    shares_prompts: bool
    cache_gib: float | None
    kept_gib: float
    steps: int
    asked: tuple[tuple[int, float], ...]  # completions of each sampling of an evaluation, and their limit
    checkpoints: int  # on the disk at the end
    per_card: int  # runs on one card

    @classmethod
    def of(
        cls,
        config: Mapping[str, Any],
        sizes: Sizes,
        bits: float | None,
        prompt_tokens: float,
        tokens: float,
        questions: int = 0,
        per_card: int = 1,
    ) -> Work:
        """From a flat `config`; `bits` of packed weights, None without; `questions`: all held-out ones of the task."""
        get = config.get
        width, steps = BYTES[get("model.dtype", "bfloat16")], config["steps"]
        limit, every = config["task.max_completion_tokens"], get("save_every", steps)
        saved = math.ceil(steps / every) if steps else 0
        keep = get("checkpoints.keep")
        return cls(
            sizes=sizes,
            quant=config["quant.name"],
            bits=bits or 8 * width,
            width=width,
            rank=get("lora.rank", 0),
            targets="all" if (targets := get("lora.targets", "all")) == "all" else tuple(targets),
            prompts=config["rollout.prompts_per_step"],
            group=config["rollout.group_size"],
            prompt_tokens=prompt_tokens,
            tokens=min(tokens, limit),
            limit=limit,
            rows=get("engine.max_num_seqs", 256),
            recompute=get("train.recompute") or "full",  # of runs before that option: all activations again
            modules=get("kernel") == "modules",
            micro_batch=get("train.micro_batch_tokens"),
            shares_prompts=get("train.packing", True) and width == 2,
            cache_gib=get("engine.cache_gib"),
            kept_gib=get("engine.kept_gib", 8.0),
            steps=steps,
            asked=evaluations(config, limit, questions),
            checkpoints=saved if keep is None else min(saved, keep),
            per_card=per_card,
        )

    @property
    def completions(self) -> int:
        return self.prompts * self.group

    @property
    def trained_tokens(self) -> float:
        """Of prompts and completions, in one step."""
        prompts = self.prompts if self.shares_prompts else self.completions
        return self.completions * self.tokens + prompts * self.prompt_tokens

    @property
    def weight_bytes(self) -> float:
        """Resident: blocks in their format, embedding and head in 16 bits."""
        return self.sizes.block_weights * self.bits / 8 + self.sizes.embedding_weights * self.width

    @property
    def trained_weights(self) -> int:
        whole = self.sizes.block_weights + self.sizes.embedding_weights
        return self.sizes.adapter_weights(self.rank, self.targets) if self.rank else whole


def evaluations(config: Mapping[str, Any], limit: int, questions: int) -> tuple[tuple[int, float], ...]:
    """(completions, their limit) of each time that a whole evaluation or a validation samples."""
    from qerl_bench.eval.validation import SAMPLES, spacing  # it loads pandas, which composing does not need

    if config.get("eval.name") == "none" or "eval.samples" not in config:
        return ()
    steps, samples = config["steps"], config["eval.samples"]
    asked = config.get("eval.questions") or questions
    longest = config.get("eval.max_tokens") or limit
    whole = 2 + len(config.get("eval.at") or ()) if steps else 1
    every = spacing(config.get("eval.every"), steps, config.get("save_every", steps))
    points = len(range(every, steps, every)) if every else 0
    few = min(config.get("eval.every_questions", 32), asked)
    found = [(asked, longest), (asked * samples, longest)] * whole
    found += [(few, longest), (few * min(SAMPLES, samples), longest)] * points
    return tuple(found)
