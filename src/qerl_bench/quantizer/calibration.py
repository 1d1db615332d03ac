"""Calibration text for quantizers: demonstrations of the run's task, or a file.

Its seed is not the run's seed, so that a sweep over seeds trains the same packed base. Left out: mixing sources.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from qerl_bench.checks import ConfigError, check_fields, count, require
from qerl_bench.task.chat_template import Keywords, demonstration_ids, plain_ids

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from qerl_bench.records import Demonstration

BATCH_SIZE = 16  # sequences per forward pass; limits memory


class DemonstrationSource(Protocol):
    """The part of a task that calibration uses."""

    def demonstrations(self, step: int, count: int, seed: int) -> list[Demonstration]: ...


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """`samples` token sequences of at most `length` tokens.

    With `file` null they are demonstrations of the training split. A `.jsonl` file gives one sample per line from its
    key `text`; any other file is read as plain text and cut into pieces of `length` tokens. Every sample and the text
    begin with BOS if the tokenizer writes it.
    """

    file: str | None
    samples: int
    length: int
    seed: int

    def __post_init__(self) -> None:
        check_fields(self, "quantizer.calibration", samples=count(), length=count(2), seed=count(0))

    def sequences(
        self, tokenizer: PreTrainedTokenizerBase, task: DemonstrationSource, template: Keywords | None
    ) -> list[list[int]]:
        """The token ids of each sample, demonstrations as in training with the model's `template`.

        Raises ConfigError if the file cannot be read or holds too few.
        """
        if self.file is not None:
            return self._from_file(tokenizer, Path(self.file))
        demonstrations = task.demonstrations(0, self.samples, self.seed)
        prompts, completions = demonstration_ids(tokenizer, demonstrations, template)
        return [[*pair[0], *pair[1]][: self.length] for pair in zip(prompts, completions, strict=True)]

    def _from_file(self, tokenizer: PreTrainedTokenizerBase, path: Path) -> list[list[int]]:
        require(
            path.is_file(),
            f"quantizer.calibration.file={path} is not a file; give a text or .jsonl file, or null for demonstrations "
            "of the task",
        )
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"quantizer.calibration.file={path} cannot be read ({error}); give a text in UTF-8"
            ) from None
        if path.suffix == ".jsonl":
            lines = [_text_of(path, number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
            samples = [plain_ids(tokenizer, line)[: self.length] for line in lines]
        else:
            ids = plain_ids(tokenizer, text)
            samples = [ids[i : i + self.length] for i in range(0, len(ids) - self.length + 1, self.length)]
        require(
            len(samples) >= self.samples,
            f"quantizer.calibration.file={path} gives {len(samples)} samples of up to {self.length} tokens, fewer than "
            f"quantizer.calibration.samples={self.samples}; use a longer file or fewer samples",
        )
        return samples[: self.samples]


def _text_of(path: Path, number: int, line: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (json.JSONDecodeError, KeyError, TypeError):
        text = None
    require(isinstance(text, str) and text != "", f"{path}:{number}: expected a JSON object with a string under text")
    return text  # type: ignore[return-value]


def batches(sequences: list[list[int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Right-padded token ids (B, T) and the mask (B, T) of real tokens; sequences of similar length share a batch."""
    import torch

    ordered = sorted(sequences, key=len)
    padded = []
    for start in range(0, len(ordered), BATCH_SIZE):
        batch = ordered[start : start + BATCH_SIZE]
        ids = torch.zeros(len(batch), max(map(len, batch)), dtype=torch.long)
        mask = torch.zeros_like(ids, dtype=torch.bool)
        for row, sequence in enumerate(batch):
            ids[row, : len(sequence)] = torch.tensor(sequence)
            mask[row, : len(sequence)] = True
        padded.append((ids, mask))
    return padded
