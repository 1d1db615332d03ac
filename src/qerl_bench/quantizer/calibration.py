"""Calibration text for quantizers: demonstrations of the run's task, or a file.

Its seed is not the run's seed, so that a sweep over seeds trains the same packed base. Left out: mixing sources.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from qerl_bench.task.chat_template import Keywords, demonstration_ids, plain_ids
from qerl_core.checks import ConfigError, check_fields, count, require

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from qerl_core.records import Demonstration

BATCH_SIZE = 16  # sequences per forward pass; limits memory


class DemonstrationSource(Protocol):
    """The part of a task that calibration uses."""

    @property
    def name(self) -> str: ...

    def calibration_demonstrations(self, count: int, seed: int) -> list[Demonstration]: ...


@dataclass(frozen=True, kw_only=True)
class CalibrationText:
    """The text that a quantizer ran through a model: where it is from, and its token ids, a list for each sequence."""

    source: str
    sequences: list[list[int]]

    def __str__(self) -> str:
        return f"{len(self.sequences)} sequences, {sum(map(len, self.sequences)):,} tokens, of {self.source}"

    def record(self) -> dict[str, str | int]:
        """Source, sequences, tokens, and the SHA-256 of the token ids as JSON."""
        return {
            "source": self.source,
            "sequences": len(self.sequences),
            "tokens": sum(map(len, self.sequences)),
            "sha256": hashlib.sha256(json.dumps(self.sequences).encode()).hexdigest(),
        }


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

    def check(self, task: DemonstrationSource) -> None:
        """Raise ConfigError unless there is a text with enough samples, as far as that needs no tokenizer."""
        if self.file is None:
            task.calibration_demonstrations(self.samples, self.seed)
            return
        texts = self._texts(Path(self.file))
        if self._has_lines:
            self._require_enough(len(texts))

    def text(
        self, tokenizer: PreTrainedTokenizerBase, task: DemonstrationSource, template: Keywords | None
    ) -> CalibrationText:
        """The token ids of each sample, demonstrations as in training with the model's `template`.

        Raises ConfigError if the file cannot be read, or if it or the task has too few.
        """
        if self.file is None:
            demonstrations = task.calibration_demonstrations(self.samples, self.seed)
            prompts, completions = demonstration_ids(tokenizer, demonstrations, template)
            samples = [[*pair[0], *pair[1]][: self.length] for pair in zip(prompts, completions, strict=True)]
            return CalibrationText(source=f"task={task.name}, demonstrations of seed {self.seed}", sequences=samples)
        path, length = Path(self.file), self.length
        texts = [plain_ids(tokenizer, text) for text in self._texts(path)]
        if self._has_lines:
            samples = [ids[:length] for ids in texts]
        else:
            samples = [ids[i : i + length] for ids in texts for i in range(0, len(ids) - length + 1, length)]
        self._require_enough(len(samples))
        return CalibrationText(source=path.name, sequences=samples[: self.samples])

    @property
    def _has_lines(self) -> bool:
        return str(self.file).endswith(".jsonl")

    def _texts(self, path: Path) -> list[str]:
        """The text of each line of a `.jsonl` file, or the one text of another."""
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
        if not self._has_lines:
            return [text]
        return [_text_of(path, number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]

    def _require_enough(self, samples: int) -> None:
        require(
            samples >= self.samples,
            f"quantizer.calibration.file={self.file} gives {samples} samples of up to {self.length} tokens, fewer than "
            f"quantizer.calibration.samples={self.samples}; use a longer file or fewer samples",
        )


def _text_of(path: Path, number: int, line: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (json.JSONDecodeError, KeyError, TypeError):
        text = None
    require(
        isinstance(text, str) and text != "",
        f"quantizer.calibration.file={path}:{number}: expected a JSON object with a string under text; rename the "
        "column, or give a plain text",
    )
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
