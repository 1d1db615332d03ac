"""Which size of `random-error` has NVFP4's KL from BF16, on committed answers; nothing is sampled: a CPU will do.

    python studies/fair-2026/mechanism_size.py model.id=FILE.gguf task.train_file=FILE \\
        task.eval_file=FILE

Over the whole vocabulary, in nats a token, on BF16's own answers at temperature 1 in copies 1 to 4 of the 0.5B, which
the first look at released models packed. KL goes with the square of the size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from qerl_core.exits import guarded
from qerl_core.options import user_options
from qerl_core.process.arguments import KeyValueParser
from qerl_core.seeding import derive
from qerl_core.statistics import mean_ci

STUDY = Path(__file__).resolve().parent
SIZE = 0.935  # at which it is measured
ANSWERS = STUDY.parent / "real-2026" / "first-look" / "data" / "formats-05b" / "probe_answers.parquet"


def logarithms(words: list[str], answers: pd.DataFrame) -> list[Any]:
    """Log-probabilities (tokens, vocabulary) of each answer."""
    import torch

    from qerl_bench.config import build, compose
    from qerl_bench.model_setup import base_checkpoint, build_policy
    from qerl_bench.probe.scoring import passes, scores

    experiment: Any = build(compose(["model=hub", "task=gsm8k", "task.answer_format=boxed", "device=cpu", *words]))
    base = base_checkpoint(experiment.model, experiment.task, experiment.root)
    policy: Any = build_policy(experiment, base, "cpu")
    prompts = {one.id: policy.ids_of(one) for one in experiment.task.train_prompts(1, 512, derive("probe"))}
    texts: Any = []
    for question, text in zip(answers["question"], answers["completion"], strict=True):
        ids = [*policy.tokenizer(text, add_special_tokens=False)["input_ids"], policy.tokenizer.eos_token_id]
        texts.append(type("Text", (), {"prompt_ids": prompts[question], "token_ids": ids}))
    with torch.inference_mode():
        return [row for one in passes(texts) for row in scores(policy, one)]


def main(arguments: list[str] | None = None) -> None:
    parser = KeyValueParser(__doc__)
    parser.add_argument("words", nargs="+", help="of a run: where model and data are")
    given = parser.parse_args(arguments).words
    from qerl_bench.probe.scoring import kl

    user_options.use([STUDY / "conf"])
    answers = pd.read_parquet(ANSWERS)
    answers = answers[(answers["quant"] == "bf16") & (answers["temperature"] == 1) & answers["completion"].notna()]
    found, formats = [], (["quant=nvfp4"], ["quant=random-error", f"quant.size={SIZE}"])
    for copy in range(1, 5):
        of: Any = answers[(answers["base"] == copy) & answers["finished"]]
        words = [*given, f"model.dither={copy}", *user_options.words_in_use()]
        known = logarithms([*words, "quant=bf16"], of)
        tokens = sum(map(len, known))
        found.append([kl(known, logarithms([*words, *one], of)) / tokens for one in formats])
        print(copy, *(f"{one:.5f}" for one in found[-1]), flush=True)
    nvfp4, error = np.array(found).T
    ratio = mean_ci(np.log(error / nvfp4))
    beside = np.exp([ratio.value, ratio.low, ratio.high])
    print("KL beside NVFP4's:", *beside.round(3), "size that has it:", *(SIZE * beside[[0, 2, 1]] ** -0.5).round(3))


if __name__ == "__main__":
    guarded(main)
