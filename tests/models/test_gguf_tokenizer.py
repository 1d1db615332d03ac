"""The tokenizer of a GGUF file has the ids of the one that the file was made of, and begins plain prompts with BOS."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from qerl_bench.model.gguf.vocabulary import LLAMA3, QWEN2, merges_of
from qerl_bench.model.hub import HubModel
from qerl_bench.task.chat_template import demonstration_ids, opening_of, render_prompt
from qerl_core.records import RENDERED, Demonstration, Prompt
from tests.models.gguf_files import SPECIAL, model_of, tokenizer_keys, write

TEXTS = [
    *(path.read_text()[:400] for path in sorted(Path(__file__).parent.glob("*.py"))),
    *(
        "",
        " ",
        "  two",
        "a  b   c    d",
        "tail  ",
        "\n",
        "a\n\n\nb\r\n\tc",
        "1234567 3.14 0x1F ½ ٣",
        "It's WE'LL they'Re",
    ),
    *(
        "naïve café",
        "日本語のテキスト",
        "Привет, мир!",
        "हिन्दी",
        "🤽🏽‍♀️ 😀😀",
        "\u00a0nbsp\u200b",
        "<|im_start|>user\nhi<|im_end|>\n",
    ),
    *("x<|endoftext|>y", "!!!???", "$x^2$ \\boxed{42}", "a▁b", "\x00\x01"),
]
SPLITS: dict[str, list[Any]] = {
    "qwen2": [pre_tokenizers.Split(Regex(QWEN2), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)],
    "llama-bpe": [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)],
    "smollm": [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)],
    "gpt-2": [pre_tokenizers.ByteLevel(False)],
}


def trained(split: str) -> Tokenizer:
    """A byte-level tokenizer trained on these texts."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=split == "llama-bpe"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(SPLITS[split])
    tokenizer.decoder = decoders.ByteLevel()
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=[*SPECIAL], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def read(tmp_path: Path, tokenizer: dict[str, Any], **words: Any) -> Any:
    model = model_of("llama", vocab_size=len(tokenizer["tokens"]))
    folder = HubModel(
        name="x",
        id=str(write(tmp_path / "x.gguf", model, tokenizer=tokenizer, **words)),
        revision=None,
        trust_remote_code=False,
        dtype="bfloat16",
        lr=1e-5,
        template={},
        dither=None,
        dither_scale=1.0,
    ).converted(tmp_path)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("split", SPLITS)
def test_byte_level_ids_are_those_of_the_tokenizer_that_the_file_was_made_of(split: str, tmp_path: Path) -> None:
    known = trained(split)
    stored = json.loads(known.to_str())["model"]
    tokens = [token for token, _ in sorted(known.get_vocab().items(), key=lambda item: item[1])]
    keys = tokenizer_keys(
        pre=split,
        tokens=[*tokens, "[PAD600]"],
        token_type=[3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)) + [5],
        merges=[" ".join(merge) for merge in stored["merges"]],
        eos_token_id=2,
        bos_token_id=0,
        padding_token_id=0,
    )
    tokenizer = read(tmp_path, keys)
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == known.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == text


PIECES = ["a", "b", "c", "ab", "bc", "abc", "▁", "▁a", "▁ab", "ca", "cab", "aa", "▁c"]


def sentencepiece_keys(**changes: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary: special tokens, two runs of spaces, all bytes, and PIECES by falling score."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "  ", "   ", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    others = len(tokens) - len(PIECES)
    return {
        "model": "llama",
        "tokens": tokens,
        "scores": [-1000.0] * others + [-float(rank) for rank in range(len(PIECES))],
        "token_type": [3, 3, 3, 2, 4, 4] + [6] * 256 + [1] * len(PIECES),
        "bos_token_id": 2,
        "eos_token_id": 1,
        "unknown_token_id": 3,
        "padding_token_id": 0,
        "add_bos_token": True,
        "add_space_prefix": False,
    } | changes


def merged(text: str, score: dict[str, float]) -> list[str]:
    """SentencePiece's BPE by its definition: while two neighbours make a piece, those with the best score, leftmost."""
    parts = [*text]
    while True:
        joined = [(score[pair], -at) for at in range(len(parts) - 1) if (pair := parts[at] + parts[at + 1]) in score]
        if not joined:
            return parts
        at = -max(joined)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def pieces_of(text: str, keys: dict[str, Any]) -> list[str]:
    """`merged`, with runs of spaces first, the longest before others, and bytes of what is no piece."""
    score = dict(zip(keys["tokens"][-len(PIECES) :], keys["scores"][-len(PIECES) :], strict=True))
    for run in ("   ", "  "):
        if run in text:
            before, _, after = text.partition(run)
            return [*pieces_of(before, keys), run, *pieces_of(after, keys)]
    parts = merged(text.replace(" ", "▁"), score)
    return [
        piece
        for part in parts
        for piece in ([part] if part in score else [f"<0x{byte:02X}>" for byte in part.encode()])
    ]


def test_sentencepiece_ids_are_those_of_its_definition(tmp_path: Path) -> None:
    keys = sentencepiece_keys()
    tokenizer = read(tmp_path, keys, template=None)
    texts = ["abc", "cab abc  aab", "   ", "aabbccabc", " a ab", "é漢", "ab\nc", "a   b", "cabcabcab", "x"]
    for text in texts:
        ids = [keys["tokens"].index(piece) for piece in pieces_of(text, keys)]
        assert tokenizer(text)["input_ids"] == [2, *ids]
        assert tokenizer.decode(ids) == text


def test_a_space_goes_before_a_text_where_the_file_says_nothing(tmp_path: Path) -> None:
    keys = sentencepiece_keys(add_space_prefix=None)
    tokenizer = read(tmp_path, keys, template=None)
    assert tokenizer.convert_ids_to_tokens(tokenizer("ab")["input_ids"]) == ["<bos>", "▁ab"]
    assert tokenizer.decode(tokenizer("ab")["input_ids"], skip_special_tokens=True) == "ab"


def test_merges_come_by_the_score_of_what_they_make() -> None:
    vocabulary = {"a": 0, "b": 1, "ab": 2, "aa": 3, "aab": 4}
    merges = merges_of(vocabulary, [0.0, 0.0, -2.0, -1.0, -3.0], [1] * 5)
    assert merges == [("a", "a"), ("a", "b"), ("a", "ab"), ("aa", "b")]


@pytest.mark.parametrize(("adds", "opening"), [(True, "<bos>"), (False, ""), (None, "<bos>")])
def test_plain_prompts_begin_with_bos_if_the_file_says_so(adds: bool | None, opening: str, tmp_path: Path) -> None:
    tokenizer = read(tmp_path, sentencepiece_keys(add_bos_token=adds), template=None)
    assert opening_of(tokenizer) == opening
    messages = ({"role": RENDERED, "content": "ab"},)
    assert render_prompt(tokenizer, messages, {}) == f"{opening}ab"  # type: ignore[arg-type]
    twice = ({"role": RENDERED, "content": f"{opening}ab"},)
    assert render_prompt(tokenizer, twice, {}) == f"{opening}ab"  # type: ignore[arg-type]
    ids = [2] * bool(opening)
    demonstration = Demonstration(prompt=Prompt(id="1", messages=messages, answer=""), completion="c")  # type: ignore[arg-type]
    prompts, completions = demonstration_ids(tokenizer, [demonstration], {})
    assert prompts == [[*ids, 265]] and completions == [[264, 1]]


def test_a_llama_3_file_without_a_word_begins_with_bos(tmp_path: Path) -> None:
    keys = tokenizer_keys(pre="llama-bpe", add_bos_token=None)
    assert read(tmp_path, keys)("a")["input_ids"][0] == 257
    (tmp_path / "2").mkdir()
    assert read(tmp_path / "2", tokenizer_keys(add_bos_token=None))("a")["input_ids"][0] < 256
