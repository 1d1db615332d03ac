"""Checks token ids against the rows of the embedding: some tokenizers define more tokens than their model has.

A token without a row can be asked for nothing: reading it ends a run on a CPU, and damages the device on a GPU. Padding
is masked, so that any row will do for it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from qerl_bench.task.chat_template import Keywords, end_of_turn
from qerl_core.checks import require

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)


def stop_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, template: Keywords | None = None
) -> frozenset[int]:
    """Tokens that end a completion: the tokenizer's own, those in the model's generation config, and the one that ends
    a turn in the chat template."""
    listed = model.generation_config.eos_token_id if model.generation_config is not None else None
    named = [tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])]
    ids = frozenset(token for token in named if isinstance(token, int))
    turn = end_of_turn(tokenizer, template)
    if turn is not None and turn not in ids:
        log.warning(
            "the chat template ends a turn with %s, which tokenizer and generation config do not name as an end (they "
            "have %s): it ends completions and demonstrations too",
            tokenizer.convert_ids_to_tokens(turn),
            ", ".join(map(str, tokenizer.convert_ids_to_tokens(sorted(ids)))) or "none",
        )
        ids |= {turn}
    return ids


def with_rows(ids: Iterable[int], rows: int, name: str) -> frozenset[int]:
    """Those of `ids` that an embedding of `rows` rows has. Raises ConfigError, for the model `name`, if it has none."""
    found = frozenset(token for token in ids if 0 <= token < rows)
    require(
        bool(found),
        f"{name} names no token that ends a text, or only {sorted(ids)}, and its embedding has the rows 0 to "
        f"{rows - 1}: no completion could end. Set eos_token_id in generation_config.json, or choose another model",
    )
    return found


def padding(pad_id: object, stop_ids: Iterable[int], rows: int) -> int:
    """The tokenizer's `pad_id`, or the first of `stop_ids` where that is none or has no row."""
    return pad_id if isinstance(pad_id, int) and 0 <= pad_id < rows else min(stop_ids)


def require_rows(tokenizer: PreTrainedTokenizerBase, sequences: Iterable[Sequence[int]], rows: int, where: str) -> None:
    """Raise ConfigError, naming the token, if one of `sequences` has one that an embedding of `rows` rows lacks.

    `where` says whose text it is.
    """
    for ids in sequences:
        highest = max(ids, default=0)
        require(
            0 <= highest < rows,
            f"{where} has the token {tokenizer.convert_ids_to_tokens(highest)!r} with the id {highest} in its "
            f"tokenizer's files, and the embedding has the rows 0 to {rows - 1}: tokenizer and weights belong to "
            "different models. Give the tokenizer that came with the weights, enlarge the embedding "
            "(resize_token_embeddings of transformers), or use a template without this token, such as "
            "task.template=plain",
        )
