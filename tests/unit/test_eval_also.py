"""eval.also: one trained policy answers in further formats, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from qerl_bench.commands.eval import main
from qerl_core.checks import ConfigError
from qerl_core.metrics.definitions import definitions
from qerl_core.options.fingerprint import fingerprint
from tests.unit.test_validation import of_kind, run

pytestmark = pytest.mark.usefixtures("no_figures")
PREFIX = "eval/in/"
TRAINED, ALSO = "quant=nvfp4", "eval.also=[bf16,nvfp4,nvfp4+mse]"


def test_a_policy_answers_in_each_format_as_a_later_evaluation_does(
    tmp_path: Path, make_config: Callable[..., Any]
) -> None:
    words = (TRAINED, "eval.every=0")
    alone = run(make_config, tmp_path, "alone", *words)
    also = run(make_config, tmp_path, "also", *words, ALSO)
    assert of_kind(also, "train") == of_kind(alone, "train")
    first, last = of_kind(also, "eval")
    others = {name: value for name, value in last.items() if name.startswith(PREFIX)}
    assert [first, {name: last[name] for name in last if name not in others}] == of_kind(alone, "eval")
    assert {name.split("/")[2] for name in others} == {"bf16", "nvfp4+mse"}  # in nvfp4 it has answered already

    answers = pd.read_parquet(also / "samples_in_formats.parquet")
    by_format = answers.groupby(["format", "mode"])["correct"].mean()
    for name, quantizer in {"bf16": None, "nvfp4+mse": "mse"}.items():
        asked = [f"eval.quant={name.partition('+')[0]}", *([f"eval.quantizer={quantizer}"] if quantizer else [])]
        main([str(alone), *asked, f"out={tmp_path / name}"])
        later: Any = pd.read_parquet(tmp_path / name / "samples.parquet")
        later = later[later["step"] == 4].drop(columns="step").reset_index(drop=True)
        here: Any = answers[answers["format"] == name]
        pd.testing.assert_frame_equal(here[later.columns].reset_index(drop=True), later)
        for mode in ("greedy", "sampled"):
            assert others[f"{PREFIX}{name}/accuracy_{mode}"] == pytest.approx(by_format[name, mode])
    assert not here["completion"].equals(answers[answers["format"] == "bf16"]["completion"].reset_index(drop=True))


def test_runs_that_answer_in_further_formats_are_others_and_those_before_stay(
    tmp_path: Path, make_config: Callable[..., Any]
) -> None:
    plain, none, some = (make_config(TRAINED, *words) for words in ((), ("eval.also=[]",), (ALSO,)))
    assert fingerprint(plain) == fingerprint(none) != fingerprint(some)


def test_each_metric_has_a_definition(tmp_path: Path, make_config: Callable[..., Any]) -> None:
    folder = run(make_config, tmp_path, "short", TRAINED, "eval.also=[bf16]", "steps=1", "eval.every=0")
    written = {name for line in of_kind(folder, "eval") for name in line if name.startswith(PREFIX)}
    assert written and {name.replace("/bf16/", "/FORMAT/") for name in written} <= definitions().keys()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["eval.also=bf16"], r"eval\.also must be a list of weight formats"),
        (["eval.also=[nvfp5]"], r"eval\.also must be .*nvfp4.*got 'nvfp5'"),
        (["eval.also=[nvfp4+best]"], r"eval\.also must be .*gptq.*got 'best'"),
        (["eval.also=[bf16+gptq]"], r"eval\.also=gptq chooses codes, and quant=bf16 stores none"),
        (["eval.also=[nvfp4+awq]", "lora.train_norms=true"], r"eval\.also=nvfp4 .*lora\.train_norms=false"),
        (["eval.also=[bf16]", "engine=vllm"], r"eval\.also=bf16 .*only engine=hf"),
    ],
)
def test_what_cannot_answer_is_refused_before_a_run(
    words: list[str], said: str, make_experiment: Callable[..., Any]
) -> None:
    with pytest.raises(ConfigError, match=said):
        make_experiment(TRAINED, *words)
