"""The split of a rounding error: by hand, as an identity, and on the Gaussian weights whose errors are known."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2ForCausalLM

from qerl_bench.config import build, compose
from qerl_bench.model.small import spread_channels
from qerl_bench.quant.error_decomposition import layer_report, output_error, unpacked_report, write_layers
from qerl_bench.quant.linear import pack_linear
from qerl_bench.quant.mxfp4 import MXFP4
from qerl_bench.quant.nf4 import NF4
from qerl_bench.quant.nvfp4 import NVFP4
from qerl_bench.quantizer.apply import RTN, quantize_model
from qerl_bench.quantizer.calibration import Calibration
from qerl_core.checks import ConfigError
from qerl_core.options import user_options
from qerl_studies.commands.figure import main as draw_figure
from qerl_studies.figures.error_decomposition import draw, one_of_each
from tests.scripts import script
from tests.weight_formats import FORMATS, PLAIN, symmetric

NVFP4_SPEC = NVFP4(name="nvfp4", compute_dtype="float32", convention="compressed-tensors", **PLAIN)
NF4_SPEC = NF4(name="nf4", double_quant=True, backend="own", **PLAIN)
DIAL_ROW = r"(?m)^\| (\d[\d.]*)(?:, [^|]*)? \| (0\.\d+) \| (0\.\d+) \|$"


def test_by_hand() -> None:
    # W = (2, 1, 2, 0) becomes Q = (2, 0, 1, 0): <W,Q> = 6 of 9, so g = 2/3 and R = Q - 2/3 W = (2/3, -2/3, -1/3, 0).
    report = layer_report(torch.tensor([[2.0, 1.0, 2.0, 0.0]]), torch.tensor([[2.0, 0.0, 1.0, 0.0]]), size=2)
    assert report.relative_error == pytest.approx(math.sqrt(2 / 9))
    assert report.gain == pytest.approx(2 / 3)
    assert report.scale_bias == pytest.approx(1 / 9)
    assert report.dead_zone == pytest.approx((4 / 9) / 9)
    assert report.grid_noise == pytest.approx((4 / 9 + 1 / 9) / 9)
    assert report.cosine == pytest.approx(6 / math.sqrt(9 * 5))
    assert report.zero_share == 0.5
    # Mean 5/4; deviations 3/4, -1/4, 3/4, -5/4: squares 9 + 1 + 9 + 25 over 16, fourths 81 + 1 + 81 + 625 over 256.
    assert report.kurtosis == pytest.approx((788 / 256 / 4) / (44 / 16 / 4) ** 2)
    assert (report.bytes, report.bits_per_weight, report.output_error) == (2, 4.0, None)


def test_a_pure_shrink_is_all_scale_bias_and_zeros_are_no_error() -> None:
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    report = layer_report(weight, 0.9 * weight, size=1)
    assert report.scale_bias == pytest.approx(0.01, rel=1e-5)
    assert report.dead_zone == 0 and report.grid_noise == pytest.approx(0, abs=1e-9)
    nothing = layer_report(torch.zeros(2, 16), torch.zeros(2, 16), size=1)
    assert (nothing.relative_error, nothing.gain, nothing.cosine, nothing.zero_share) == (0, 1, 1, 1)
    all_dead = layer_report(weight, torch.zeros_like(weight), size=1)
    assert (all_dead.scale_bias, all_dead.dead_zone, all_dead.relative_error) == (pytest.approx(1), 0, pytest.approx(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [1e-4, 1.0])
def test_the_parts_add_up(dtype: torch.dtype, scale: float) -> None:
    weight = (torch.randn(64, 256, generator=torch.Generator().manual_seed(1)) * scale).to(dtype)
    mxfp4, nf4 = (
        MXFP4(name="mxfp4", scale_rule="floor", **PLAIN),
        NF4(name="nf4", double_quant=True, backend="own", **PLAIN),
    )
    for spec in (NVFP4_SPEC, mxfp4, nf4):
        linear = torch.nn.Linear(256, 64, bias=False, dtype=dtype)
        linear.weight.data = weight
        restored: torch.Tensor = pack_linear("a", linear, spec).dequantized()  # type: ignore[operator]
        report = layer_report(weight, restored, size=1)
        exact, q = weight.double(), restored.double()
        total = float((q - exact).square().sum() / exact.square().sum())
        assert report.relative_error**2 == pytest.approx(total, rel=1e-5)
        assert report.scale_bias + report.dead_zone + report.grid_noise == pytest.approx(total, rel=1e-5)
        rest = q - report.gain * exact
        assert report.grid_noise == pytest.approx(float(rest[q != 0].square().sum() / exact.square().sum()), rel=1e-4)


def test_pieces_of_a_large_layer_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(7, 32, generator=torch.Generator().manual_seed(2))
    restored = weight.round()
    whole = layer_report(weight, restored, size=1)
    monkeypatch.setattr("qerl_bench.quant.error_decomposition._CHUNK", 10)
    parts = layer_report(weight, restored, size=1)
    for name, value in vars(whole).items():
        assert getattr(parts, name) == (None if value is None else pytest.approx(value, rel=1e-6))


@pytest.mark.parametrize(
    ("spec", "squared_error"),
    [
        (NF4(name="nf4", double_quant=False, backend="own", **PLAIN), 0.0085),
        (NVFP4_SPEC, 0.0090),
        (MXFP4(name="mxfp4", scale_rule="even", **PLAIN), 0.0126),
        (MXFP4(name="mxfp4", scale_rule="floor", **PLAIN), 0.0130),
        (MXFP4(name="mxfp4", scale_rule="rceil", **PLAIN), 0.0140),
        (symmetric("int4", 32), 0.0090),
        (symmetric("int4", 128), 0.0122),
        (FORMATS["mxfp8"], 0.00086),
        (symmetric("fp8", "row"), 0.00070),
        (symmetric("fp8", "128x128"), 0.00070),
        (symmetric("int8", "row", "float32"), 0.0000615),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_gaussian_weights_lose_what_they_are_known_to_lose(spec: Any, squared_error: float) -> None:
    weight = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0)) * 0.02
    linear = torch.nn.Linear(1024, 512, bias=False)
    linear.weight.data = weight
    report = layer_report(weight, pack_linear("a", linear, spec).dequantized(), size=1)  # type: ignore[operator]
    assert report.relative_error**2 == pytest.approx(squared_error, rel=0.02)
    assert report.kurtosis == pytest.approx(3, abs=0.05)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda weight: weight.double(), r"torch.float64 \(4, 64\), where it was asked for torch.float32 \(4, 64\)"),
        (lambda weight: weight.flatten(), r"torch.float32 \(256,\), where"),
        (lambda weight: weight / (weight != weight[0, 0]), "1 of 256 finite weights as NaN or infinite"),
    ],
)
def test_a_format_that_rebuilds_something_else_is_refused_where_it_does(wrong: Any, says: str) -> None:
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ConfigError, match=says):
        layer_report(weight, wrong(weight), 1)


def test_the_output_error_is_that_of_the_inputs() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(8, 32, generator=generator), torch.randn(100, 32, generator=generator)
    restored = weight.round()
    direct = float((x @ (weight - restored).t()).norm() / (x @ weight.t()).norm())
    assert output_error(weight, restored, x.t() @ x / 100) == pytest.approx(direct, rel=1e-5)


def test_the_table_has_a_row_per_layer(tmp_path: Path) -> None:
    weight = torch.randn(4, 32)
    layers = {"b": layer_report(weight, weight.round(), size=8), "a": unpacked_report(512, 128)}
    write_layers(tmp_path / "layers.parquet", layers, "nvfp4", "rtn")
    table = pd.read_parquet(tmp_path / "layers.parquet")
    assert list(table["layer"]) == ["b", "a"]
    assert set(table["quant"]) == {"nvfp4"} and set(table["quantizer"]) == {"rtn"}
    assert table["relative_error"].tolist() == pytest.approx([layers["b"].relative_error, 0.0])
    assert table["output_error"].isna().all()
    assert [file.name for file in tmp_path.iterdir()] == ["layers.parquet"]


def test_the_figure_takes_each_layer_once_and_refuses_two_models_in_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weight = torch.randn(4, 32)
    report = layer_report(weight, weight.round(), size=8)
    for run, error in (("a", 1.0), ("b", 1.0001), ("c", 1.01)):
        (tmp_path / run).mkdir()
        layers = {"layers.0.q": replace(report, relative_error=error * report.relative_error), "layers.1.q": report}
        write_layers(tmp_path / run / "layers.parquet", layers, "nvfp4", "rtn")
    draw_figure(["error_decomposition", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "out")])
    assert "error_decomposition.svg" in capsys.readouterr().out
    assert len(one_of_each(pd.concat([pd.read_parquet(tmp_path / run / "layers.parquet") for run in "ab"]))) == 2
    with pytest.raises(ConfigError, match=r"layers\.0\.q with quant=nvfp4 and quantizer=rtn has an error of .* and of"):
        draw_figure(["error_decomposition", str(tmp_path), "--out", str(tmp_path / "out")])


def test_the_figure_shows_weights_and_outputs_and_says_what_was_not_measured() -> None:
    """Two layers with errors of 3 and 4 %, whose root mean square is 3.54 %."""
    layers = [
        {"layer": layer, "quant": "nvfp4", "quantizer": quantizer, "relative_error": error, "output_error": output}
        | {"dead_zone": 0.1 * error**2, "scale_bias": 0.0, "grid_noise": 0.9 * error**2}
        for quantizer, output in (("gptq", 0.01), ("rtn", float("nan")))
        for layer, error in (("a", 0.03), ("b", 0.04))
    ]
    figure = draw(pd.DataFrame(layers))
    weights, outputs = figure.axes
    assert [tick.get_text() for tick in weights.get_yticklabels()] == ["rtn", "gptq"]
    assert [text.get_text() for text in weights.texts] == ["3.5", "3.5"]
    assert [text.get_text() for text in outputs.texts] == ["1.0"]
    assert weights.get_xlim()[0] == outputs.get_xlim()[0] == 0
    said = " ".join(figure.get_supxlabel().split())
    assert "10.0 to 10.0% in weights rounded to zero" in said and "Not measured: NVFP4 with rtn (output)." in said
    assert "0.0 to 0.0% a change of scale" in said


def test_a_quantizer_that_needs_no_text_packs_the_same_with_some_and_has_its_output_error_measured() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)).eval()
    text = Calibration(file=None, samples=1, length=16, seed=0)
    found = {}
    with_text = script("studies/quantizers/layer_errors.py").WithText(RTN, text)
    for name, quantizer in (("plain", RTN), ("with text", with_text)):
        packed = copy.deepcopy(model)
        found[name] = quantize_model(packed, NVFP4_SPEC, quantizer=quantizer, sequences=[list(range(16))]).reports
    assert found["plain"].keys() == found["with text"].keys() and len(found["plain"]) == 7
    for layer, report in found["plain"].items():
        error = found["with text"][layer].output_error
        assert report.output_error is None and error is not None and 0.02 < error < 0.3
        assert replace(found["with text"][layer], output_error=None) == report


def test_the_script_measures_a_format_in_a_folder_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_options, "_in_use", [])
    (tmp_path / "quant").mkdir()
    (tmp_path / "quant" / "own.yaml").write_text("defaults: [nvfp4]\nname: own\n")
    small = ["model=tiny_untrained", "model.layers=1", "quantizer.calibration.samples=2", f"root={tmp_path}"]
    chosen = ["--formats", "own", "nvfp4", "--quantizers", "awq", "--out", str(tmp_path)]
    script("studies/quantizers/layer_errors.py").main([*small, "--config-dir", str(tmp_path), *chosen])
    table = pd.read_parquet(tmp_path / "layers.parquet")
    errors = {name: layers["relative_error"].tolist() for name, layers in table.groupby("quant")}
    assert errors["own"] == errors["nvfp4"] and len(errors["own"]) == 7 and 0 < errors["own"][0] < 0.3


def test_what_the_dial_does_to_weights_is_what_the_page_says() -> None:
    """The error of the weights as the model uses them: what channels were multiplied by is undone."""
    page = (Path(__file__).parents[2] / "studies" / "tried.md").read_text()
    said = {float(dial): (float(nvfp4), float(nf4)) for dial, nvfp4, nf4 in re.findall(DIAL_ROW, page)}
    assert said.keys() == {0, 1.05, 1.15}
    small = build(compose(["model=small/10m", "model.layers=2"])).model
    torch.manual_seed(0)
    plain = Qwen2ForCausalLM(small.qwen2_config())
    for dial, rows in said.items():
        dialled = copy.deepcopy(plain)
        spread_channels(dialled, dial, seed=0)
        for spec, expected in zip((NVFP4_SPEC, NF4_SPEC), rows, strict=True):
            assert relative_error(plain, dialled, spec) == pytest.approx(expected, abs=0.015)


def relative_error(plain: Qwen2ForCausalLM, dialled: Qwen2ForCausalLM, spec: Any) -> float:
    """Of all linear layers in blocks together, with the weights of `dialled` packed."""
    error = size = 0.0
    weights = plain.state_dict()
    for name, after in dialled.state_dict().items():
        if name.endswith("_proj.weight"):
            before, linear = weights[name], torch.nn.Linear(*reversed(after.shape), bias=False, device="meta")
            linear.weight = torch.nn.Parameter(after)
            change = pack_linear(name, linear, spec).dequantized() - after  # type: ignore[operator]
            error += float((change * torch.where(after == 0, 1.0, before / after)).square().sum())
            size += float(before.square().sum())
    return math.sqrt(error / size)
