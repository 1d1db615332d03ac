"""Quantizers: what each promises about the error, on layers whose answer is known and on a whole small model."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from qerl_bench.config import build, compose
from qerl_bench.model.byte_tokenizer import byte_tokenizer
from qerl_bench.quant.linear import PackedLinear
from qerl_bench.quant.mxfp4 import MXFP4
from qerl_bench.quant.nf4 import NF4
from qerl_bench.quant.nvfp4 import NVFP4
from qerl_bench.quantizer.apply import quantize_model
from qerl_bench.quantizer.awq import AWQ
from qerl_bench.quantizer.calibrate import InputGroup, first_block_inputs, group_by_input, run_block
from qerl_bench.quantizer.calibration import Calibration, batches
from qerl_bench.quantizer.gptq import GPTQ, inverse_factor
from qerl_bench.quantizer.mse import BlockScaleSearch
from qerl_bench.quantizer.rtn import RoundToNearest
from qerl_core.checks import ConfigError
from qerl_kernels import nvfp4
from tests.weight_formats import BLOCKS, PLAIN, symmetric
from tests.weight_formats import FORMATS as SHARED

NAMES = ("rtn", "mse", "awq", "gptq")
TEXT = Calibration(file=None, samples=4, length=32, seed=0)
RTN = RoundToNearest(name="rtn")
MSE = BlockScaleSearch(name="mse", scale_multipliers=[0.5, 0.8, 0.9, 1.25, 1.5, 2.0])
FOUR_OR_SIX = BlockScaleSearch(name="mse", scale_multipliers=[1.5])
AWQ_SPEC = AWQ(name="awq", steps=6, calibration=TEXT)
GPTQ_SPEC = GPTQ(name="gptq", damping=0.01, calibration=TEXT)
NVFP4_SPEC = NVFP4(name="nvfp4", compute_dtype="float32", convention="compressed-tensors", **PLAIN)
FORMATS = [
    NVFP4_SPEC,
    NVFP4(name="nvfp4", compute_dtype="float32", convention="torchao", **PLAIN),
    MXFP4(name="mxfp4", scale_rule="even", **PLAIN),
    NF4(name="nf4", double_quant=False, backend="own", **PLAIN),
    NF4(name="nf4", double_quant=True, backend="own", **PLAIN),
    *(symmetric(name, block, "float32") for name, block in BLOCKS),
    SHARED["mxfp8"],
]
IDS = ["nvfp4", "torchao", "mxfp4", "nf4", "nf4-double", *(f"{name}-{block}" for name, block in BLOCKS), "mxfp8"]
formats = pytest.mark.parametrize("spec", FORMATS, ids=IDS)


def _weights(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).mul_(0.02)


def _restored(spec: Any, packed: dict[str, torch.Tensor], shape: tuple[int, int]) -> torch.Tensor:
    return spec.operand(packed, shape, torch.float32) * spec.output_scale(packed)


def _moment(k: int, seed: int = 0) -> torch.Tensor:
    """Of strongly correlated inputs of very different energy."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(512, k // 4, generator=generator) @ torch.randn(k // 4, k, generator=generator)
    x = x * torch.logspace(-1, 1, k)[torch.randperm(k, generator=generator)] + 0.1 * torch.randn(
        512, k, generator=generator
    )
    return x.t() @ x / 512


def _loss(weight: torch.Tensor, restored: torch.Tensor, moment: torch.Tensor) -> float:
    error = (restored - weight).double()
    return float(((error @ moment.double()) * error).sum())


# --- specs ------------------------------------------------------------------------------------------------------------


def test_the_quantizer_is_part_of_a_run_and_refused_without_a_format() -> None:
    configs = [compose(["quant=nvfp4", f"quantizer={name}"]) for name in NAMES]
    assert [build(config).quantizer.name for config in configs] == list(NAMES)
    assert len({config.name for config in configs}) == len(NAMES)
    with pytest.raises(ConfigError, match=r"quantizer=gptq .*quant=bf16"):
        build(compose(["quant=bf16", "quantizer=gptq"]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BlockScaleSearch(name="m", scale_multipliers=[]), "scale_multipliers must be .* got"),
        (lambda: BlockScaleSearch(name="m", scale_multipliers=[0.0]), "scale_multipliers must be .* got"),
        (lambda: GPTQ(name="g", damping=0, calibration=TEXT), "damping must be .* got 0"),
        (lambda: AWQ(name="a", steps=1, calibration=TEXT), "steps must be .* at least 2, got 1"),
        (lambda: Calibration(file=None, samples=0, length=32, seed=0), "samples must be .* got 0"),
        (lambda: Calibration(file=None, samples=1, length=1, seed=0), "length must be .* got 1"),
    ],
)
def test_bad_fields_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


# --- one layer --------------------------------------------------------------------------------------------------------


@formats
def test_a_format_is_its_units_times_its_grid(spec: Any) -> None:
    """What GPTQ and the scale search work with is what the packed bytes decode to."""
    weight = _weights(24, 256)
    weight[3] = 0
    scales = spec.scales(weight, None)
    unit = spec.unit(scales, (24, 256)).repeat_interleave(spec.block_of(256), dim=1)
    safe = torch.where(unit == 0, 1.0, unit)
    by_hand = spec.nearest(weight / safe) * unit
    restored = _restored(spec, spec.encode(weight, scales), (24, 256))
    if getattr(spec, "double_quant", False):
        assert float((restored - by_hand).abs().max()) < 0.02 * float(unit.max())  # its scales are rounded afterwards
        return
    torch.testing.assert_close(restored, by_hand, rtol=3e-7, atol=0)
    again = spec.encode(by_hand, scales)  # values on the grid keep their codes
    torch.testing.assert_close(_restored(spec, again, (24, 256)), restored, rtol=0, atol=0)


@formats
def test_rtn_is_the_format_itself(spec: Any) -> None:
    weight = _weights(8, 128)
    packed = RTN.pack(weight, spec, 0.5, None)
    assert all(torch.equal(packed[k].view(torch.uint8), v.view(torch.uint8)) for k, v in spec.pack(weight, 0.5).items())


def test_four_over_six_by_hand() -> None:
    # The first block fixes the tensor scale at 1 with 2688. The second is 6 and fifteen 4.5s: under scale 1 each 4.5
    # becomes 4; under 1.5 the 6 is a 4 and each 4.5 a 3, exactly. The third is exact under scale 1 and must stay there.
    weight = torch.zeros(1, 48)
    weight[0, 0] = 2688.0
    weight[0, 16:32] = 4.5
    weight[0, 16] = 6.0
    weight[0, 32:48] = torch.tensor([6.0, 4.0, 3.0, 0.5] * 4)
    packed = FOUR_OR_SIX.pack(weight, NVFP4_SPEC, None, None)
    assert packed["weight_scale"].float().tolist() == [[448.0, 1.5, 1.0]]
    assert torch.equal(_restored(NVFP4_SPEC, packed, (1, 48)), weight)
    assert RTN.pack(weight, NVFP4_SPEC, None, None)["weight_scale"].float().tolist() == [[448.0, 1.0, 1.0]]


@formats
def test_the_scale_search_is_the_best_of_its_candidates_in_every_block(spec: Any) -> None:
    weight = _weights(16, 256)
    weight[2] = 0
    shape, block = (16, 256), spec.block_of(256)

    def block_errors(scales: dict[str, torch.Tensor]) -> torch.Tensor:
        single = dataclasses.replace(spec, double_quant=False) if getattr(spec, "double_quant", False) else spec
        restored = _restored(single, single.encode(weight, scales), shape)
        return by_block((restored - weight).square())

    def by_block(squares: torch.Tensor) -> torch.Tensor:
        sums = squares.unflatten(-1, (-1, block)).sum(-1)
        return sums if spec.block_rows == 1 else sums.sum(0, keepdim=True)  # fewer rows than a square has

    by_stretch = torch.stack([block_errors(spec.scales(weight, None, s)) for s in (1.0, *MSE.scale_multipliers)])
    found = (_restored(spec, MSE.pack(weight, spec, None, None), shape) - weight).square()
    errors = by_block(found)
    tolerance = 0.05 if getattr(spec, "double_quant", False) else 1e-4
    torch.testing.assert_close(errors, by_stretch.amin(0), rtol=tolerance, atol=1e-12)
    gains = 1.0 if spec.name in ("fp8", "int8") else 0.999  # where the scale of the maximum is as good as any
    assert float(errors.sum()) <= gains * float(by_stretch[0].sum())


@formats
def test_gptq_beats_rounding_on_correlated_inputs(spec: Any) -> None:
    weight, moment = _weights(32, 256), _moment(256)
    rounded = _loss(weight, _restored(spec, RTN.pack(weight, spec, None, None), (32, 256)), moment)
    packed = GPTQ_SPEC.pack(weight, spec, None, moment)
    assert {k: (v.shape, v.dtype) for k, v in packed.items()} == {
        k: (v.shape, v.dtype) for k, v in spec.pack(weight).items()
    }
    assert _loss(weight, _restored(spec, packed, (32, 256)), moment) < 0.6 * rounded


@formats
def test_gptq_with_independent_inputs_is_rounding(spec: Any) -> None:
    """Without correlation there is nothing that later inputs could make up for."""
    weight = _weights(8, 256)
    ours = _restored(spec, GPTQ_SPEC.pack(weight, spec, None, torch.eye(256)), (8, 256))
    torch.testing.assert_close(ours, _restored(spec, spec.pack(weight), (8, 256)), rtol=1e-6, atol=1e-9)
    assert GPTQ_SPEC.pack(weight, spec, None, None).keys() == spec.pack(weight).keys()  # a layer no text reached


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@formats
def test_gptq_packs_the_same_bytes_from_a_recording(monkeypatch: pytest.MonkeyPatch, spec: Any) -> None:
    monkeypatch.setattr("qerl_bench.quantizer.gptq.CHUNK", 160)  # the last chunk of 384 is another, but of 128 inputs
    weight, moment = _weights(40, 384).cuda(), _moment(384).cuda()
    recorded = GPTQ_SPEC.pack(weight, spec, None, moment)
    monkeypatch.setattr("qerl_bench.quantizer.gptq._Rounding.recorded", lambda rounding, *_: rounding)
    looped = GPTQ_SPEC.pack(weight, spec, None, moment)
    assert {key: value.view(torch.uint8).tolist() for key, value in recorded.items()} == {
        key: value.view(torch.uint8).tolist() for key, value in looped.items()
    }


@pytest.mark.parametrize("chunk", [128, 16, 20, 8])
def test_gptq_follows_the_textbook_update(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Against the definition: quantize input j, then move the others to the least-squares answer under H.

    However many inputs are rounded before the rest is corrected: whole blocks, at least one.
    """
    monkeypatch.setattr("qerl_bench.quantizer.gptq.CHUNK", chunk)
    weight, moment = _weights(3, 32).double(), _moment(32, seed=3)
    damped = moment.double() + 0.01 * float(moment.diagonal().mean()) * torch.eye(32, dtype=torch.float64)
    left = weight.clone()
    scale = None
    for j in range(32):
        if j % 16 == 0:
            scale = NVFP4_SPEC.scales(left[:, j : j + 16].float(), float(weight.float().abs().max()))
            unit = NVFP4_SPEC.unit(scale, (3, 16))[:, 0].double()
        value = NVFP4_SPEC.nearest((left[:, j] / unit).float()).double() * unit
        error = value - left[:, j]
        left[:, j] = value
        if j < 31:
            rest = slice(j + 1, 32)
            left[:, rest] -= torch.linalg.solve(
                damped[rest, rest], damped[rest, j].unsqueeze(1) @ error.unsqueeze(0)
            ).t()
    ours = _restored(NVFP4_SPEC, GPTQ_SPEC.pack(weight.float(), NVFP4_SPEC, None, moment), (3, 32))
    torch.testing.assert_close(ours, left.float(), rtol=1e-5, atol=1e-7)


def test_the_inverse_factor_is_one_and_refuses_what_cannot_be_inverted() -> None:
    moment = _moment(64)
    damped = moment.double() + 0.01 * float(moment.diagonal().double().mean()) * torch.eye(64)
    upper = inverse_factor(moment, 0.01).double()
    torch.testing.assert_close(upper.t() @ upper @ damped, torch.eye(64).double(), rtol=0, atol=1e-3)
    assert torch.equal(upper, upper.triu())
    moment[5], moment[:, 5] = 0, 0  # an input that is always zero
    assert inverse_factor(moment, 0.01).isfinite().all()
    with pytest.raises(ConfigError, match=r"quantizer\.damping=1e-06; raise quantizer\.damping"):
        inverse_factor(-torch.ones(4, 4) - 3 * torch.eye(4).flip(0), 1e-6)


# --- AWQ --------------------------------------------------------------------------------------------------------------


def test_awq_protects_the_inputs_that_carry_the_signal() -> None:
    linear = torch.nn.Linear(64, 32, bias=False)
    linear.weight.data = _weights(32, 64)
    strong = torch.ones(64)
    strong[::16] = 1000.0  # one input of each block carries nearly everything
    group = InputGroup({"q_proj": linear}, torch.diag(strong), norm=torch.nn.LayerNorm(64))
    scales = AWQ_SPEC.best_scales(group, NVFP4_SPEC)
    assert float(scales[::16].min()) > 2 * float(scales[1::16].max())
    assert group.squared_output_error(scales, NVFP4_SPEC) < 0.7 * group.squared_output_error(torch.ones(64), NVFP4_SPEC)


def test_awq_never_measures_worse_than_rounding() -> None:
    for seed in range(4):
        linear = torch.nn.Linear(128, 16, bias=False)
        linear.weight.data = _weights(16, 128, seed)
        group = InputGroup({"a": linear}, _moment(128, seed), norm=torch.nn.LayerNorm(128))
        scales = AWQ_SPEC.best_scales(group, NVFP4_SPEC)
        assert group.squared_output_error(scales, NVFP4_SPEC) <= group.squared_output_error(torch.ones(128), NVFP4_SPEC)


# --- whole models -----------------------------------------------------------------------------------------------------


def _model(family: str = "llama", **options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 50,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    model = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**(sizes | options))),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**(sizes | options))),
    }[family]()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 2.0)
        else:
            torch.nn.init.normal_(parameter, std=0.08)
    return model.eval()


SEQUENCES = [[(7 * i + j * j) % 50 for j in range(12 + 5 * i)] for i in range(8)]


@pytest.mark.parametrize(("family", "kv_heads"), list(itertools.product(("llama", "qwen3"), (2, 4))))
def test_awq_changes_no_block_before_rounding(family: str, kv_heads: int) -> None:
    """Also through grouped heads: the value projection carries the output projection's factors."""
    model = _model(family, num_key_value_heads=kv_heads, attention_bias=True)
    blocks = model.model.layers
    inputs = first_block_inputs(model, blocks, batches(SEQUENCES))
    layers = {n: m for n, m in blocks[0].named_modules() if isinstance(m, torch.nn.Linear)}
    groups = group_by_input(blocks[0], 0, inputs, layers)
    assert [sorted(group.layers) for group in groups] == [
        ["self_attn.k_proj", "self_attn.q_proj", "self_attn.v_proj"],
        ["self_attn.o_proj"],
        ["mlp.gate_proj", "mlp.up_proj"],
        ["mlp.down_proj"],
    ]
    assert groups[0].norm is blocks[0].input_layernorm and groups[2].norm is blocks[0].post_attention_layernorm
    assert groups[1].previous is layers["self_attn.v_proj"] and groups[3].previous is layers["mlp.up_proj"]
    before = run_block(blocks[0], 0, inputs[0])
    original = copy.deepcopy(blocks[0].state_dict())
    for group in groups:
        scales = torch.rand(group.second_moment.shape[0], generator=torch.Generator().manual_seed(1)) + 0.5
        with torch.no_grad():
            group.fold_scales(group.averaged_over_repeats(scales))
    assert all(not torch.equal(original[f"{name}.weight"], linear.weight) for name, linear in layers.items())
    torch.testing.assert_close(run_block(blocks[0], 0, inputs[0]), before, rtol=1e-4, atol=1e-5)


def test_second_moments_are_those_of_real_tokens() -> None:
    """Against the inputs of every sequence run alone, without padding."""
    model = _model()
    rows = []
    hook = model.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda m, x: rows.append(x[0].detach()[0]))
    with torch.no_grad():
        for sequence in SEQUENCES:
            model(input_ids=torch.tensor([sequence]), use_cache=False)
    hook.remove()
    rows = torch.cat(rows)
    blocks = model.model.layers
    inputs = first_block_inputs(model, blocks, batches(SEQUENCES))
    for batch in inputs:
        batch.hidden = run_block(blocks[0], 0, batch)
    layers = {"mlp.down_proj": blocks[1].mlp.down_proj}
    (group,) = group_by_input(blocks[1], 1, inputs, layers)
    torch.testing.assert_close(group.second_moment, rows.t() @ rows / len(rows), rtol=1e-4, atol=1e-7)


def _output_change(model: Any, packed: Any) -> float:
    with torch.no_grad():
        pairs = [(m(input_ids=torch.tensor([s]))).logits for s in SEQUENCES for m in (model, packed)]
    return float(sum((a - b).square().sum() for a, b in zip(pairs[0::2], pairs[1::2], strict=True))) ** 0.5


@pytest.mark.parametrize(
    "spec",
    [
        NVFP4_SPEC,
        MXFP4(name="mxfp4", scale_rule="even", **PLAIN),
        NF4(name="nf4", double_quant=False, backend="own", **PLAIN),
        SHARED["mxfp8"],
    ],
    ids=lambda s: s.name,
)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_whole_model_under_every_quantizer(spec: Any, family: str) -> None:
    model = _model(family)
    changes: dict[str, float] = {}
    for quantizer in (RTN, MSE, AWQ_SPEC, GPTQ_SPEC):
        packed = copy.deepcopy(model)
        reports = quantize_model(packed, spec, quantizer=quantizer, sequences=SEQUENCES).reports
        assert len(reports) == 14 and sum(isinstance(m, PackedLinear) for m in packed.modules()) == 14
        assert next(iter(reports)) == "model.layers.0.self_attn.q_proj"
        assert all(
            (report.output_error is not None) == (quantizer.calibration is not None) for report in reports.values()
        )
        changes[quantizer.name] = _output_change(model, packed)
        assert "forward" not in vars(packed.model.layers[0])
    assert changes["gptq"] < 0.8 * changes["rtn"]
    assert changes["awq"] < 1.1 * changes["rtn"]
    assert changes["mse"] < 1.1 * changes["rtn"]


def test_fused_siblings_share_a_scale_under_every_quantizer() -> None:
    for quantizer in (MSE, AWQ_SPEC, GPTQ_SPEC):
        model = _model()
        quantize_model(model, NVFP4_SPEC, quantizer=quantizer, sequences=SEQUENCES)
        block = model.model.layers[1]
        scales = [
            m.weight_global_scale.item()
            for m in (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj)
        ]
        assert len(set(scales)) == 1
        assert block.mlp.gate_proj.weight_global_scale.item() == block.mlp.up_proj.weight_global_scale.item()


def test_the_same_text_gives_the_same_bytes() -> None:
    for quantizer in (AWQ_SPEC, GPTQ_SPEC):
        models = [_model(), _model()]
        for model in models:
            quantize_model(model, NVFP4_SPEC, quantizer=quantizer, sequences=SEQUENCES)
        first, second = (model.state_dict() for model in models)
        assert all(torch.equal(first[k].view(torch.uint8), second[k].view(torch.uint8)) for k in first)


def test_a_model_that_awq_would_break_is_refused() -> None:
    model = _model()
    norm = model.model.layers[1].input_layernorm
    norm.weight.data -= 1
    norm.forward = lambda x: (1 + norm.weight) * x  # scales its channels by 1 + w, as Gemma does
    with pytest.raises(ConfigError, match=r"layers\.1: rescaling changed .* use quantizer=gptq"):
        quantize_model(model, NVFP4_SPEC, quantizer=AWQ_SPEC, sequences=SEQUENCES)


def test_calibration_needs_blocks() -> None:
    with pytest.raises(ConfigError, match="use quantizer=rtn or mse"):
        quantize_model(torch.nn.Sequential(torch.nn.Linear(64, 64)), NVFP4_SPEC, quantizer=GPTQ_SPEC)


# --- calibration text -------------------------------------------------------------------------------------------------


def test_text_from_the_task_is_its_training_split_with_stop_tokens() -> None:
    task = build(compose([])).task
    tokenizer = byte_tokenizer()
    demonstrations = task.calibration_demonstrations(5, 3)
    text = Calibration(file=None, samples=5, length=4096, seed=3)
    assert [tokenizer.decode(ids) for ids in text.text(tokenizer, task, {}).sequences] == [
        f"{d.prompt.messages[-1]['content']}\n{d.completion}{tokenizer.eos_token}" for d in demonstrations
    ]
    short = dataclasses.replace(text, length=7).text(tokenizer, task, {}).sequences
    assert [len(ids) for ids in short] == [7] * 5


def test_text_from_files(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    plain, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text("abcdefghij")
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("one", "twotwo", "three")))

    def read(path: Path, samples: int) -> list[str]:
        text = Calibration(file=str(path), samples=samples, length=4, seed=0)
        return [str(tokenizer.decode(ids)) for ids in text.text(tokenizer, None, {}).sequences]  # type: ignore[arg-type]

    assert read(plain, 2) == ["abcd", "efgh"]
    assert read(lines, 3) == ["one", "twot", "thre"]
    with pytest.raises(ConfigError, match=r"gives 2 samples .* fewer than .*samples=3"):
        read(plain, 3)
    with pytest.raises(ConfigError, match="is not a file"):
        read(tmp_path / "c.txt", 1)
    lines.write_text('{"text": "one"}\n{"txt": 1}\n')
    with pytest.raises(ConfigError, match=r"b\.jsonl:2: expected"):
        read(lines, 1)


def test_batches_pad_on_the_right_and_mask_it() -> None:
    (ids, mask), *rest = batches([[5, 6, 7], [8]])
    assert not rest
    assert ids.tolist() == [[8, 0, 0], [5, 6, 7]]
    assert mask.tolist() == [[True, False, False], [True] * 3]


# --- the stretch ------------------------------------------------------------------------------------------------------


def test_a_stretch_multiplies_the_scale_before_it_is_rounded() -> None:
    weight = torch.zeros(1, 32)
    weight[0, 0], weight[0, 16] = 2688.0, 12.0
    scale = nvfp4.scales(weight, torch.float32, stretch=1.5)["weight_scale"].float().tolist()
    assert scale == [[448.0, 3.0]]
    doubled = MXFP4(name="m", scale_rule="even", **PLAIN).scales(weight, None, 2.0)["weight_scale"]
    assert doubled.tolist() == [[137]]  # 2688 = 1.31 * 2^11 alone gives 11 - 2 + 127 = 136
