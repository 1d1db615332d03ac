"""Which causal language model a config.json describes: its own, or the text part of a multimodal one.

Whatever cannot be one is refused here, before any weights are read or downloaded. Python code that comes with a model
is executed only with `trust_remote_code`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qerl_bench.quant.foreign_config import checked_config
from qerl_core.checks import ConfigError, require
from qerl_core.process.out_of_memory import shortage
from qerl_core.rundir.disk_errors import failure

# Tensor names of a multimodal checkpoint -> those of its text part alone.
TEXT_PART = {
    r"^language_model\.model\.": "model.",
    r"^model\.language_model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}
_REMEDY = "Choose a decoder-only language model: model.id=ORG/NAME or a folder"


def causal_lm_config(where: str | Path, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The config of the causal language model at `where`, a hub id or a folder, as AutoModelForCausalLM takes it.

    Raises ConfigError, naming the model, if its config cannot be read, or describes no such model.
    """
    from transformers import AutoConfig
    from transformers.utils.hub import cached_file

    with read_errors(where, "config.json"):
        file: Any = cached_file(where, "config.json", revision=revision)
        raw: Any = json.loads(Path(file).read_text(encoding="utf-8"))
    named = isinstance(raw, dict) and isinstance(raw.get("model_type"), str)
    require(named, f"{where} has no config.json with a model_type. {_REMEDY}")
    _require_known(where, raw, trust_remote_code)
    with read_errors(where, "config.json"):
        config = AutoConfig.from_pretrained(where, revision=revision, trust_remote_code=trust_remote_code)
    if trust_remote_code and "AutoModelForCausalLM" in raw.get("auto_map", {}):
        return config
    return checked_config(where, _text_part(where, config), raw)


def kept_in_float32(model: Any, name: str) -> bool:
    """Whether transformers reads the parameter or buffer `name` of `model` in FP32 though the model is in 16 bits.

    It does so with the routers of some mixtures, from 5.24 on with those of DeepSeek and GLM too.
    """
    return any(re.search(part.replace("*", ".*"), name) for part in model._keep_in_fp32_modules_strict or ())


def _require_known(where: str | Path, raw: Mapping[str, Any], trust_remote_code: bool) -> None:
    import transformers

    if raw["model_type"] in transformers.CONFIG_MAPPING:
        return
    unknown = f"{where} is of the type {raw['model_type']}, which transformers {transformers.__version__} does not know"
    require("auto_map" in raw, f"{unknown}. Install a version that does, or choose another model with model.id")
    require(
        trust_remote_code,
        f"{unknown}. It brings Python code of its own, which was not executed: read it, then allow it with "
        "model.trust_remote_code=true",
    )


def _text_part(where: str | Path, config: Any) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    encoder = hasattr(config, "add_cross_attention") and not getattr(config, "is_decoder", True)  # BERT and its kin
    text = config.get_text_config(decoder=True)
    causal = not encoder and not getattr(config, "is_encoder_decoder", False)
    require(
        causal and type(text) in MODEL_FOR_CAUSAL_LM_MAPPING,
        f"{where} is of the type {config.model_type}, whose text part ({text.model_type}) is no causal language model "
        f"in transformers. {_REMEDY}",
    )
    if text is not config:  # the outer config decides
        text.tie_word_embeddings, text.dtype = config.tie_word_embeddings, config.dtype
    return text


@contextmanager
def read_errors(where: str | Path, what: str, remedy: str = "") -> Iterator[None]:
    """A failure to find or read `what` at `where` becomes a ConfigError: foreign files can break a reader anyhow.
    `remedy` is a sentence about `what` for a model that is there.

    Not if memory or disk ran out, which is said elsewhere.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if shortage(error) or failure(error):
            raise
        local = str(where).startswith(("/", ".", "~"))  # which no hub id does
        absent = "there is no such folder" if local and not Path(where).exists() else ""
        reason = absent or str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
        told = f"{remedy}. " if remedy and not absent else ""
        raise ConfigError(
            f"{what} of model.id={where} cannot be read: {reason}. {told}Give a hub id that this machine can reach or "
            "a complete local folder: model.id=/path/to/model"
        ) from error
