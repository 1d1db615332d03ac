"""The text that a quantizer looks at: demonstrations of the run's task, or a file.

The same samples for every run seed, so that a sweep over seeds trains the same packed base. Left out: mixing sources.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qerl_bench.checks import require
from qerl_bench.task.prompts import render_prompt

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from qerl_bench.records import Demonstration
    from qerl_bench.task.base import Task

BATCH = 16  # sequences per forward pass; a memory setting


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """`samples` token sequences of at most `length` tokens.

    With `file` null they are demonstrations of the training split. A `.jsonl` file gives one sample per line from its
    key `text`; any other file is read as plain text and cut into pieces of `length` tokens.
    """

    file: str | None
    samples: int
    length: int
    seed: int

    def __post_init__(self) -> None:
        for key, least in (("samples", 1), ("length", 2), ("seed", 0)):
            value = getattr(self, key)
            ok = isinstance(value, int) and not isinstance(value, bool) and value >= least
            require(ok, f"quantizer.calibration.{key} must be a whole number of at least {least}, got {value!r}")

    def sequences(self, tokenizer: PreTrainedTokenizerBase, task: Task) -> list[list[int]]:
        """The token ids of each sample. Raises ConfigError if the file cannot be read or holds too little."""
        if self.file is None:
            shown = task.demonstrations(0, self.samples, self.seed)
            return [demonstration_ids(tokenizer, d)[: self.length] for d in shown]
        found = self._of_file(tokenizer, Path(self.file))
        require(
            len(found) >= self.samples,
            f"quantizer.calibration.file={self.file} gives {len(found)} samples of up to {self.length} tokens, "
            f"fewer than quantizer.calibration.samples={self.samples}; use a longer file or fewer samples",
        )
        return found[: self.samples]

    def _of_file(self, tokenizer: PreTrainedTokenizerBase, path: Path) -> list[list[int]]:
        require(
            path.is_file(),
            f"quantizer.calibration.file={path} is not a file; give a text or .jsonl file, or null for the task's "
            "demonstrations",
        )
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            samples = [_text_of(path, number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
            return [_ids(tokenizer, sample)[: self.length] for sample in samples]
        ids = _ids(tokenizer, text)
        return [ids[i : i + self.length] for i in range(0, len(ids) - self.length + 1, self.length)]


def _text_of(path: Path, number: int, line: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (json.JSONDecodeError, KeyError, TypeError):
        text = None
    require(isinstance(text, str) and text != "", f"{path}:{number}: expected a JSON object with a string under text")
    return text  # type: ignore[return-value]


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[return-value]


def demonstration_ids(tokenizer: PreTrainedTokenizerBase, demonstration: Demonstration) -> list[int]:
    """Prompt, completion and stop token, as training sees them."""
    prompt = render_prompt(tokenizer, demonstration.prompt.messages)
    end = tokenizer.eos_token_id
    assert isinstance(end, int), "the tokenizer has no end-of-text token"
    return [*_ids(tokenizer, prompt), *_ids(tokenizer, demonstration.completion), end]


def batches(sequences: list[list[int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Right-padded token ids (B, T) and the mask (B, T) of real tokens, sequences of like length together."""
    import torch

    ordered = sorted(sequences, key=len)
    found = []
    for start in range(0, len(ordered), BATCH):
        some = ordered[start : start + BATCH]
        ids = torch.zeros(len(some), max(map(len, some)), dtype=torch.long)
        mask = torch.zeros_like(ids, dtype=torch.bool)
        for row, sequence in enumerate(some):
            ids[row, : len(sequence)] = torch.tensor(sequence)
            mask[row, : len(sequence)] = True
        found.append((ids, mask))
    return found
