"""Packed linear layers against plain ones that hold the dequantized weight, and packing a whole model."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import checkpoint

from qerl_bench.quant.bf16 import BF16
from qerl_bench.quant.concat import concat_rows_in_place
from qerl_bench.quant.linear import KERNEL_BUFFERS, PackedLinear, pack_linear, resident_bytes
from qerl_bench.quant.memory_layout import place
from qerl_bench.quant.mxfp4 import MXFP4
from qerl_bench.quant.nf4 import NF4
from qerl_bench.quant.nvfp4 import NVFP4
from qerl_bench.quantizer.apply import quantize_model
from qerl_core.checks import ConfigError
from tests.weight_formats import FORMATS, PLAIN, symmetric

NVFP4_SPEC = NVFP4(name="nvfp4", compute_dtype="bfloat16", convention="compressed-tensors", **PLAIN)
MXFP4_SPEC = MXFP4(name="mxfp4", scale_rule="even", **PLAIN)
NF4_SPEC = NF4(name="nf4", double_quant=False, backend="own", **PLAIN)
SPECS = [NVFP4_SPEC, MXFP4_SPEC, NF4_SPEC]
INTS = [symmetric("fp8", "row"), symmetric("int8", "row"), symmetric("int4", 32)]
packing = pytest.mark.parametrize("spec", [*SPECS, *INTS, FORMATS["mxfp8"]], ids=lambda spec: spec.name)
in_4_bits = pytest.mark.parametrize("spec", [*SPECS, INTS[2]], ids=lambda spec: spec.name)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def _linear(k: int, n: int, bias: bool = True, seed: int = 0) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(k, n, bias=bias)


def _packed(spec: Any, linear: torch.nn.Linear) -> PackedLinear:
    layer = pack_linear("layer", linear, spec)
    assert isinstance(layer, PackedLinear)
    return layer


def _plain(layer: PackedLinear) -> torch.nn.Linear:
    """The layer that a packed one stands for, in FP32."""
    plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    plain.weight.data = layer.dequantized()
    if layer.bias is not None:
        plain.bias.data = layer.bias.detach().float()
    return plain


def _bits(layer: PackedLinear) -> dict[str, list[int]]:
    return {name: tensor.view(torch.uint8).flatten().tolist() for name, tensor in layer.packed().items()}


def _fp32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


class Block(torch.nn.Module):
    """Siblings that engines fuse, one that they do not, and a head that stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = _linear(64, 64, seed=1)
        self.k_proj = _linear(64, 32, seed=2)
        self.v_proj = _linear(64, 32, seed=3)
        self.o_proj = _linear(64, 64, bias=False, seed=4)
        self.norm = torch.nn.LayerNorm(64)
        self.lm_head = _linear(64, 100, bias=False, seed=5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = torch.tanh(self.k_proj(x) * self.v_proj(x)).repeat(1, 2)
        return self.lm_head(self.norm(self.o_proj(torch.tanh(self.q_proj(x)) + gate)))


# --- one layer --------------------------------------------------------------------------------------------------------


@packing
@dtypes
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("leading", [(), (1,), (3,), (2, 5), (0,), (2, 0, 3)], ids=str)
def test_forward_and_backward_match_a_plain_layer(
    spec: Any, dtype: torch.dtype, bias: bool, leading: tuple[int, ...]
) -> None:
    layer = _packed(spec, _linear(64, 48, bias))
    x = torch.randn(*leading, 64).to(dtype).requires_grad_()
    y = layer(x)
    assert y.dtype == dtype and y.shape == (*leading, 48)
    grad = torch.randn(*leading, 48).to(dtype)
    y.backward(grad)

    # NF4's operand is rounded to the dtype, and so is the bias; beyond that, only the result is.
    exact_x = x.detach().double().requires_grad_()
    exact_weight = layer.operand(dtype).double() * layer.output_scale
    exact_y = torch.nn.functional.linear(exact_x, exact_weight, layer.bias.to(dtype).double() if bias else None)
    exact_y.backward(grad.double())
    assert x.grad is not None and exact_x.grad is not None
    assert x.grad.dtype == dtype
    half_a_unit = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(y.double(), exact_y, rtol=1.01 * half_a_unit, atol=2e-6)
    torch.testing.assert_close(x.grad.double(), exact_x.grad, rtol=1.01 * half_a_unit, atol=2e-6)


@pytest.mark.parametrize("bias", [True, False])
def test_the_tensor_scale_is_applied_before_the_only_rounding(bias: bool) -> None:
    # Inputs of -1, 0 and 1 keep every partial sum exact, so the result is known to the last bit.
    layer = _packed(NVFP4_SPEC, _linear(256, 64, bias).bfloat16())
    x = torch.randint(-1, 2, (32, 256)).bfloat16().requires_grad_()
    exact = x.detach().double() @ layer.operand(torch.float32).double().t()
    exact = exact * layer.output_scale + (layer.bias.double() if bias else 0)
    torch.testing.assert_close(layer(x).detach(), exact.float().bfloat16(), rtol=0, atol=0)

    grad = torch.randint(-1, 2, (32, 64)).bfloat16()
    layer(x).backward(grad)
    exact_grad = grad.double() @ layer.operand(torch.float32).double() * layer.output_scale
    torch.testing.assert_close(x.grad, exact_grad.float().bfloat16(), rtol=0, atol=0)


@packing
def test_autograd_keeps_nothing(spec: Any) -> None:
    saved: list[torch.Tensor] = []
    layer = _packed(spec, _linear(64, 64))
    x = torch.randn(4, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = layer(x)
        assert saved == []
        torch.nn.functional.linear(x, layer.dequantized().requires_grad_())
        assert any(tensor.numel() == 64 * 64 for tensor in saved)  # a plain layer is caught at it
    y.sum().backward()
    assert x.grad is not None
    assert all(not tensor.requires_grad for tensor in (*layer.parameters(), *layer.buffers()))


@packing
def test_no_graph_without_gradients(spec: Any) -> None:
    layer = _packed(spec, _linear(64, 64))
    assert layer(torch.randn(2, 64)).grad_fn is None
    with torch.inference_mode():
        generated = layer(torch.ones(2, 64))
    torch.testing.assert_close(generated, layer(torch.ones(2, 64)), rtol=0, atol=0)


def test_gradients_survive_checkpointing_and_strided_inputs() -> None:
    layer = _packed(NVFP4_SPEC, _linear(64, 64))
    x = torch.randn(64, 3, 5).transpose(0, 2).requires_grad_()  # (5, 3, 64), not contiguous
    layer(x).transpose(0, 1).square().sum().backward()
    expected, x.grad = x.grad, None
    checkpoint(layer, x, use_reentrant=False).transpose(0, 1).square().sum().backward()
    torch.testing.assert_close(x.grad, expected, rtol=0, atol=0)


def test_autocast_lowers_the_input_before_the_weight_is_rebuilt(listen: Any) -> None:
    layer = _packed(NVFP4_SPEC, _linear(64, 48))
    x = torch.randn(3, 64, requires_grad=True)
    rebuilt = listen(PackedLinear, "operand")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert rebuilt == [(layer, torch.bfloat16)]  # not the full-width copy that autocast would have converted afterwards
    torch.testing.assert_close(y, layer(x.bfloat16()), rtol=0, atol=0)
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32


@packing
@pytest.mark.parametrize("convert", [torch.nn.Module.half, torch.nn.Module.bfloat16, torch.nn.Module.double])
def test_converting_the_model_leaves_packed_bits_alone(spec: Any, convert: Any) -> None:
    layer = _packed(spec, _linear(64, 64))
    before, dtypes_before = _bits(layer), [tensor.dtype for tensor in layer.buffers()]
    convert(layer)
    assert _bits(layer) == before
    assert [tensor.dtype for tensor in layer.buffers()] == dtypes_before
    assert layer.bias.dtype != torch.float32
    assert all(tensor.is_meta for tensor in copy.deepcopy(layer).to("meta").buffers())


@packing
@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_carries_the_tensor_scale(spec: Any, assign: bool) -> None:
    source, target = _packed(spec, _linear(64, 64, seed=1)), _packed(spec, _linear(64, 64, seed=2))
    state = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    if "weight_global_scale" in state:
        state["weight_global_scale"] *= 2
        source.load_state_dict(state)
        assert source.output_scale == _fp32(1 / float(state["weight_global_scale"]))
    expected = {"nf4": {"weight", "absmax"}, "mxfp4": {"weight_packed", "weight_scale"}}
    expected["nvfp4"] = expected["mxfp4"] | {"weight_global_scale"}
    expected |= {"fp8": {"weight", "weight_scale"}, "int8": {"weight", "weight_scale"}, "int4": expected["mxfp4"]}
    expected["mxfp8"] = expected["fp8"]
    assert set(state) == expected[spec.name] | {"bias"}
    target.load_state_dict(state, assign=assign)
    x = torch.randn(3, 64)
    torch.testing.assert_close(target(x), source(x), rtol=0, atol=0)
    torch.testing.assert_close(copy.deepcopy(source)(x), source(x), rtol=0, atol=0)


def test_a_layer_describes_itself() -> None:
    layer = _packed(NVFP4_SPEC, _linear(64, 48))
    assert repr(layer) == "PackedLinear(in_features=64, out_features=48, bias=True, format=nvfp4)"
    assert (layer.weight.shape, layer.weight.dtype, layer.weight.device.type) == ((48, 64), torch.uint8, "cpu")
    with pytest.raises(ConfigError, match="packed as nvfp4 and cannot be read or merged"):
        _ = layer.weight.data


def test_the_dequantized_weight_is_what_the_layer_multiplies_by() -> None:
    layer = _packed(NVFP4_SPEC, _linear(64, 48, bias=False))
    torch.testing.assert_close(layer(torch.eye(64)), layer.dequantized().t(), rtol=1e-6, atol=0)


@packing
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_packs_the_same_bytes_and_computes_the_same_layer(spec: Any) -> None:
    linear = _linear(256, 192).bfloat16()
    linear.weight.data[:4, :64] *= 2.0**-9  # some scales become subnormal
    on_cpu = _packed(spec, linear)
    on_gpu = _packed(spec, copy.deepcopy(linear).cuda())
    assert _bits(on_gpu) == _bits(on_cpu) == _bits(copy.deepcopy(on_cpu).cuda())
    assert on_gpu.output_scale == on_cpu.output_scale
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        torch.testing.assert_close(on_gpu.operand(dtype).cpu(), on_cpu.operand(dtype), rtol=0, atol=0)
    x = torch.randint(-1, 2, (32, 256)).bfloat16()
    x_gpu = x.cuda().requires_grad_()
    y = on_gpu(x_gpu)
    torch.testing.assert_close(y.cpu(), on_cpu(x), rtol=torch.finfo(torch.bfloat16).eps, atol=1e-5)
    y.sum().backward()
    exact = torch.ones(32, 192).double() @ on_cpu.operand(torch.bfloat16).double() * on_cpu.output_scale
    torch.testing.assert_close(x_gpu.grad.cpu().double(), exact, rtol=2**-8, atol=1e-5)


# --- packing layers and models ----------------------------------------------------------------------------------------

QWEN_0_5B = [(896, 896), (896, 128), (896, 4864), (4864, 896)]  # K, N of q, k, up and down of Qwen2.5-0.5B


@packing
def test_resident_bytes_are_within_one_per_cent_of_the_promise(spec: Any) -> None:
    size = weights = 0
    for k, n in QWEN_0_5B:
        layer = pack_linear("layer", torch.nn.Linear(k, n, dtype=torch.bfloat16), spec)
        size += resident_bytes(layer)
        weights += k * n
        assert 8 * resident_bytes(layer) / (k * n) == pytest.approx(spec.bits_per_weight, rel=0.01)
    assert 8 * size / weights == pytest.approx(
        {"nvfp4": 4.5, "mxfp4": 4.25, "nf4": 4.5, "fp8": 8, "int8": 8, "int4": 4.5, "mxfp8": 8.25}[spec.name], rel=0.01
    )
    assert resident_bytes(torch.nn.Linear(896, 896, dtype=torch.bfloat16)) == 2 * 896 * 896


def test_bf16_leaves_layers_alone() -> None:
    model = Block().bfloat16()
    before = copy.deepcopy(model.state_dict())
    layers = [model.q_proj, model.o_proj]
    reports = quantize_model(model, BF16(name="bf16")).reports
    assert [model.q_proj, model.o_proj] == layers
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    report = reports["q_proj"]
    assert (report.bytes, report.bits_per_weight, report.relative_error) == (2 * 64 * 64, 16.0, 0.0)


@in_4_bits
def test_a_bad_layer_is_refused_by_name(spec: Any) -> None:
    with pytest.raises(ConfigError, match=r"^mlp\.up_proj: .* blocks of"):
        pack_linear("mlp.up_proj", torch.nn.Linear(72, 8), spec)
    linear = _linear(64, 8)
    linear.weight.data[3, 3] = torch.nan
    with pytest.raises(ConfigError, match=r"^mlp\.up_proj: 1 of 512 weights are NaN"):
        pack_linear("mlp.up_proj", linear, spec)


@packing
def test_packing_keeps_the_bias_and_the_mode(spec: Any) -> None:
    linear = _linear(64, 8).eval()
    layer = pack_linear("layer", linear, spec)
    assert torch.equal(layer.bias, linear.bias)
    assert not layer.bias.requires_grad and not layer.training


@packing
def test_quantize_model_packs_all_but_the_head_and_frees_the_originals(spec: Any) -> None:
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([Block(), Block()]), "lm_head": _linear(64, 7)})
    originals = [weakref.ref(m.weight) for m in model["layers"].modules() if isinstance(m, torch.nn.Linear)]
    heads = [model["lm_head"], *(block.lm_head for block in model["layers"])]
    reports = quantize_model(model, spec).reports
    names = [f"layers.{i}.{part}_proj" for i in (0, 1) for part in "qkvo"]
    assert list(reports) == names
    assert all(isinstance(model.get_submodule(name), PackedLinear) for name in names)
    assert [model["lm_head"], *(block.lm_head for block in model["layers"])] == heads
    assert sum(reference() is not None for reference in originals) == 2  # the two heads inside the blocks
    for name, report in reports.items():
        assert report.bytes == resident_bytes(model.get_submodule(name))
        scales = 16 / 64 if spec.bits_per_weight == 8 else 0  # of rows as short as these
        assert report.bits_per_weight == pytest.approx(spec.bits_per_weight + scales, rel=0.01)
        # Maxima of these uniform weights are just below a power of two, where MXFP8's floor rule saturates most.
        usual = {"fp8": (0.02, 0.03), "int8": (0.004, 0.01), "mxfp8": (0.045, 0.055)}
        least, most = usual.get(spec.name, (0.05, 0.12))
        assert least < report.relative_error < most


def test_relative_error_by_hand() -> None:
    linear = _linear(32, 1, bias=False)
    linear.weight.data = torch.tensor([[5.0, 4.0, *[0.0] * 30]])  # 5 rounds to 4 at scale 1
    model = torch.nn.Sequential(linear)
    report = quantize_model(model, MXFP4_SPEC).reports["0"]
    assert (report.bytes, report.bits_per_weight) == (17, 4.25)
    assert report.relative_error == pytest.approx(1 / 41**0.5)
    linear.weight.data.zero_()
    assert quantize_model(torch.nn.Sequential(linear), NVFP4_SPEC).reports["0"].relative_error == 0.0


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        ((), set()),
        (("lm_head", "o_proj"), {"0.o_proj", "0.lm_head", "1.o_proj", "1.lm_head"}),
        (("1", "0.lm_head"), {"1.q_proj", "1.k_proj", "1.v_proj", "1.o_proj", "1.lm_head", "0.lm_head"}),
        (("proj",), set()),  # a piece of a name is no match
    ],
)
def test_skip_matches_whole_parts_of_a_path(skip: tuple[str, ...], left: set[str]) -> None:
    model = torch.nn.Sequential(Block(), Block())
    quantize_model(model, NVFP4_SPEC, skip)
    assert {name for name, module in model.named_modules() if type(module) is torch.nn.Linear} == left


def test_fused_siblings_share_a_tensor_scale_and_others_do_not() -> None:
    model = torch.nn.Sequential(Block(), Block())
    model[0].k_proj.weight.data[5, 5] = 4.0
    quantize_model(model, NVFP4_SPEC)
    scale = {name: m.output_scale for name, m in model.named_modules() if isinstance(m, PackedLinear)}
    assert scale["0.q_proj"] == scale["0.k_proj"] == scale["0.v_proj"] == _fp32(1 / 672)  # 2688 / 4
    assert scale["1.q_proj"] == scale["1.k_proj"] == scale["1.v_proj"] < 1 / 2688
    assert scale["0.o_proj"] == scale["1.o_proj"] < 1 / 2688
    assert quantize_model(torch.nn.Sequential(_linear(64, 64)), NVFP4_SPEC).reports["0"].relative_error < 0.12


def test_a_layer_reachable_by_two_names_stays_one_layer() -> None:
    shared = _linear(64, 64)
    model = torch.nn.ModuleDict({"first": shared, "second": shared})
    assert list(quantize_model(model, NVFP4_SPEC).reports) == ["first"]
    assert isinstance(model["first"], PackedLinear) and model["first"] is model["second"]


def test_nothing_is_packed_when_any_layer_does_not_fit() -> None:
    model = torch.nn.ModuleDict({"good": _linear(64, 64), "late": _linear(40, 8)})
    with pytest.raises(ConfigError, match=r"^late: NVFP4 quantizes blocks of 16 inputs.*width 40"):
        quantize_model(model, NVFP4_SPEC)
    model["late"] = _linear(64, 8)
    model["late"].weight.data[0, 0] = -torch.inf
    with pytest.raises(ConfigError, match=r"^late: .*NaN or infinity"):
        quantize_model(model, NVFP4_SPEC)
    assert type(model["good"]) is torch.nn.Linear


def test_packed_models_and_models_with_adapters_are_refused() -> None:
    model = torch.nn.Sequential(_linear(64, 64))
    quantize_model(model, NVFP4_SPEC)
    with pytest.raises(ConfigError, match="0 is packed already"):
        quantize_model(model, NF4_SPEC)
    adapted = get_peft_model(Block(), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match="q_proj carries an adapter"):
        quantize_model(adapted, NVFP4_SPEC)


@pytest.mark.usefixtures("no_packages")
def test_a_format_that_cannot_run_here_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^q_proj: .*bitsandbytes"):
        quantize_model(Block(), NF4_SPEC)


# --- concatenated layers ----------------------------------------------------------------------------------------------

TORCHAO_SPEC = NVFP4(name="nvfp4", compute_dtype="float32", convention="torchao", **PLAIN)
IDS = ["nvfp4", "mxfp4", "nf4", "torchao", "fp8", "int8", "int4"]


@pytest.mark.parametrize("spec", [*SPECS, TORCHAO_SPEC, *INTS], ids=IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # the kernels' bfloat16 needs a GPU
def test_concatenated_layers_keep_their_own_tensor_scales(spec: Any, dtype: torch.dtype) -> None:
    linears = [_linear(64, n, bias=i != 1, seed=i) for i, n in enumerate((64, 32, 32, 16))]
    for i, linear in enumerate(linears):
        linear.weight.data *= 1 + i / 3
    parts = [_packed(spec, linear) for linear in linears]
    for part in parts:
        part.use_kernels()
    whole = concat_rows_in_place(parts)
    assert isinstance(whole, PackedLinear) and (whole.out_features, whole.in_features) == (144, 64)
    if spec.name == "nvfp4":
        assert [scale for _, scale in whole.row_scales] == [part.output_scale for part in parts]
        assert [(rows.start, rows.stop) for rows, _ in whole.row_scales] == [(0, 64), (64, 96), (96, 128), (128, 144)]
    assert torch.equal(whole.dequantized(), torch.cat([part.dequantized() for part in parts]))
    x = torch.randn(2, 5, 64).to(dtype).requires_grad_()
    apart = torch.cat([part(x) for part in parts], dim=-1)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(whole(x), apart, rtol=tolerance, atol=tolerance)
    grad = torch.randn(2, 5, 144).to(dtype)
    (ours,) = torch.autograd.grad(whole(x), x, grad)
    (expected,) = torch.autograd.grad(apart, x, grad)
    torch.testing.assert_close(ours, expected, rtol=8 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)


def test_squares_are_concatenated_at_their_edges() -> None:
    spec = symmetric("fp8", "128x128")
    parts = [_packed(spec, _linear(128, n, seed=n)) for n in (256, 128, 80)]
    for part in parts:
        part.use_kernels()
    assert concat_rows_in_place([parts[2], parts[1]]) is None
    whole = concat_rows_in_place(parts)
    assert isinstance(whole, PackedLinear)
    assert torch.equal(whole.dequantized(), torch.cat([part.dequantized() for part in parts]))


@pytest.mark.parametrize(
    ("spec", "kernels"),
    [
        (symmetric("int8", "row", "float32"), "int8"),
        (symmetric("fp8", "row", convention="torchao"), "fp8"),
        (symmetric("int4", 128, convention="torchao"), "int4-128"),
        (symmetric("int4", 32, "float16"), None),
        (symmetric("fp8", "128x128", convention="torchao"), None),
        (FORMATS["mxfp8"], None),
    ],
)
def test_kernels_take_scales_of_blocks_in_bfloat16_alone(spec: Any, kernels: str | None) -> None:
    layer = _packed(spec, _linear(128, 32))
    bits = _bits(layer)
    assert spec.kernel_layout == kernels
    if kernels is None:
        with pytest.raises(ValueError, match="have no layout"):
            layer.use_kernels()
    else:
        layer.use_kernels()
        assert layer.kernel_weight is not None and _bits(layer) == bits


def test_layers_that_share_a_tensor_scale_concatenate_to_one_scale() -> None:
    linears = [_linear(64, 32, seed=i) for i in range(3)]
    amax = max(float(linear.weight.detach().abs().max()) for linear in linears)
    parts: list[Any] = [pack_linear("a", linear, NVFP4_SPEC, amax) for linear in linears]
    for part in parts:
        part.use_kernels()
    whole = concat_rows_in_place(parts)
    plain = torch.nn.Linear(64, 96)
    plain.weight.data = torch.cat([linear.weight.detach() for linear in linears])
    plain.bias.data = torch.cat([linear.bias.detach() for linear in linears])
    assert isinstance(whole, PackedLinear) and _bits(whole) == _bits(_packed(NVFP4_SPEC, plain))


# --- placed layers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [*SPECS, TORCHAO_SPEC, *INTS], ids=IDS)
def test_placed_layers_keep_their_bits_and_are_joined_without_a_copy(spec: Any) -> None:
    names = ("mlp.down_proj", "self_attn.v_proj", "self_attn.q_proj", "self_attn.k_proj")
    layers = {name: _packed(spec, _linear(64, 32, seed=i)) for i, name in enumerate(names)}
    others = {name: _packed(spec, _linear(64, 32, seed=i)) for i, name in enumerate(names)}
    given = {name: dict(layer._buffers) for name, layer in layers.items()}
    place(layers)
    assert {name: _bits(layer) for name, layer in layers.items()} == {name: _bits(one) for name, one in others.items()}
    storages = {
        name: [tensor.untyped_storage().data_ptr() for tensor in layer.buffers()] for name, layer in layers.items()
    }
    for layer in layers.values():
        layer.use_kernels()
    for name, layer in layers.items():  # over what was there, not over what the layers were made of
        assert {tensor.untyped_storage().data_ptr() for tensor in layer.buffers()} <= {*storages[name]}
        assert all(
            torch.equal(tensor, given[name][key]) for key, tensor in layer.packed().items() if tensor is not None
        )
    joined = concat_rows_in_place([layers[f"self_attn.{letter}_proj"] for letter in "qkv"])
    assert joined is not None
    first = layers["self_attn.q_proj"]
    for key in KERNEL_BUFFERS:
        assert joined.get_buffer(key).data_ptr() == first.get_buffer(key).data_ptr()
    expected = torch.cat([others[f"self_attn.{letter}_proj"].dequantized() for letter in "qkv"])
    assert isinstance(joined, PackedLinear) and torch.equal(joined.dequantized(), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("spec", [*SPECS, TORCHAO_SPEC], ids=["nvfp4", "mxfp4", "nf4", "torchao"])
def test_placed_layers_stay_on_their_gpu(spec: Any) -> None:
    if spec is NF4_SPEC:
        pytest.importorskip("bitsandbytes")
    names = ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj")
    layers = {name: _packed(spec, _linear(64, 32, seed=i)) for i, name in enumerate(names)}
    before = {name: _bits(layer) for name, layer in layers.items()}
    place({name: layer.cuda() for name, layer in layers.items()})
    assert {tensor.device.type for layer in layers.values() for tensor in layer.buffers()} == {"cuda"}
    assert {name: _bits(layer.cpu()) for name, layer in layers.items()} == before


def test_layers_that_were_not_placed_leave_their_tensors_alone() -> None:
    layer = _packed(NVFP4_SPEC, _linear(64, 32))
    given = {name: (tensor, tensor.clone()) for name, tensor in layer._buffers.items() if tensor is not None}
    layer.use_kernels()
    assert all(torch.equal(tensor.view(torch.uint8), before.view(torch.uint8)) for tensor, before in given.values())


# --- adapters ---------------------------------------------------------------------------------------------------------


def _adapted(model: torch.nn.Module) -> Any:
    torch.manual_seed(7)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    adapted = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return adapted


@packing
def test_lora_trains_over_packed_layers_as_over_plain_ones(spec: Any) -> None:
    model = Block()
    quantize_model(model, spec)
    plain = copy.deepcopy(model)
    for name, module in model.named_children():
        if isinstance(module, PackedLinear):
            plain.set_submodule(name, _plain(module))
    packed, reference = _adapted(model), _adapted(plain)
    bits = _bits(packed.base_model.model.q_proj.base_layer)
    trained = {name for name, parameter in packed.named_parameters() if parameter.requires_grad}
    assert len(trained) == 8 and all("lora_" in name for name in trained)
    x = torch.randn(5, 64)
    for adapted in (packed, reference):
        optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.1)
        adapted(x).square().mean().backward()
        optimizer.step()
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters() if name in trained}
    for name, parameter in packed.named_parameters():
        if name in trained:
            assert parameter.grad is not None and float(parameter.grad.abs().sum()) > 0
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(packed(x), reference(x), rtol=1e-5, atol=1e-5)
    assert _bits(packed.base_model.model.q_proj.base_layer) == bits


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_merge_would_round_a_small_update_away(spec: Any) -> None:
    """Why adapters stay apart: of an update of one per cent of the weights' size, packing again keeps at most 2 %."""
    generator = torch.Generator().manual_seed(0)
    shape = (512, 1024)

    def packed(weight: torch.Tensor) -> torch.Tensor:
        tensors = spec.pack(weight)
        return spec.operand(tensors, shape, torch.float32) * spec.output_scale(tensors)

    base = packed(0.02 * torch.randn(shape, generator=generator))
    update = torch.randn(512, 32, generator=generator) @ torch.randn(32, 1024, generator=generator)
    update *= 0.01 * base.norm() / update.norm()
    merged = packed(base + update) - base
    assert abs(float((merged * update).sum() / update.square().sum())) <= 0.02


@packing
def test_merging_an_adapter_is_refused(spec: Any) -> None:
    model = Block()
    quantize_model(model, spec)
    adapted = _adapted(model)
    x = torch.randn(3, 64)
    before = adapted(x)
    for merge in (
        adapted.merge_adapter,
        adapted.merge_and_unload,
        lambda: adapted.merge_and_unload(safe_merge=True),
        adapted.base_model.model.q_proj.merge,
    ):
        with pytest.raises(ConfigError, match=f"packed as {spec.name} and cannot be read or merged into"):
            merge()
    torch.testing.assert_close(adapted(x), before, rtol=0, atol=0)
    with adapted.disable_adapter():
        base = adapted(x)
    torch.testing.assert_close(adapted.unload()(x), base, rtol=0, atol=0)
