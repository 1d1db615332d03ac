"""PTX that turns packed words of the kernel layout into pairs of bfloat16, the A operand of a tensor core.

Each function gives the text of one format for `inline_asm_elementwise` with 4 elements at a time: registers 0 to 15 are
the pairs, words and scales follow. `layout` has the order of the codes in a word.
"""

from __future__ import annotations

from collections.abc import Callable


def output(j: int, pair: int) -> str:
    """The assembly operand for a pair of word j = 2 jhi + jlo: register jhi of output tensor 4 jlo + pair."""
    return f"${2 * (4 * (j & 1) + pair) + (j >> 1)}"


def _product(target: str, a: str, b: str, fused: bool) -> str:
    """PTX for two products of bfloat16. Targets before sm_90 only have product plus number, here z = -0."""
    return f"fma.rn.bf16x2 {target}, {a}, {b}, z;" if fused else f"mul.rn.bf16x2 {target}, {a}, {b};"


def _fp4_assembly(scale_lines: list[str], scales: list[list[str]], fused: bool) -> str:
    """PTX from 4 words (operands 16 to 19) to 16 registers; `scales` are bf16x2, by row half and word."""
    lines = ["{", ".reg .b32 x, y, m, c, q<8>;", "mov.b32 m, 0x81C081C0;"]
    lines += [*([".reg .b32 z;", "mov.b32 z, 0x80008000;"] if fused else []), *scale_lines]
    for j in range(4):
        word, out = f"${16 + j}", [output(j, pair) for pair in range(4)]
        lines += [
            f"and.b32 x, {word}, m;",
            _product(out[0], "x", scales[0][j], fused),
            f"shl.b32 x, {word}, 3;",
            "and.b32 x, x, m;",
            _product(out[1], "x", scales[1][j], fused),
            f"shl.b32 x, {word}, 6;",
            "and.b32 x, x, m;",
            _product(out[2], "x", scales[0][j], fused),
            f"shr.u32 x, {word}, 3;",
            f"shr.u32 y, {word}, 7;",
            "lop3.b32 x, x, y, 0x01C001C0, 0x28;",  # (x ^ y) & mask
            f"shl.b32 y, {word}, 1;",
            "lop3.b32 x, y, 0x80008000, x, 0xEA;",  # (y & mask) | x
            _product(out[3], "x", scales[1][j], fused),
        ]
    return "\n".join([*lines, "}"])


def nvfp4(fused: bool) -> str:
    """A scale word (operands 20 and 24, rows g and g + 8) holds the E4M3 bytes of 4 blocks."""
    lines = ["mov.b32 c, 0x7B007B00;"]  # 2^119 twice: s 2^-120 becomes s 2^118
    for half, word in enumerate(("$20", "$24")):
        lines += [
            f"shl.b32 x, {word}, 4;",
            "and.b32 x, x, 0x07F007F0;",  # bytes 0 and 2
            f"shr.u32 y, {word}, 4;",
            "and.b32 y, y, 0x07F007F0;",  # bytes 1 and 3
            *(_product(r, r, "c", fused) for r in ("x", "y", "x", "y")),
            *(f"prmt.b32 q{4 * half + j}, {'xy'[j & 1]}, 0, {'0x3232' if j & 2 else '0x1010'};" for j in range(4)),
        ]
    return _fp4_assembly(lines, [[f"q{4 * half + j}" for j in range(4)] for half in range(2)], fused)


def mxfp4(fused: bool) -> str:
    """A scale word holds the E8M0 bytes of 2 blocks, each for two words."""
    lines = []
    for half, word in enumerate(("$20", "$24")):
        for byte in range(2):
            q = f"q{2 * half + byte}"
            lines += [f"prmt.b32 {q}, {word}, 0, {'0x4141' if byte else '0x4040'};", f"shl.b32 {q}, {q}, 7;"]
    return _fp4_assembly(lines, [[f"q{2 * half + (j >> 1)}" for j in range(4)] for half in range(2)], fused)


def nf4() -> str:
    """Lane i of the half warp holds the value of code i (operand 28); the FP32 product with the scale is rounded."""
    lines = ["{", ".reg .b32 x, y;", ".reg .f32 v, w, s0, s1;", "mov.b32 s0, $20;", "mov.b32 s1, $24;"]
    for j in range(4):
        for pair in range(4):
            lines += [
                f"shr.u32 x, ${16 + j}, {4 * pair};",
                f"shr.u32 y, ${16 + j}, {4 * pair + 16};",
                "shfl.sync.idx.b32 x, $28, x, 0x101F, 0xFFFFFFFF;",
                "shfl.sync.idx.b32 y, $28, y, 0x101F, 0xFFFFFFFF;",
                "mov.b32 v, x;",
                "mov.b32 w, y;",
                f"mul.rn.f32 v, v, s{pair & 1};",
                f"mul.rn.f32 w, w, s{pair & 1};",
                f"cvt.rn.bf16x2.f32 {output(j, pair)}, w, v;",
            ]
    return "\n".join([*lines, "}"])


def _symmetric_assembly(constants: dict[str, int], scale_lines: list[str], lines_of: Callable[..., list[str]]) -> str:
    """PTX for codes of 4 or 8 bits; `lines_of(j, pair)` leaves a pair of bfloat16 in the register of `output`."""
    lines = ["{", ".reg .b32 x, y, z, v, q<8>;", ".reg .b32 " + ", ".join(constants) + ";", "mov.b32 z, 0x80008000;"]
    lines += [f"mov.b32 {name}, {value:#010x};" for name, value in constants.items()]
    lines += scale_lines
    for j in range(4):
        for pair in range(4):
            lines += lines_of(j, pair)
    return "\n".join([*lines, "}"])


def _source(j: int, pair: int, to: int) -> tuple[str, list[str]]:
    """The register with an 8-bit pair of word j from bit `to`, 0 or 8, of each half on, and how it gets there."""
    word, at = f"${16 + j + 2 * (pair & 2)}", 8 * (pair & 1)
    if at == to:
        return word, []
    return "v", [f"shr.u32 v, {word}, 8;" if to < at else f"shl.b32 v, {word}, 8;"]


def fp8(squares: bool) -> str:
    """Words in operands 16 to 23, the scale of a square in 24. A code's bits in bfloat16 mean its value x 2^-120."""

    def lines_of(j: int, pair: int) -> list[str]:
        out, (source, lines) = output(j, pair), _source(j, pair, 8)
        lines += [f"shr.u32 y, {source}, 4;", "and.b32 y, y, m;", f"lop3.b32 x, {source}, z, y, 0xEA;"]  # (w & z) | y
        return lines + [_product("x" if squares else out, "x", "c", True)] + squares * [_product(out, "x", "q0", True)]

    scale_lines = squares * ["prmt.b32 q0, $24, 0, 0x1010;"]
    return _symmetric_assembly({"m": 0x07F007F0, "c": 0x7B807B80}, scale_lines, lines_of)


def int8() -> str:
    """128 + the lowest 7 bits, less 128 + the highest bit, which are bits of bfloat16 numbers from 128 to 256."""

    def lines_of(j: int, pair: int) -> list[str]:
        source, lines = _source(j, pair, 0)
        lines += [f"lop3.b32 x, {source}, m, k, 0xEA;", f"lop3.b32 y, {source}, s, k, 0xEA;"]  # (w & m) | k
        return [*lines, f"fma.rn.bf16x2 {output(j, pair)}, y, n, x;"]

    constants = {"m": 0x007F007F, "s": 0x00800080, "k": 0x43004300, "n": 0xBF80BF80}
    return _symmetric_assembly(constants, [], lines_of)


def int4(blocks: int) -> str:
    """128 + (code + 8), less 136, times the scale of one of `blocks`, operands 20 and 24 for rows g and g + 8."""

    def lines_of(j: int, pair: int) -> list[str]:
        source, lines = (f"${16 + j}", []) if pair == 0 else ("x", [f"shr.u32 x, ${16 + j}, {4 * pair};"])
        lines += [f"lop3.b32 x, {source}, m, k, 0xEA;", "fma.rn.bf16x2 x, x, p, n;"]
        return [*lines, _product(output(j, pair), "x", f"q{2 * (pair & 1) + (j >> 1) * (blocks - 1)}", True)]

    scale_lines = [
        f"prmt.b32 q{2 * half + block}, ${20 + 4 * half}, 0, {'0x3232' if block else '0x1010'};"
        for half in range(2)
        for block in range(blocks)
    ]
    constants = {"m": 0x000F000F, "k": 0x43004300, "p": 0x3F803F80, "n": 0xC308C308}
    return _symmetric_assembly(constants, scale_lines, lines_of)


def constraints(inputs: int) -> str:
    return ",".join(["=&r"] * 16 + ["r"] * (4 * inputs))
