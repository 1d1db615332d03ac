"""What the table of a sweep says about runs that its columns do not tell apart."""

from __future__ import annotations

from typing import Any

from qerl_studies.tables.terminal import differences


def config(**changes: Any) -> dict[str, Any]:
    base = {"model.name": "tiny", "aqn.name": "exp", "aqn.stages": 10, "lora.name": "default", "lora.rank": 16}
    return {**base, "lora.alpha": 32, "optim.lr": 1e-4, "seed": 0} | {
        key.replace("__", "."): changes[key] for key in changes
    }


def test_keys_that_differ_are_named_and_what_another_option_or_rank_brings_is_not() -> None:
    assert differences([config(optim__lr=1e-5), config(seed=1)]) == ["optim.lr=1e-05", "optim.lr=0.0001"]
    assert differences([config(), config(lora__rank=32, lora__alpha=64)]) == ["", ""]
    assert differences([config(), config(lora__alpha=64)]) == ["lora.alpha=32", "lora.alpha=64"]
    none = {key: value for key, value in config(aqn__name="none").items() if key != "aqn.stages"}
    assert differences([config(), none]) == ["", ""]
    assert differences([config(), config(aqn__stages=5), none]) == ["aqn.stages=10", "aqn.stages=5", ""]
    assert differences([config(), config(model__name="small-2m", optim__lr=3e-4)]) == ["", ""]
    assert differences([config(noise__where="adapters"), config(noise__where="norms")]) == ["", ""]
