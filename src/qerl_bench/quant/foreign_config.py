"""What config.json and generation_config.json of others may say: the rest is refused by name, or mended with a word.

transformers passes over keys that it does not know, and dies of some values of those that it does, or of writing back
what it has read. Sampling flags are never used here; token ids are.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from qerl_core.checks import ConfigError, require

log = logging.getLogger(__name__)
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
ELSEWHERE = {  # keys that say where a model comes from, that are read elsewhere, or are earlier names of known ones
    *("_name_or_path", "auto_map", "transformers_version", "unsloth_version", "unsloth_fixed", "model_type"),
    *("quantization_config", "compression_config", "torch_dtype", "attn_implementation", "_attn_implementation"),
    *("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor", "rotary_pct", "rotary_emb_base"),
    *("output_attentions", "_attn_implementation_autoset", "sliding_window_pattern", "_sliding_window_pattern"),
}
GENERATION = "generation_config.json"


def checked_config(where: str | Path, config: Any, raw: Mapping[str, Any]) -> Any:
    """The text config of the model at `where`, whose config.json says `raw`, without a pad token that has no embedding.

    Raises ConfigError, naming the key, if a value names an activation, a rotation or a number of heads that the model
    cannot have. Keys that its class does not know are named in the log, since nothing computes what they say.
    """
    from transformers.activations import ACT2FN

    file = f"{where}: config.json has"
    for key in ACTIVATIONS:
        named = getattr(config, key, None)
        require(
            not isinstance(named, str) or named in ACT2FN,
            f"{file} {key}={named!r}, which is no activation of transformers; correct config.json, or choose a model "
            f"whose activation is known, such as {', '.join(sorted(ACT2FN)[:5])}",
        )
    for key, kind in _rotations(config):
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        known = {"default", *ROPE_INIT_FUNCTIONS}
        require(
            kind in known,
            f"{file} {key}={kind!r}, which is no rotary embedding of transformers; it knows "
            f"{', '.join(sorted(known))}. Choose another model, or a version of transformers that has it",
        )
    text = raw.get("text_config")
    said = text if isinstance(text, Mapping) and text.get("model_type") == config.model_type else raw
    for key, one, other in _twice(said):
        require(
            one == other,
            f"{file} {key}={one} and {other} in rope_parameters, its later name; correct config.json: one of them is "
            "what other programs read",
        )
    heads, shared = (getattr(config, key, None) for key in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(shared, int):
        require(
            shared > 0 and heads % shared == 0,
            f"{file} num_key_value_heads={shared}, which does not divide num_attention_heads={heads}; correct "
            "config.json",
        )
    rows, pad = getattr(config, "vocab_size", None), getattr(config, "pad_token_id", None)
    if isinstance(rows, int) and isinstance(pad, int) and not 0 <= pad < rows:
        log.warning("%s pad_token_id=%d, and the embedding has the rows 0 to %d: left out", file, pad, rows - 1)
        config.pad_token_id = None
    if getattr(config, "return_dict", None) is False:  # of tuples no part has a name
        log.warning("%s return_dict=false, which says how a model hands over what it computes: left out", file)
        config.return_dict = True
    if unknown := _unknown(config, said):
        log.warning("%s %s, which %s does not know: left out", file, ", ".join(unknown), type(config).__name__)
    return config


def _rotations(config: Any) -> Iterator[tuple[str, Any]]:
    """Where config.json names a kind of rotary embedding, and which."""
    whole = getattr(config, "rope_parameters", None)
    if not isinstance(whole, Mapping):
        return
    parts = {f".{name}": part for name, part in whole.items() if isinstance(part, Mapping)}
    for name, part in ({"": whole} | parts).items():
        if "rope_type" in part:
            yield f"rope_parameters{name}.rope_type", part["rope_type"]


def _twice(said: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """What a config says of its rotation by an earlier key, and what `rope_parameters` does, where it says both."""
    whole, scaling = said.get("rope_parameters"), said.get("rope_scaling")
    if not isinstance(whole, Mapping) or any(isinstance(part, Mapping) for part in whole.values()):
        return
    earlier = {key: said[key] for key in ("rope_theta", "partial_rotary_factor") if said.get(key) is not None}
    if isinstance(scaling, Mapping):
        earlier |= {"rope_type" if key == "type" else str(key): value for key, value in scaling.items()}
    for key, value in earlier.items():
        if value is not None and (key in whole or isinstance(scaling, Mapping)):
            yield key, value, whole.get(key)


def _unknown(config: Any, said: Mapping[str, Any]) -> list[str]:
    """What `said` sets beyond the keys that the class of `config` has; nothing that is off."""
    from transformers import GenerationConfig

    kind = type(config)
    renamed = {*kind.attribute_map, *kind.attribute_map.values()}
    known = {*dir(kind), *renamed, *kind.sub_configs, *GenerationConfig().to_dict(), *_read_by_model(kind)}
    set_here = {key: value for key, value in said.items() if value not in (None, False, "", [], {})}
    return [f"{key}={str(value)[:40]}" for key, value in set_here.items() if key not in known | ELSEWHERE]


@lru_cache(maxsize=8)
def _read_by_model(kind: type) -> set[str]:
    """The keys that the file of the model beside that of its config class reads, declared there or not."""
    file = Path(inspect.getfile(kind))
    model = file.with_name(file.name.replace("configuration_", "modeling_"))
    text = model.read_text(encoding="utf-8") if model.is_file() else ""
    found = re.findall(r"""\bgetattr\(\s*(?:self\.)?config,\s*["'](\w+)["']|\bconfig\.(\w+)""", text)
    return {quoted or plain for quoted, plain in found}


def generation_config_of(file: Path) -> dict[str, Any]:
    """What a generation_config.json says. Raises ConfigError if it is no JSON, or an end of text is no token id."""
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        said = None
    if not isinstance(said, dict):
        raise ConfigError(f"{file} is no JSON object; correct it, or delete it: the ends of text in config.json hold")
    ends = said.get("eos_token_id")
    require(
        ends is None or all(map(_is_id, ends if isinstance(ends, list) else [ends])),
        f"{file} has eos_token_id={ends!r}, which is no token id and no list of them; correct it",
    )
    return said


def generation_config(folder: Path) -> Any:
    """The generation config in `folder`; None without a file. Raises ConfigError as `generation_config_of` does.

    What could be read and not written again, such as a temperature without sampling, is left out with a word: a run
    would end at its first checkpoint.
    """
    from transformers import GenerationConfig

    file = folder / GENERATION
    if not file.is_file():
        return None
    said = generation_config_of(file)
    wrong = [key for key in IDS[::2] if said.get(key) is not None and not _is_id(said[key])]
    if wrong:
        log.warning("%s has %s, which is no token id: left out", file, ", ".join(f"{k}={said[k]!r}" for k in wrong))
        said = {key: value for key, value in said.items() if key not in wrong}
    try:
        whole = GenerationConfig.from_dict(said)
        whole.validate(strict=True)
        return whole
    except (ValueError, TypeError, AttributeError) as error:
        used = {key: said[key] for key in IDS if said.get(key) is not None}
        rest = {key: value for key, value in said.items() if key not in IDS and not key.startswith("_") and value}
        issues = [line for line in str(error).split("\n") if line.startswith("- ")] or str(error).split("\n")
        log.warning(
            "%s cannot be written again (%s): only its token ids are kept, which are all that is used here. Left out: "
            "%s",
            *(file, issues[0].removeprefix("- "), ", ".join(f"{key}={value!r}" for key, value in rest.items())),
        )
        return GenerationConfig(**used)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
