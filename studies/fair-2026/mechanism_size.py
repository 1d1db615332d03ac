"""Which size of `random-error` has the KL of NVFP4, on answers that are committed; no sampling, so a CPU will do.

    python studies/fair-2026/mechanism_size.py model.id=FILE.gguf [copies=1,2,3,4,5,6] [sizes=1]

Asks copies of the 0.5B that no part trains, for their KL from BF16 on BF16's answers at temperature 1, which the first
look at released models packed (../real-2026/first-look/data/formats-05b). KL is over the whole vocabulary, in nats a
token; of each copy it is the mean over the tokens of its answers. Prints a row for each format: its KL and entropy, and
its KL as a ratio to that of NVFP4 in the same copy, with a 95 % interval over copies.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from qerl_bench.config import build, compose
from qerl_bench.model.policy import Policy
from qerl_bench.model_setup import base_checkpoint, build_policy
from qerl_bench.probe.budget import mean_entropy, mean_kl, scores
from qerl_bench.run_setup import prepare_device
from qerl_core.exits import guarded
from qerl_core.options import user_options
from qerl_core.process.arguments import KeyValueParser
from qerl_core.records import Prompt, Rollout
from qerl_core.seeding import derive
from qerl_core.statistics import Estimate, mean_ci
from qerl_studies.report.probe_page import times
from qerl_studies.tables.markdown import markdown_table

STUDY = Path(__file__).resolve().parent
ANSWERS = STUDY.parent / "real-2026" / "first-look" / "data" / "formats-05b" / "probe_answers.parquet"
HEADS = ("format", "KL, nats a token", "beside NVFP4's", "entropy beside BF16's")
FIXED = ("model=hub", "task=gsm8k", "task.answer_format=boxed")
ASKED = 512  # questions of the first look, of which the packed answers are some
Numbers = dict[str, tuple[float, float]]  # KL and entropy of a format


def main(arguments: list[str] | None = None) -> None:
    parser = KeyValueParser(__doc__)
    parser.add_argument("--copies", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6], help="of the file")
    parser.add_argument("--sizes", type=float, nargs="+", default=[1.0], help="of the random error")
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args([word for word in given if word.startswith("-") or parser.is_own(word)])
    words = [word for word in given if not word.startswith("-") and not parser.is_own(word)]  # of a run
    logging.disable(logging.INFO)
    user_options.use([STUDY / "conf"])
    answers = pd.read_parquet(ANSWERS)
    answers = answers[(answers["quant"] == "bf16") & (answers["temperature"] == 1) & answers["completion"].notna()]
    found = []
    for copy in options.copies:
        of: Any = answers[answers["base"] == copy]
        found.append(numbers_of(words, copy, options.sizes, of.to_dict("records")))
        print(copy, {name: tuple(round(value, 4) for value in pair) for name, pair in found[-1].items()}, flush=True)
    print(table(found))


def numbers_of(
    words: Sequence[str], copy: int, sizes: Sequence[float], answers: Sequence[Mapping[str, Any]]
) -> Numbers:
    """KL from BF16 and entropy of each format in one copy, on its `answers`."""
    formats = {"bf16": ["quant=bf16"], "nvfp4": ["quant=nvfp4"]}
    formats |= {f"random-error, size {size:g}": ["quant=random-error", f"quant.size={size}"] for size in sizes}
    found, known, texts = {}, [], []
    for name, own in formats.items():
        experiment: Any = build(compose([*FIXED, f"model.dither={copy}", *words, *own, *user_options.words_in_use()]))
        base = base_checkpoint(experiment.model, experiment.task, experiment.root)
        policy = build_policy(experiment, base, prepare_device(experiment.device, experiment.quant))
        texts = texts or rollouts_of(policy, experiment.task.train_prompts(1, ASKED, derive("probe")), answers)
        with torch.inference_mode():
            forced = scores(policy, texts)
        known = known or forced
        found[name] = mean_kl(known, forced), mean_entropy(forced)
    return found


def rollouts_of(policy: Policy, prompts: Sequence[Prompt], answers: Sequence[Mapping[str, Any]]) -> list[Rollout]:
    """The answers as they were sampled, with the stop token of those that are finished."""
    asked, found = {prompt.id: prompt for prompt in prompts}, []
    for answer in answers:
        prompt, text = asked[answer["question"]], answer["completion"]
        ids: Any = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = [*ids, policy.tokenizer.eos_token_id] if answer["finished"] else ids
        told = {"logprobs": [], "entropies": [], "text": text, "finished": answer["finished"]}
        found.append(Rollout(prompt=prompt, sample=0, prompt_ids=policy.ids_of(prompt), token_ids=ids, **told))
    return found


def table(found: Sequence[Numbers]) -> str:
    lines = []
    for name in [*found[0]][1:]:
        kl, entropy = np.array([one[name] for one in found]).T
        beside = np.log(kl / [one["nvfp4"][0] for one in found])
        rise = np.log(entropy / [one["bf16"][1] for one in found])
        lines.append([name, plain(mean_ci(kl)), times(mean_ci(beside)), times(mean_ci(rise))])
    return markdown_table([*HEADS], lines)


def plain(found: Estimate) -> str:
    return f"{found.value:.4f}" + ("" if math.isnan(found.low) else f" [{found.low:.4f}, {found.high:.4f}]")


if __name__ == "__main__":
    guarded(main)
