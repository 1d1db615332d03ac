"""The tokenizer of a GGUF file, made of its metadata: tokenizer.json and tokenizer_config.json.

Two kinds are read: byte-level BPE with stored merges (`gpt2`), and SentencePiece's BPE (`llama`), whose merges follow
from the scores of its pieces. How a text is split before merging is in no file: `tokenizer.ggml.pre` names it, and an
unknown name is refused, because another split gives other tokens without a word.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl_bench.model.gguf.header import Header
from qerl_core.checks import require

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PREFIX = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"
UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5  # types of tokens; 1 is a normal piece, 6 a byte
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
QWEN2, LLAMA3 = _SPLIT.replace("DIGITS", ""), _SPLIT.replace("DIGITS", "{1,3}")
SPLITS = {"gpt-2": None, "smollm": None, "qwen2": QWEN2, "deepseek-r1-qwen": QWEN2, "llama-bpe": LLAMA3}
SPACE = "▁"
# What special tokens that end a turn or a text are called; each one that the vocabulary has stops a completion.
ENDS = ("<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<eos>", "</s>")
MARK = "an answer of the assistant"


def write_tokenizer(header: Header, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json. Raises ConfigError if the file has no tokenizer that is known."""
    tokens, special = header.need(f"{PREFIX}tokens"), _special(header)
    tokenizer = _tokenizer(header)
    adds_bos = _adds_bos(header)
    if adds_bos:
        from tokenizers import processors

        bos = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"], special_tokens=[(bos, tokens.index(bos))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "TokenizersBackend",  # transformers' own class of a model would replace the splits
        **special,
        "add_bos_token": adds_bos,
        "model_max_length": header.need(f"{header.architecture}.context_length"),
        "clean_up_tokenization_spaces": False,
    }
    if template := header.metadata.get(TEMPLATE):
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False))


def _special(header: Header) -> dict[str, str]:
    """The special tokens by the names that transformers has for them."""
    tokens = header.need(f"{PREFIX}tokens")
    special = {}
    for name in ("bos", "eos", "unknown", "padding"):
        number = header.metadata.get(f"{PREFIX}{name}_token_id")
        if number is not None:
            require(
                isinstance(number, int) and 0 <= number < len(tokens),
                f"model.id={header.path}: {PREFIX}{name}_token_id={number} is none of the {len(tokens)} tokens; "
                "download the file again",
            )
            special[{"unknown": "unk_token", "padding": "pad_token"}.get(name, f"{name}_token")] = tokens[number]
    require(
        "eos_token" in special,
        f"model.id={header.path} has no {PREFIX}eos_token_id, so that no answer would end; choose another file",
    )
    return special


def _adds_bos(header: Header) -> bool:
    """Whether a plain text begins with BOS. Without a word of the file it does where llama.cpp has it so."""
    default = header.metadata.get(f"{PREFIX}model") == "llama" or header.metadata.get(f"{PREFIX}pre") == "llama-bpe"
    adds = bool(header.metadata.get(f"{PREFIX}add_bos_token", default))
    require(
        not adds or f"{PREFIX}bos_token_id" in header.metadata,
        f"model.id={header.path} has {PREFIX}add_bos_token=true and no {PREFIX}bos_token_id; choose another file",
    )
    return adds


def _tokenizer(header: Header) -> Tokenizer:
    from tokenizers import AddedToken

    kind, tokens = header.need(f"{PREFIX}model"), header.need(f"{PREFIX}tokens")
    require(
        kind in ("gpt2", "llama"),
        f"model.id={header.path} has {PREFIX}model={kind}; readable are gpt2 and llama. Give the model as safetensors",
    )
    types = header.need(f"{PREFIX}token_type")
    require(
        len(types) == len(tokens),
        f"model.id={header.path}: {PREFIX}token_type has {len(types)} entries for {len(tokens)} tokens; download the "
        "file again",
    )
    vocabulary = {token: number for number, token in enumerate(tokens) if types[number] != UNUSED}
    tokenizer = _byte_level(header, vocabulary) if kind == "gpt2" else _sentencepiece(header, vocabulary)
    by_type = [
        (number, token) for number, token in enumerate(tokens) if types[number] in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    added = [AddedToken(token, special=types[number] != USER_DEFINED, normalized=False) for number, token in by_type]
    tokenizer.add_tokens(added)  # all have their ids in the vocabulary
    return tokenizer


def _byte_level(header: Header, vocabulary: Mapping[str, int]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    split = header.metadata.get(f"{PREFIX}pre")
    require(
        split in SPLITS,
        f"model.id={header.path} has {PREFIX}pre={split}, a way to split texts that is not known; readable are "
        f"{', '.join(SPLITS)}. Give the model as safetensors",
    )
    merges = [tuple(merge.split(" ", 1)) for merge in header.need(f"{PREFIX}merges")]
    tokenizer = Tokenizer(models.BPE(vocab={**vocabulary}, merges=merges, ignore_merges=split == "llama-bpe"))  # type: ignore[arg-type]
    pattern = SPLITS[str(split)]
    parts: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split == "smollm" else []
    if pattern is not None:
        parts.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()  # as Qwen's own; llama.cpp leaves it out
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(header: Header, vocabulary: Mapping[str, int]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    merges = merges_of(vocabulary, header.need(f"{PREFIX}scores"), header.need(f"{PREFIX}token_type"))
    unknown = header.need(f"{PREFIX}tokens")[header.need(f"{PREFIX}unknown_token_id")]
    tokenizer = Tokenizer(
        models.BPE(vocab={**vocabulary}, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefixed = header.metadata.get(f"{PREFIX}add_space_prefix", True)
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefixed else spaces
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def merges_of(vocabulary: Mapping[str, int], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """Every way to make a normal piece of two others, the piece with the highest score first."""
    pieces = {token: number for token, number in vocabulary.items() if types[number] == 1}
    merges = []
    for piece in sorted(pieces, key=lambda piece: -scores[pieces[piece]]):
        halves = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        both = [(left, right) for left, right in halves if left in pieces and right in pieces]
        merges += sorted(both, key=lambda pair: (pieces[pair[0]], pieces[pair[1]]))
    return merges


def stop_tokens(header: Header, tokenizer: Any) -> list[int]:
    """Ids of the tokens that end a completion, the file's own first; with the one behind a turn of the template."""
    tokens, types = header.need(f"{PREFIX}tokens"), header.need(f"{PREFIX}token_type")
    stops = [header.metadata.get(f"{PREFIX}{name}_token_id") for name in ("eos", "eot", "eom")]
    stops += [number for number, token in enumerate(tokens) if types[number] == CONTROL and token in ENDS]
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": MARK}]
        try:
            text = str(tokenizer.apply_chat_template(turns, tokenize=False))
        except Exception:  # whatever a foreign template raises; asking with it says so in its own words
            text = ""
        behind = text.rpartition(MARK)[2] if MARK in text else ""
        ids = tokenizer(behind, add_special_tokens=False)["input_ids"]
        stops += [number for number in ids if types[number] in (CONTROL, USER_DEFINED)][:1]
    return [*dict.fromkeys(number for number in stops if number is not None)]
