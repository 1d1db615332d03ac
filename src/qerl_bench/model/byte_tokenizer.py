"""The byte-level tokenizer of model=tiny and model=shape: one token per byte, plus one per tag of the answer format."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD_ID, END_ID = 256, 257
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
# User messages only: a model of this size does not profit from a system prompt that never changes.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'user' %}{{ message.content }}\n{% endif %}{% endfor %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 262 tokens: 256 bytes, padding, end of text, and the four tags."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|pad|>", "<|end|>"])
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    assert tokenizer.token_to_id("<|pad|>") == PAD_ID and tokenizer.token_to_id("<|end|>") == END_ID
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
