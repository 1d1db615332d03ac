"""The tokenizer of model=small: one token per word. Its words are numbers, names of one letter, and signs."""

from __future__ import annotations

import string

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, END, UNKNOWN = "<|pad|>", "<|end|>", "<|unknown|>"
SIGNS = ("+", "-", "*", "=", ";", ".", "?", ":", "->")
LARGEST_NUMBER = 200
WORDS = (PAD, END, UNKNOWN, *SIGNS, *(str(n) for n in range(LARGEST_NUMBER + 1)), *string.ascii_letters)
PAD_ID, END_ID = WORDS.index(PAD), WORDS.index(END)


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that splits at spaces. Words it does not know become `<|unknown|>`, which no task uses."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )
