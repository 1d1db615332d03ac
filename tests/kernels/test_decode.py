"""Both kernels of the decode GEMM against float64, and what can be known of them without a GPU.

Gluon has no interpreter. On a machine without a GPU the decoding is run instruction by instruction, and the rest is
covered by the compile gate only. On Hopper both kernels run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from qerl_kernels import decode, decode_assembly, decode_configs, decode_launch, layout, nf4
from qerl_kernels.decode_configs import (
    BUCKETS,
    MMA_V2,
    SHARED_LIMIT,
    WGMMA,
    Config,
    bucket,
    by_rule,
    candidates,
    choose,
)
from tests.kernels.symmetric_weights import SPECS, packed_symmetric

TOKENS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 65, 127, 129, 256)
QWEN_SHAPES = ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944), (7168, 5120), (5120, 27648))

_RUNS = decode.kernel_of(torch.device("cuda", 0)) if torch.cuda.is_available() else None
hopper = pytest.mark.skipif(_RUNS != WGMMA, reason="needs a GPU of compute capability 9 (wgmma)")
any_card = pytest.mark.skipif(_RUNS is None, reason="needs a GPU of compute capability 8 to 12 (mma.sync)")
each_kernel = pytest.mark.parametrize(
    "kernel", [pytest.param(WGMMA, marks=hopper), pytest.param(MMA_V2, marks=any_card)]
)


def random_weight(format_name: str, n: int, k: int, device: str, largest_scale: int = 0x7F) -> layout.KernelWeight:
    if format_name in SPECS:
        return layout.repack(format_name, packed_symmetric(format_name, (n, k), n + k), (n, k)).to(device)
    generator = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 256, (n, k // 2), generator=generator, dtype=torch.uint8)
    packed: dict[str, torch.Tensor]
    if format_name == "nf4":
        packed = {"weight": codes.view(-1, 1), "absmax": torch.rand(n * k // 64, generator=generator)}
    elif format_name == "mxfp4":
        scales = torch.randint(110, 125, (n, k // 32), generator=generator, dtype=torch.uint8)
        packed = {"weight_packed": codes, "weight_scale": scales}
    else:
        scales = torch.randint(0, largest_scale, (n, k // 16), generator=generator, dtype=torch.uint8)
        packed = {"weight_packed": codes, "weight_scale": scales.view(torch.float8_e4m3fn)}
    return layout.repack(format_name, packed, (n, k)).to(device)


def activations(m: int, k: int, device: str) -> torch.Tensor:
    return torch.randn((m, k), generator=torch.Generator().manual_seed(m)).to(device, torch.bfloat16)


def extras(m: int, n: int, rank: int, device: str) -> dict[str, Any]:
    """A scale for each row, bias and adapter."""
    generator = torch.Generator().manual_seed(n)
    xa, b = (torch.randn((size, rank), generator=generator).to(device, torch.bfloat16) for size in (m, n))
    scale, bias = (torch.randn(n, generator=generator).to(device) for _ in range(2))
    return {"scale": scale, "bias": bias, "lora": (xa, b, 0.5)}


def expected(x: torch.Tensor, weight: layout.KernelWeight, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """y in float64 and the error that rounding it to bfloat16 and sums of FP32 may make."""
    y = decode.decode_reference(x.double(), weight, dtype=torch.float64, **more)
    sums = x.double().abs() @ decode.operand(weight).double().abs().t()
    if "lora" in more:
        sums = sums * more["scale"].abs() + more["lora"][0].double().abs() @ more["lora"][1].double().abs().t()
    return y, y.abs() * 2.0**-8 + sums * 2.0**-20 * x.shape[1] ** 0.5


def run(x: torch.Tensor, weight: layout.KernelWeight, config: Config, **more: Any) -> torch.Tensor:
    """The kernel's output, in a buffer that held NaN."""
    y = torch.full((len(x), weight.shape[0]), torch.nan, dtype=torch.bfloat16, device=x.device)
    scale, bias, lora, parts = more.get("scale", 1.0), more.get("bias"), more.get("lora"), more.get("parts", ())
    decode._check(x, weight, scale, bias, lora, parts)
    decode_launch.launch(x, weight, scale, bias, lora, y, config, parts)
    return y


@each_kernel
@pytest.mark.gpu
@pytest.mark.parametrize("m", TOKENS)
@pytest.mark.parametrize("format_name", layout.BLOCK)
def test_gemm_is_that_of_float64(format_name: str, m: int, kernel: str) -> None:
    block = layout.BLOCK[format_name]
    tail = {16: 80, 32: 96, 64: 192, 128: 128}.get(block, 72)  # not whole columns, nor whole rounds
    for n, k, split, separate in (
        (1, max(64, block), 1, False),
        (129, tail + 512, 1, False),
        (200, 1600 if block < 128 else 1664, 2, False),
        (200, tail + 1024, 2, True),
    ):
        weight, x = random_weight(format_name, n, k, "cuda"), activations(m, k, "cuda")
        config = replace(by_rule((n, k), m, kernel, format_name), split=split, separate=separate)
        for more in ({}, extras(m, n, 8, "cuda") if n == 129 else {"scale": 0.25}):
            y = run(x, weight, config, **more)
            want, allowed = expected(x, weight, **more)
            assert bool(((y.double() - want).abs() <= allowed).all()), (n, k, config, more.keys())


@each_kernel
@pytest.mark.gpu
@pytest.mark.parametrize("rank", [3, 16, 32, 64, 128])
@pytest.mark.parametrize("m", [5, 40, 150])
def test_adapter_bias_and_row_scale(m: int, rank: int, kernel: str) -> None:
    n, k = 200, 1024
    weight, x, more = random_weight("nvfp4", n, k, "cuda"), activations(m, k, "cuda"), extras(m, n, rank, "cuda")
    rule, (xa, b, scaling) = by_rule((n, k), m, kernel), more["lora"]
    for split, separate, by in ((1, False, scaling), (2, False, scaling), (2, True, scaling), (1, False, 0.0)):
        more["lora"] = xa, b, by
        y = run(x, weight, replace(rule, split=split, separate=separate), **more)
        want, allowed = expected(x, weight, **more)
        assert bool(((y.double() - want).abs() <= allowed).all()), (split, separate, by)


@each_kernel
@pytest.mark.gpu
@pytest.mark.parametrize(("parts", "rank"), [((512, 256, 256), 8), ((512, 256, 256), 96), ((256, 512), 32)])
@pytest.mark.parametrize("m", [5, 40, 150])
def test_joined_layers_read_their_own_adapter(m: int, parts: tuple[int, ...], rank: int, kernel: str) -> None:
    """What is zero in a block diagonal B is poison here."""
    n, k = sum(parts), 1024
    weight, x, more = random_weight("nvfp4", n, k, "cuda"), activations(m, k, "cuda"), extras(m, n, 1, "cuda")
    xa, b = (torch.randn(size, rank * len(parts), device="cuda").bfloat16() for size in (m, n))
    own = torch.block_diag(*(torch.ones(size, rank, device="cuda") for size in parts)) > 0
    want, allowed = expected(x, weight, **more | {"lora": (xa, b.where(own, 0), 0.5)})
    more["lora"] = xa, b.where(own, torch.nan), 0.5
    for rows, split, separate in ((64, 1, False), (128, 2, False), (64, 2, True)):
        config = replace(by_rule((n, k), m, kernel), rows=rows, warps=rows // 16, split=split, separate=separate)
        y = run(x, weight, config, parts=parts, **more)
        assert bool(((y.double() - want).abs() <= allowed).all()), (rows, split, separate)


@each_kernel
@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 16, 48, 200])
def test_configurations(m: int, kernel: str) -> None:
    """Every entry of the table, or what a search tries, on a shape with remainders: the same bits twice, powers of two
    pass through."""
    table = decode_configs.table("NVIDIA H200").values()
    measured = {c for sizes in table for size, c in sizes.items() if int(size) == bucket(m)}
    tried = {replace(c, split=2, separate=False) for c in candidates((4608, 3584), m, MMA_V2)}
    for config in measured if kernel == WGMMA else tried:
        n, k = 300, 64 * config.ring * config.split + 16
        weight, x = random_weight("nvfp4", n, k, "cuda"), activations(m, k, "cuda")
        y = run(x, weight, config)
        want, allowed = expected(x, weight)
        assert bool(((y.double() - want).abs() <= allowed).all()), config
        assert torch.equal(y, run(x, weight, config)), config
        assert torch.equal(2 * y, run(2 * x, weight, config)), config
        order = torch.randperm(m, generator=torch.Generator().manual_seed(0)).cuda()
        assert torch.equal(y[order], run(x[order].contiguous(), weight, config)), config


@each_kernel
@pytest.mark.gpu
def test_subnormal_scales_and_zero_blocks(kernel: str) -> None:
    n, k, m = 64, 512, 4
    config = by_rule((n, k), m, kernel)
    weight, x = random_weight("nvfp4", n, k, "cuda", largest_scale=8), activations(m, k, "cuda")
    want, allowed = expected(x, weight)
    y = decode.decode_gemm(x, weight, config=config)
    assert bool(((y.double() - want).abs() <= allowed).all())
    apart = torch.stack((x, x.flip(0)), dim=1)[:, 0]  # as the last of several positions
    assert not apart.is_contiguous() and torch.equal(decode.decode_gemm(apart, weight, config=config), y)
    odd = torch.randn((m, k + 8), device="cuda").bfloat16()[:, :k].copy_(x)  # rows at odd multiples of 16 bytes
    assert torch.equal(decode.decode_gemm(odd, weight, config=config), y)
    weight.words.zero_()
    assert torch.count_nonzero(decode.decode_gemm(x, weight, config=config)) == 0


@any_card
@pytest.mark.gpu
def test_the_device_chooses_the_kernel() -> None:
    """Without a configuration: the same bits as with that of the kernel that the device should run."""
    n, k, m = 192, 512, 12
    weight, x = random_weight("mxfp4", n, k, "cuda"), activations(m, k, "cuda")
    assert _RUNS is not None
    assert torch.equal(decode.decode_gemm(x, weight), run(x, weight, by_rule((n, k), m, _RUNS)))


@each_kernel
@pytest.mark.gpu
def test_runs_in_a_graph(kernel: str) -> None:
    weight, x = random_weight("nvfp4", 256, 1024, "cuda"), activations(16, 1024, "cuda")
    config = replace(by_rule((256, 1024), 16, kernel), split=2)
    y = decode.decode_gemm(x, weight, config=config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = decode.decode_gemm(x, weight, config=config)
    for _ in range(3):
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, y)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Of two pairs of bfloat16 numbers in words."""
    halves = (torch.stack((x & 0xFFFF, x >> 16), dim=-1).int().to(torch.int16) for x in (a, b))
    first, second = (half.view(torch.bfloat16) for half in halves)
    low, high = ((first * second).view(torch.int16).long() & 0xFFFF).unbind(-1)
    return low | (high << 16)


def product_and_sum(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Rounded once: these sums are exact in FP32, and -0 is the one number that changes no product."""
    first, second, third = (torch.stack((x & 0xFFFF, x >> 16), dim=-1).int().to(torch.int16) for x in (a, b, c))
    x, y, z = (half.view(torch.bfloat16).float() for half in (first, second, third))
    low, high = ((x * y + z).bfloat16().view(torch.int16).long() & 0xFFFF).unbind(-1)
    return low | (high << 16)


def permuted(a: torch.Tensor, zero: torch.Tensor, selector: torch.Tensor) -> torch.Tensor:
    """Four bytes of `a`; selections from 4 on are of the other operand, which is 0."""
    picked = [int(selector) >> (4 * i) & 0xF for i in range(4)]
    assert int(zero) == 0
    return sum(((a >> (8 * pick) & 0xFF) << (8 * i) for i, pick in enumerate(picked) if pick < 4), torch.tensor(0))


def logic(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Bit by bit the entry 4 a + 2 b + c of `table`."""
    entries = [i for i in range(8) if int(table) >> i & 1]
    terms = (((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)) for i in entries)
    return sum(terms, torch.tensor(0))


OPERATIONS: dict[str, Any] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "mul.rn.bf16x2": product,
    "fma.rn.bf16x2": product_and_sum,
    "prmt.b32": permuted,
    "lop3.b32": logic,
}


def assembled(code: str, inputs: dict[int, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All registers after PTX `code` ran on 32-bit operands, each element of them a lane of its own."""
    values = {f"${number}": words.long() & 0xFFFFFFFF for number, words in inputs.items()}
    for line in code.strip("{}\n ").splitlines():
        name, _, rest = line.rstrip(";").partition(" ")
        if name != ".reg":
            target, *sources = rest.split(", ")
            known = [values[source] if source in values else torch.tensor(int(source, 0)) for source in sources]
            values[target] = OPERATIONS[name](*known) & 0xFFFFFFFF
    return values


@pytest.mark.parametrize(
    "name",
    ["NVFP4", "MXFP4", "NVFP4_FUSED", "MXFP4_FUSED", *(name.upper().replace("-", "_") for name in SPECS)],
)
def test_assembly_decodes_the_layout(name: str) -> None:
    """The PTX that the kernels inline, run by hand: operand x 2^-exponent where the tensor core expects it.

    That is the A fragment of m16n8k16: lane 4 g + t has rows g and g + 8, inputs 2t, 2t + 1, 2t + 8 and 2t + 9.
    """
    common = pytest.importorskip("qerl_kernels.jit_decode_common", exc_type=ImportError)
    format_name = name.removesuffix("_FUSED").lower().replace("_", "-")
    weight = random_weight(format_name, 16, max(64, layout.BLOCK[format_name]), "cpu")
    words = weight.words[0, 0].view(-1, 8, 4, 4)  # of the first column of tiles, in fours
    inputs = {16 + 4 * i + j: fours[:, :, j].flatten() for i, fours in enumerate(words) for j in range(4)}
    row_scale = torch.ones(16)
    if layout.BLOCK[format_name]:
        scales = weight.scale_words[0, 0]
        scales = scales.reshape(-1, min(2, scales.numel()))  # of rows g and g + 8; of a square one
        scales = scales.repeat_interleave(32 // len(scales), dim=0)  # of each lane
        inputs |= {16 + 4 * (len(words) + i): one for i, one in enumerate(scales.unbind(1))}
    else:
        row_scale = weight.scales[0].float()
    code = getattr(common, name).value
    fused = name.endswith("_FUSED") or format_name in SPECS
    assert ("mul.rn.bf16x2" in code) != fused != ("fma.rn.bf16x2" not in code)
    values = assembled(code, inputs)
    found = torch.zeros(16, 64, dtype=torch.bfloat16)
    for j in range(4):
        for pair in range(4):
            pairs = values[decode_assembly.output(j, pair)].int().view(torch.bfloat16).view(8, 4, 2)
            first = 16 * j + 8 * (pair >> 1)
            found[8 * (pair & 1) :][:8, first : first + 8] = pairs.flatten(1)
    found_operand = found.float() * 2.0**weight.exponent * row_scale[:, None]
    assert torch.equal(found_operand, decode.operand(weight)[:, :64])


@pytest.mark.parametrize("format_name", layout.BLOCK)
def test_reference_is_that_of_the_dequantized_weight(format_name: str) -> None:
    m, n, k = 3, 20, 384
    weight, x, more = random_weight(format_name, n, k, "cpu"), activations(m, k, "cpu"), extras(m, n, 4, "cpu")
    packed = layout.unpack(weight)
    if format_name == "nf4":
        codes = packed["weight"].flatten()
        dense = torch.tensor([nf4.VALUES[c] for byte in codes.tolist() for c in (byte >> 4, byte & 15)])
        dense = (dense.view(-1, 64) * packed["absmax"].view(-1, 1)).bfloat16().view(n, k)
    elif format_name in SPECS:
        dtype = torch.bfloat16 if layout.BLOCK[format_name] else torch.float32  # scales of rows are applied to sums
        dense = SPECS[format_name].operand(packed, (n, k), dtype)
    else:
        from qerl_kernels import mxfp4, nvfp4

        dense = {"nvfp4": nvfp4, "mxfp4": mxfp4}[format_name].operand(*packed.values(), torch.float32)
    xa, b, factor = more["lora"]
    want = x.double() @ dense.double().t() * more["scale"] + xa.double() @ b.double().t() * factor + more["bias"]
    assert torch.equal(decode.decode_reference(x, weight, **more, dtype=torch.float64), want.bfloat16())


def test_refuses_what_it_cannot_take(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = random_weight("nvfp4", 32, 64, "cpu"), activations(4, 64, "cpu")
    assert not decode.pays(weight, 4, torch.bfloat16)
    with pytest.raises(ValueError, match="needs a GPU, got cpu; use decode_reference"):
        decode.decode_gemm(x, weight)
    monkeypatch.setattr(decode, "_unsupported", lambda device: None)
    long = torch.zeros(32, 129, dtype=torch.bfloat16)
    cases: list[tuple[str, tuple[Any, ...]]] = [
        (r"x must be bfloat16 \(1, 64\)", (x.float(), weight)),
        (r"x must be bfloat16 \(1, 64\)", (x[:, :32], weight)),
        ("multiples of 16 bytes", (torch.empty(4, 70, dtype=torch.bfloat16)[:, :64], weight)),
        ("x must be contiguous", (torch.empty(64, 4, dtype=torch.bfloat16).t(), weight)),
        ("1 to 256, 64", (x[:0], weight)),
        ("scale must be float32", (x, weight, torch.ones(31))),
        ("bias must be bfloat16 or float32", (x, weight, 1.0, torch.ones(32).half())),
        ("rank must be 1 to 128", (x, weight, 1.0, None, (long[:4], long, 1.0))),
        (r"XA must be bfloat16 \(4, 16\)", (x, weight, 1.0, None, (long[:3, :16], long[:, :16], 1.0))),
        ("on meta", (x, weight, 1.0, torch.ones(32, device="meta"))),
    ]
    for match, arguments in cases:
        with pytest.raises(ValueError, match=match):
            decode.decode_gemm(*arguments)
    joined, b = random_weight("nvfp4", 768, 64, "cpu"), torch.zeros(768, 24, dtype=torch.bfloat16)
    for parts in ((256, 256), (512, 128, 128), (512, -256, 512), (256, 256, 256, 0)):
        with pytest.raises(ValueError, match="multiples of 256"):
            decode.decode_gemm(x, joined, lora=(b[:4], b, 1.0), parts=parts)
    with pytest.raises(ValueError, match="beside=True needs lora"):
        decode.decode_gemm(x, weight, beside=True)


def test_the_kernel_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration for another card is refused, and rows that mma.sync would have to read in parts."""
    weight, x = random_weight("nvfp4", 32, 64, "cpu"), activations(4, 64, "cpu")
    for kernel, most in ((WGMMA, 256), (MMA_V2, 64)):
        monkeypatch.setattr(decode, "kernel_of", lambda _, kernel=kernel: kernel)
        assert decode.pays(weight, most, torch.bfloat16) and not decode.pays(weight, most + 1, torch.bfloat16)
        assert not decode.pays(weight, 4, torch.float16)
    monkeypatch.setattr(decode, "_unsupported", lambda _: None)
    with pytest.raises(ValueError, match=r"kernel=wgmma needs compute capability 9.*mma_v2"):
        decode.decode_gemm(x, weight, config=by_rule((32, 64), 4))
    narrow, x = random_weight("int8", 32, 68, "cpu"), torch.zeros(4, 72, dtype=torch.bfloat16)[:, :68]
    with pytest.raises(ValueError, match=r"kernel=mma_v2 needs K divisible by 8, got 68.*dequantize"):
        decode.decode_gemm(x, narrow, config=by_rule((32, 68), 4, MMA_V2, "int8"))


def test_every_configuration_fits_the_processor() -> None:
    shipped = [c for sizes in decode_configs.table("NVIDIA H200").values() for c in sizes.values()]
    assert len(shipped) == 8 * len(BUCKETS)
    shapes = (*QWEN_SHAPES, (1, 16), (64, 64), (17, 4096))
    ruled = [
        (shape, by_rule(shape, m, kernel, format_name))
        for shape in shapes
        for m in BUCKETS
        for kernel in (WGMMA, MMA_V2)
        for format_name in ("nvfp4", "int8")
    ]
    tried = [
        c for shape in QWEN_SHAPES for m in BUCKETS for kernel in (WGMMA, MMA_V2) for c in candidates(shape, m, kernel)
    ]
    for config in (*shipped, *(c for _, c in ruled), *tried):
        assert config.rows in (16 * config.warps, 32 * config.warps) and config.warps % 4 == 0 and config.ring > 0
        assert config.tokens in BUCKETS
        assert config.shared <= (SHARED_LIMIT if config.kernel == WGMMA else 99 * 1024)  # that of an RTX 4090
    assert all(c.split <= -(-shape[1] // (64 * c.ring)) for shape, c in ruled)


def test_own_measurements_go_before_the_shipped_table(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own = Config(128, 16, 8, 3, 4, 3)
    decode_configs.table.cache_clear()
    before = choose("NVIDIA H200", (3584, 3584), 16)
    assert [path.name for path in decode_configs.tables("NVIDIA H200")] == ["decode_h200.json"]
    written = decode_configs.cache_file("NVIDIA H200")
    decode_configs.write_table(written, {(3584, 3584): {16: own}})
    assert [path.name for path in decode_configs.tables("NVIDIA H200")] == ["decode_h200.json", written.name]
    assert choose("NVIDIA H200", (3584, 3584), 9) == own != before
    assert choose("NVIDIA H200", (3584, 3584), 9, format_name="int4-128") == own
    decode_configs.write_table(written, {(3584, 3584): {16: replace(own, ring=3)}})
    decode_configs.table.cache_clear()
    assert choose("NVIDIA H200", (3584, 3584), 9, format_name="int4-128") == by_rule((3584, 3584), 9)
    assert decode_configs.tables("another GPU") == []
    assert choose("another GPU", (3584, 3584), 9) == by_rule((3584, 3584), 16)
    eight = choose("NVIDIA H200", (3584, 3584), 9, format_name="int8")
    assert eight == by_rule((3584, 3584), 16, format_name="int8") and eight.ring == 4  # tables are of 4 bits
    forced = choose("NVIDIA H200", (3584, 3584), 9, MMA_V2)
    assert forced == by_rule((3584, 3584), 16, MMA_V2) and forced.kernel == MMA_V2
    decode_configs.table.cache_clear()
