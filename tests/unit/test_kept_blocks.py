"""quant.keep_first and quant.keep_last: which transformer blocks stay in 16 bits, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qerl_bench.model.byte_tokenizer import byte_tokenizer
from qerl_bench.model.load import load_packed
from qerl_bench.model.preflight import check_packed_share
from qerl_bench.quant.export import export
from qerl_bench.quant.linear import PackedLinear
from qerl_core.checks import ConfigError
from tests.models import builds
from tests.weight_formats import symmetric

SPEC: Any = symmetric("int4", 32)
LAYERS = 7  # of a block


@pytest.mark.parametrize(
    ("first", "last", "blocks", "kept"),
    [
        (0.0, 0.0, 28, set()),
        (0.0, 0.15, 28, {24, 25, 26, 27}),  # Miles
        (0.15, 0.0, 28, {0, 1, 2, 3}),
        (0.25, 0.25, 4, {0, 3}),
        (0.0, 0.125, 4, {3}),  # a half is rounded up
        (0.0, 0.1, 4, set()),
        (0.9, 0.0, 4, None),
        (0.4, 0.4, 2, None),
        (0.3, 0.0, 0, set()),
    ],
)
def test_shares_are_rounded_to_blocks(first: float, last: float, blocks: int, kept: set[int] | None) -> None:
    spec = replace(SPEC, keep_first=first, keep_last=last)
    if kept is not None:
        assert spec.kept(blocks) == kept
        return
    with pytest.raises(ConfigError, match=rf"keep_first={first} and quant\.keep_last={last} .* {blocks} .*Make one"):
        spec.kept(blocks)


@pytest.mark.parametrize("quant", ["nvfp4", "int4"])
def test_a_kept_block_computes_as_without_packing_and_its_layers_report_16_bits(
    quant: str, make_policy: Callable[..., Any]
) -> None:
    words = (f"quant={quant}", "quant.keep_first=0.25", "quant.keep_last=0.5", "model.layers=4")
    policy = make_policy(*words[1:], quant=quant)
    whole, plain = make_policy("model.layers=4", quant=quant), make_policy("model.layers=4", quant="bf16")
    for name, report in policy.layers.items():
        layer, number = policy.model.get_submodule(name).base_layer, int(name.split(".")[2])
        assert isinstance(layer, PackedLinear) == (number == 1)
        other = (whole if number == 1 else plain).model.get_submodule(name).base_layer
        if number == 1:
            assert report == whole.layers[name] and torch.equal(layer.dequantized(), other.dequantized())
        else:
            assert report.relative_error == 0 and report.bits_per_weight == 8 * layer.weight.element_size()
            assert torch.equal(layer.weight, other.weight)
    assert list(policy.layers) == list(whole.layers) and len(policy.layers) == 4 * LAYERS
    assert policy.packed_share == pytest.approx(0.25)
    found = check_packed_share(policy, symmetric_of(policy), "model=tiny")
    assert found["packed_share"] == pytest.approx(0.25) and len(found["unpacked"]) == 3 * LAYERS


def symmetric_of(policy: Any) -> Any:
    """The format of the run, as its packed layers have it."""
    return next(module for module in policy.model.modules() if isinstance(module, PackedLinear)).weight_format


def test_what_stays_unpacked_besides_is_still_refused(make_policy: Callable[..., Any]) -> None:
    policy = make_policy("quant.keep_last=0.25", "model.layers=4", quant="nvfp4")
    with pytest.raises(ConfigError, match=r"quant=nvfp4 packs 75% .*quant\.partial=true"):
        check_packed_share(policy, replace(symmetric_of(policy), keep_last=0.0), "model=tiny")


@pytest.mark.parametrize("quantizer", ["mse", "awq", "gptq"])
def test_every_quantizer_leaves_kept_blocks_alone(quantizer: str, make_policy: Callable[..., Any]) -> None:
    words = ("quant.keep_last=0.5", f"quantizer={quantizer}", "model.layers=2")
    text = () if quantizer == "mse" else ("quantizer.calibration.samples=4", "quantizer.calibration.length=16")
    policy = make_policy(*words, *text, quant="nvfp4")
    plain = make_policy("model.layers=2", quant="bf16")
    kept = dict(policy.model.model.layers[1].named_parameters())
    for name, parameter in plain.model.model.layers[1].named_parameters():
        assert torch.equal(kept[name], parameter), name
    assert isinstance(policy.model.model.layers[0].mlp.up_proj.base_layer, PackedLinear)


def test_a_model_whose_blocks_are_all_kept_is_refused(make_policy: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"quant\.keep_first=0\.9 .* 2 .*2 transformer blocks .*or use quant=bf16"):
        make_policy("quant.keep_first=0.9", quant="nvfp4")


def test_a_checkpoint_with_kept_blocks_comes_back_and_a_packed_one_cannot_keep_any(
    tmp_path: Path, make_policy: Callable[..., Any]
) -> None:
    from qerl_bench.config import build, compose

    folder = builds.build("llama", tmp_path / "llama")

    def load(where: Path, *words: str) -> Any:
        experiment = build(
            compose(["model=hub", f"model.id={where}", "model.dtype=bfloat16", "device=cpu", "quant=int4", *words])
        )
        parts = experiment.model, experiment.quant, experiment.quantizer, experiment.task
        return load_packed(*parts, None, "cpu")[0], experiment.quant

    model, quant = load(folder, "quant.keep_last=0.5")
    export(model, byte_tokenizer(), quant, tmp_path / "out")
    again, _ = load(tmp_path / "out")
    state = again.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    with pytest.raises(ConfigError, match=r"packed already, .*quant\.keep_first and quant\.keep_last"):
        load(tmp_path / "out", "quant.keep_last=0.5")
