"""The kernel layout is lossless, and its bit picture is the one that kernels decode."""

from __future__ import annotations

import pytest
import torch

from qerl_kernels import e2m1, layout, mxfp4, nf4, nvfp4
from tests.kernels.symmetric_weights import SPECS, packed_symmetric

SHAPES = [(1, 64), (16, 256), (17, 320), (40, 512), (130, 192)]


def packed_weight(format_name: str, n: int, k: int) -> dict[str, torch.Tensor]:
    """Every code and many scales occur."""
    if format_name in SPECS:
        return packed_symmetric(format_name, (n, k))
    generator = torch.Generator().manual_seed(n * k)
    codes = torch.randint(0, 256, (n, k // 2), generator=generator, dtype=torch.uint8)
    if format_name == "nf4":
        return {"weight": codes.view(-1, 1), "absmax": torch.rand(n * k // 64, generator=generator)}
    if format_name == "mxfp4":
        return {
            "weight_packed": codes,
            "weight_scale": torch.randint(90, 140, (n, k // 32), generator=generator, dtype=torch.uint8),
        }
    scale = torch.randint(0, 0x7F, (n, k // 16), generator=generator, dtype=torch.uint8)
    return {"weight_packed": codes, "weight_scale": scale.view(torch.float8_e4m3fn)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("format_name", layout.BLOCK)
def test_unpack_gives_back_every_bit(format_name: str, shape: tuple[int, int]) -> None:
    n, k = shape
    shape = (n, -(-k // (block := layout.BLOCK[format_name] or 1)) * block)
    packed = packed_weight(format_name, *shape)
    again = layout.unpack(layout.repack(format_name, packed, shape))
    assert again.keys() == packed.keys()
    for name, tensor in packed.items():
        assert again[name].dtype == tensor.dtype and again[name].shape == tensor.shape, name
        assert torch.equal(again[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("format_name", ["fp8", "int8"])
def test_scales_of_rows_keep_their_dtype(format_name: str, dtype: torch.dtype) -> None:
    packed = packed_symmetric(format_name, (37, 72), dtype=dtype)
    weight = layout.repack(format_name, packed, (37, 72))
    again = layout.unpack(weight)
    assert again["weight_scale"].dtype == dtype and torch.equal(again["weight_scale"], packed["weight_scale"])
    assert again["weight"].dtype == packed["weight"].dtype
    assert torch.equal(again["weight"].view(torch.int8), packed["weight"].view(torch.int8))
    assert (
        torch.equal(weight.scales.flatten()[:37], packed["weight_scale"].flatten()) and weight.scales[2, 5:].eq(0).all()
    )


@pytest.mark.parametrize(("format_name", "bits"), [("int4-32", 4.5), ("int4-128", 4.125), ("fp8", 8 + 16 / 256)])
def test_nothing_is_stored_twice(format_name: str, bits: float) -> None:
    assert layout.repack(format_name, packed_symmetric(format_name, (32, 256)), (32, 256)).nbytes == 32 * 256 * bits / 8


def test_repacking_in_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = packed_weight("nvfp4", 70, 320)
    whole = layout.repack("nvfp4", packed, (70, 320))
    monkeypatch.setattr(layout, "_MAX_CODES", 1)
    pieces = layout.repack("nvfp4", packed, (70, 320))
    assert torch.equal(whole.words, pieces.words)
    assert all(
        torch.equal(a.view(torch.uint8), packed[name].view(torch.uint8)) for name, a in layout.unpack(pieces).items()
    )


def decoded_by_kernel_rules(weight: layout.KernelWeight) -> torch.Tensor:
    """Operand x 2^-exponent (T * 16, C * 64) in bfloat16 by the documented masks and shifts and one scale product."""
    w = weight.words
    masks = {
        name: torch.tensor(value).int()
        for name, value in (("m", 0x81C081C0 - (1 << 32)), ("d", 0x01C001C0), ("s", 0x80008000 - (1 << 32)))
    }
    right3, right7 = (w >> 3) & 0x1FFFFFFF, (w >> 7) & 0x01FFFFFF  # logical shifts
    pairs = (
        w & masks["m"],
        (w << 3) & masks["m"],
        (w << 6) & masks["m"],
        ((right3 ^ right7) & masks["d"]) | ((w << 1) & masks["s"]),
    )
    tiles, columns = w.shape[:2]
    out = torch.zeros(tiles, 16, columns, 4, 16, dtype=torch.bfloat16)  # (T, row, C, j, input of the block)
    if weight.format == "nvfp4":
        scales = (weight.scales.int() << 4).to(torch.int16).view(torch.bfloat16) * 2.0**119 * 2.0**119
    else:
        scales = (weight.scales.int() << 7).to(torch.int16).view(torch.bfloat16).repeat_interleave(2, dim=-1)
    for pair, (row_half, input_half) in zip(pairs, ((0, 0), (1, 0), (0, 1), (1, 1)), strict=True):
        values = pair.contiguous().view(torch.bfloat16).unflatten(-1, (4, 2))  # (T, C, lane, j, parity)
        for lane in range(32):
            g, t = divmod(lane, 4)
            scaled = values[:, :, lane] * scales[:, :, g, row_half].unsqueeze(-1)
            first = 8 * input_half + 2 * t
            out[:, g + 8 * row_half, :, :, first : first + 2] = scaled
    return out.flatten(2).flatten(0, 1)


@pytest.mark.parametrize("format_name", ["nvfp4", "mxfp4"])
def test_documented_decoding_is_the_operand_exactly(format_name: str) -> None:
    n, k = 37, 576
    packed = packed_weight(format_name, n, k)
    weight = layout.repack(format_name, packed, (n, k))
    operand = {"nvfp4": nvfp4.operand, "mxfp4": mxfp4.operand}[format_name]
    expected = operand(packed["weight_packed"], packed["weight_scale"], torch.float32)
    decoded = decoded_by_kernel_rules(weight).float()
    assert torch.equal(decoded[:n, :k] * 2.0**weight.exponent, expected)
    assert torch.count_nonzero(decoded[n:]) == 0 and torch.count_nonzero(decoded[:, k:]) == 0


def test_every_code_under_every_scale_is_exact() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(127, 1)  # (127, 16), one block a row
    scales = torch.arange(127, dtype=torch.uint8).view(127, 1).view(torch.float8_e4m3fn)
    packed = {"weight_packed": e2m1.pack_pairs(codes), "weight_scale": scales}
    weight = layout.repack("nvfp4", packed, (127, 16))
    expected = torch.tensor([*e2m1.MAGNITUDES, *(-m for m in e2m1.MAGNITUDES)]) * scales.float()
    assert torch.equal(decoded_by_kernel_rules(weight).float()[:127, :16] * 2.0**8, expected)


def test_nf4_words_hold_plain_nibbles() -> None:
    w = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    scales = nf4.scales(w)
    packed = {"weight": nf4.encode(w, scales), **scales}
    word = int(layout.repack("nf4", packed, (16, 64)).words[0, 0, 4 * 3 + 2, 1])  # g = 3, t = 2, inputs 16..31
    codes = packed["weight"].view(16, 32)
    codes = torch.stack((codes >> 4, codes & 0xF), dim=-1).flatten(1)
    for pair, (row, column) in enumerate(((3, 20), (11, 20), (3, 28), (11, 28))):
        assert (word >> (4 * pair)) & 0xF == codes[row, column]
        assert (word >> (16 + 4 * pair)) & 0xF == codes[row, column + 1]


@pytest.mark.parametrize(
    ("format_name", "byte", "match"),
    [("nvfp4", 0x7F, "NaN"), ("nvfp4", 0x80, "negative"), ("mxfp4", 253, "E8M0 bytes up to 252")],
)
def test_scales_that_no_quantizer_writes_are_refused(format_name: str, byte: int, match: str) -> None:
    packed = packed_weight(format_name, 2, 64)
    packed["weight_scale"].view(torch.uint8)[1, 1] = byte
    with pytest.raises(ValueError, match=match):
        layout.repack(format_name, packed, (2, 64))


@pytest.mark.parametrize("format_name", SPECS)
def test_symmetric_words_hold_plain_codes(format_name: str) -> None:
    packed = packed_symmetric(format_name, (16, 128))
    words = layout.repack(format_name, packed, (16, 128)).words.view(2, -1, 8, 4, 4)[
        0, :, 3, 2, 1
    ]  # g = 3, t = 2, j = 1
    codes, bits = packed.get("weight", packed.get("weight_packed")), 4 if format_name.startswith("int4") else 8
    assert codes is not None and len(words) == bits // 4
    codes = codes.view(torch.uint8) if bits == 8 else e2m1.unpack_pairs(codes.view(torch.uint8))
    for pair, (row, column) in enumerate(((3, 20), (11, 20), (3, 28), (11, 28))):
        word, shift = (int(words[pair // 2]), 8 * (pair % 2)) if bits == 8 else (int(words[0]), 4 * pair)
        assert (word >> shift) & (2**bits - 1) == codes[row, column]
        assert (word >> (16 + shift)) & (2**bits - 1) == codes[row, column + 1]


@pytest.mark.parametrize(
    ("format_name", "change", "match"),
    [
        ("int4-32", {"weight_scale": torch.ones(2, 4)}, r"holds scales \(2, 4\) of bfloat16, got \(2, 4\) of float32"),
        ("fp8-128x128", {"weight_scale": torch.ones(2, 1).bfloat16()}, r"scales \(1, 1\) of bfloat16, got \(2, 1\)"),
        ("int8", {"weight_scale": torch.ones(2, 1).double()}, "of bfloat16 or float16 or float32, got"),
        ("fp8", {"weight": torch.full((2, 128), torch.nan).to(torch.float8_e4m3fn)}, "this weight has NaN"),
    ],
)
def test_other_symmetric_tensors_are_refused(format_name: str, change: dict[str, torch.Tensor], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        layout.repack(format_name, packed_symmetric(format_name, (2, 128)) | change, (2, 128))


def test_unknown_formats_and_widths_are_refused() -> None:
    with pytest.raises(ValueError, match="no kernel layout for 'int2'"):
        layout.repack("int2", {}, (1, 64))
    with pytest.raises(ValueError, match="divisible by 64"):
        layout.repack("nf4", {}, (1, 96))
