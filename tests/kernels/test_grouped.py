"""The experts' GEMM and the sorting of rows against plain PyTorch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from qerl_bench.quant.matrices import PackedMatrices
from qerl_kernels import decode, grouped, layout
from qerl_kernels.grouped import SortedRows, grouped_gemm, grouped_reference, sort_rows, sort_rows_reference
from tests.kernels.symmetric_weights import SPECS, packed_symmetric
from tests.weight_formats import PLAIN

FORMATS = (*grouped.FORMATS, "bf16")


def random_weight(format_name: str, experts: int, n: int, k: int, device: str) -> Any:
    generator = torch.Generator(device).manual_seed(n + k)
    shape = (experts * n, k)

    def bytes_of(*size: int, first: int = 0, end: int = 256) -> torch.Tensor:
        return torch.randint(first, end, size, generator=generator, dtype=torch.uint8, device=device)

    if format_name == "bf16":
        return torch.randn(experts, n, k, generator=generator, device=device).bfloat16()
    packed = {"weight_packed": bytes_of(shape[0], k // 2)}
    if format_name == "nf4":
        packed = {"weight": packed["weight_packed"].view(-1, 1)}
        packed["absmax"] = torch.rand(shape[0] * k // 64, generator=generator, device=device)
    elif format_name == "mxfp4":
        packed["weight_scale"] = bytes_of(shape[0], k // 32, first=110, end=125)
    else:
        packed["weight_scale"] = bytes_of(shape[0], k // 16, end=0x7F).view(torch.float8_e4m3fn)
    return layout.repack(format_name, packed, shape)


def case(experts: int, tokens: int, chosen: int, n: int, k: int, device: str, seed: int = 0) -> dict[str, Any]:
    """Sorted rows of tokens and the distinct experts of each, a scale by expert and a bias."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=generator).topk(chosen).indices
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return {
        "x": torch.randn(tokens * chosen, k, generator=generator).to(device, dtype),
        "rows": sort_rows_reference(ids.to(device), experts),
        "scale": torch.rand(experts, generator=generator).to(device),
        "bias": torch.randn(experts, n, generator=generator).to(device, dtype),
    }


def error(y: torch.Tensor, weight: grouped.Weight, x: torch.Tensor, **more: Any) -> float:
    """The largest error, relative to what FP32 sums and rounding to the dtype of y may make."""
    want = grouped_reference(x.double(), weight, dtype=torch.float64, **more)
    more |= {"scale": None if more.get("scale") is None else more["scale"].abs(), "bias": None}
    absolute = weight.abs() if isinstance(weight, torch.Tensor) else _absolute(weight, more["rows"])
    sums = grouped_reference(x.double().abs(), absolute, dtype=torch.float64, **more)
    rounding = 2.0**-8 if y.dtype == torch.bfloat16 else 2.0**-22
    return float(((y.double() - want).abs() / (want.abs() * rounding + sums * 2.0**-20 * x.shape[1] ** 0.5)).max())


def _absolute(weight: layout.KernelWeight, rows: SortedRows) -> torch.Tensor:
    return decode.operand(weight).abs().view(rows.experts, -1, weight.shape[1])


@pytest.mark.parametrize(("tokens", "chosen", "experts"), [(1, 1, 1), (1, 8, 128), (9, 7, 4), (32, 2, 5), (50, 4, 3)])
def test_rows_are_sorted_by_expert(device: str, tokens: int, chosen: int, experts: int) -> None:
    """Against the reference, and against what the order is for; experts may have no row, or more than a tile."""
    ids = torch.randint(0, experts, (tokens, chosen), generator=torch.Generator().manual_seed(tokens)).to(device)
    found, want = sort_rows(ids, experts), sort_rows_reference(ids, experts)
    assert torch.equal(found.tokens, want.tokens) and torch.equal(found.places, want.places)
    assert torch.equal(found.starts, want.starts) and found.experts == experts
    assert torch.equal(found.items[:, 0], want.items[:, 0])
    used = want.items[:, 0] >= 0
    assert torch.equal(found.items[used], want.items[used])
    x = torch.arange(tokens, device=device)
    assert torch.equal(x[found.tokens][found.places].view(tokens, chosen), x[:, None].expand(-1, chosen))
    sorted_ids = torch.empty_like(ids).flatten().index_copy_(0, found.places.long(), ids.flatten())
    covered = [row for e, first, end in found.items[used].tolist() for row in range(first, end) if sorted_ids[row] == e]
    assert covered == list(range(tokens * chosen)) and bool((sorted_ids.diff() >= 0).all())
    assert int((found.items[used][:, 2] - found.items[used][:, 1]).max()) <= found.tile


@pytest.mark.parametrize(
    ("tokens", "chosen", "experts"), [(1, 8, 128), (32, 8, 128), (256, 8, 128), (7, 4, 32), (256, 4, 32)]
)
def test_there_are_items_for_every_choice(tokens: int, chosen: int, experts: int) -> None:
    """The worst case: as many experts as possible have one row more than fits in a tile."""
    count = tokens * chosen
    rows = grouped._empty(torch.zeros(tokens, chosen), experts)
    worst = max(-(-(count - others) // rows.tile) + others for others in range(min(count, experts)))
    assert worst <= len(rows.items) <= count


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize(("experts", "tokens", "chosen", "n", "k"), [(5, 3, 2, 48, 64), (3, 25, 2, 80, 192)])
def test_every_row_is_multiplied_by_its_expert(
    device: str, format_name: str, experts: int, tokens: int, chosen: int, n: int, k: int
) -> None:
    """Experts without rows, and experts with more rows than a tile; outputs that are no multiple of a tile."""
    weight, more = random_weight(format_name, experts, n, k, device), case(experts, tokens, chosen, n, k, device)
    y = grouped_gemm(weight=weight, **more)
    assert y.shape == (tokens * chosen, n) and error(y, weight, **more) <= 1
    more |= {"scale": None, "bias": None}
    assert error(grouped_gemm(weight=weight, **more), weight, **more) <= 1


@pytest.mark.parametrize(("format_name", "k"), [("nvfp4", 80), ("mxfp4", 96), ("bf16", 40)])
def test_widths_that_are_no_whole_tiles(device: str, format_name: str, k: int) -> None:
    weight, more = random_weight(format_name, 4, 16, k, device), case(4, 5, 2, 16, k, device)
    behind = torch.full((11, k), torch.nan, device=device, dtype=more["x"].dtype)  # what follows the rows is not read
    behind[:10] = more["x"]
    more["x"] = behind[:10]
    assert error(grouped_gemm(weight=weight, **more), weight, **more) <= 1


def test_weights_of_any_strides(device: str) -> None:
    """A transposed weight, as the gradient of the input needs it."""
    weight, more = random_weight("bf16", 4, 64, 48, device), case(4, 5, 2, 48, 64, device)
    turned = weight.transpose(1, 2)
    assert not turned.is_contiguous()
    assert error(grouped_gemm(weight=turned, **more), turned, **more) <= 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(
    ("format_name", "tokens"),
    [("nvfp4", 1), ("nvfp4", 9), ("nvfp4", 20), ("nvfp4", 130), ("mxfp4", 9), ("nf4", 9), ("bf16", 1), ("bf16", 130)],
)
def test_real_shapes_are_those_of_float64(format_name: str, tokens: int) -> None:
    """Some experts of Qwen3-30B-A3B and gpt-oss-20b: the same bits twice, and powers of two pass through."""
    for experts, chosen, n, k in ((16, 8, 1536, 2048), (16, 8, 2048, 768), (8, 4, 2880, 2880)):
        weight, more = random_weight(format_name, experts, n, k, "cuda"), case(experts, tokens, chosen, n, k, "cuda")
        assert more["rows"].tile == {1: 8, 9: 16, 20: 32, 130: 64}[tokens]
        y = grouped_gemm(weight=weight, **more)
        assert error(y, weight, **more) <= 1
        assert torch.equal(y, grouped_gemm(weight=weight, **more))
        more |= {"x": 2 * more["x"], "bias": 2 * more["bias"]}
        assert torch.equal(2 * y, grouped_gemm(weight=weight, **more))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_runs_in_a_graph_whose_experts_change() -> None:
    weight: Any = random_weight("nvfp4", 8, 64, 128, "cuda")
    more = case(8, 6, 2, 64, 128, "cuda")
    ids = torch.zeros(6, 2, dtype=torch.int64, device="cuda")

    def run() -> torch.Tensor:
        return grouped_gemm(**(more | {"weight": weight, "rows": sort_rows(ids, 8)}))

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    for seed in range(3):
        ids.copy_(torch.randint(0, 8, (6, 2), generator=torch.Generator().manual_seed(seed)))
        y.fill_(torch.nan)
        graph.replay()
        more["rows"] = sort_rows_reference(ids, 8)
        assert error(y, weight, **more) <= 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("format_name", ["nvfp4", "mxfp4"])
def test_the_kernel_of_other_gpus(format_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "kernel_of", lambda _: None)
    weight, more = random_weight(format_name, 8, 192, 256, "cuda"), case(8, 9, 2, 192, 256, "cuda")
    assert error(grouped_gemm(weight=weight, **more), weight, **more) <= 1


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_packed_experts_run_through_it(architecture: str, interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorting, both matmuls, bias, adapters and routing weights of a model's experts, against their plain path."""
    from transformers import AutoConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    from qerl_bench.quant.experts import matrices_of, matrix_shape, pack_experts
    from qerl_bench.quant.grouped import ExpertsAdapter
    from qerl_bench.quant.nvfp4 import NVFP4

    sizes = {"hidden_size": 64, "num_experts" if architecture == "qwen3_moe" else "num_local_experts": 4}
    config = AutoConfig.for_model(architecture, **sizes, intermediate_size=32, moe_intermediate_size=32)
    kind: Any = {"qwen3_moe": Qwen3MoeExperts, "gpt_oss": GptOssExperts}[architecture]
    experts, generator = kind(config), torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        parameter.data.normal_(generator=generator)
    weight_format = NVFP4(name="nvfp4", compute_dtype="float32", convention="torchao", **PLAIN)
    packed = {}
    for name in ("gate_up_proj", "down_proj"):
        matrices = list(matrices_of(experts, experts.get_parameter(name)))
        parts = [weight_format.pack(matrix) for matrix in matrices]
        tensors = {key: torch.stack([part[key] for part in parts]) for key in parts[0]}
        packed[name] = PackedMatrices(weight_format, tensors, matrix_shape(experts, name), experts.is_transposed)
    pack_experts(experts, packed)
    experts.adapters = {
        name: ExpertsAdapter(
            torch.randn(4, 3, matrices.in_features, generator=generator),
            torch.randn(4, matrices.out_features, 3, generator=generator),
            0.5,
        )
        for name, matrices in packed.items()
    }
    x = torch.randn(7, 64, generator=generator)
    weights, ids = torch.rand(7, 4, generator=generator).topk(2)
    with torch.no_grad():
        want = experts(x, ids, weights)
        for matrices in packed.values():
            matrices.use_kernels()
        monkeypatch.setattr(grouped, "supported", lambda *_: True)
        used = []
        monkeypatch.setattr(grouped, "sort_rows", lambda *a: used.append(sort_rows(*a)) or used[-1])
        found = experts(x, ids, weights)
    assert len(used) == 1 and used[0].experts == 4
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())


def test_experts_in_8_bits_run_the_reference() -> None:
    packed = {name: torch.stack([t, t]) for name, t in packed_symmetric("int8", (16, 64)).items()}
    matrices = PackedMatrices(SPECS["int8"], packed, (2, 16, 64), False)
    with pytest.raises(ValueError, match="the fused kernels have no layout for INT8"):
        matrices.use_kernels()
    rows = {name: t.flatten(0, 1) for name, t in packed.items()}
    more = case(2, 1, 1, 16, 64, "cpu")
    with pytest.raises(ValueError, match="experts are packed in nvfp4, mxfp4, nf4, got int8"):
        grouped_gemm(more["x"], layout.repack("int8", rows, (32, 64)), more["rows"])


def test_wrong_arguments_are_explained() -> None:
    weight, more = random_weight("nvfp4", 4, 16, 64, "cpu"), case(4, 3, 2, 16, 64, "cpu")
    rows: SortedRows = more["rows"]
    assert not grouped.supported(weight, 4, 1, torch.bfloat16)
    cases: list[tuple[str, dict[str, Any]]] = [
        (r"x must have the shape \(6, 64\)", {"x": more["x"][:3]}),
        ("x must be contiguous", {"x": torch.zeros(64, 6).t()}),
        ("scale must have the shape", {"scale": torch.ones(3)}),
        (r"bias must have the shape \(4, 16\)", {"bias": torch.ones(4, 15)}),
        ("N a multiple of 16", {"rows": replace(rows, starts=rows.starts[:4])}),
        (r"weight must be \(4, N, K\)", {"weight": torch.ones(3, 16, 64)}),
        ("use its PyTorch reference", {}),
    ]
    for match, changed in cases:
        with pytest.raises(ValueError, match=match):
            grouped_gemm(**({"weight": weight} | more | changed))
    with pytest.raises(ValueError, match="ids must be of int64"):
        sort_rows(torch.zeros(3, 1), 4)
