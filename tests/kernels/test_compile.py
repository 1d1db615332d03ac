"""Cross-compiles every kernel for Hopper, Blackwell and other cards, without a GPU, and checks the machine code.

A kernel that no longer builds, spills registers, loses its tensor-core instruction or needs far more instructions fails
here in seconds. Bounds are the instructions of the version that was measured, plus a tenth for other compiler releases.
The disassembler comes with Triton.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.cache import get_cache_manager

from qerl_kernels.decode_configs import Config, choose
from qerl_kernels.layout import EIGHT_BITS

# KiB that a program may have: A100, RTX 3090, RTX 4090, H100, B200, B300, Thor, RTX 5090, GB10.
SHARED_LIMIT = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
ARCHITECTURES = (90, 100, 103, 110, 121)
CARDS = tuple(SHARED_LIMIT)

_ADDRESSED = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", re.MULTILINE)
_BRANCH = re.compile(r"\bBRA\b.*?(0x[0-9a-f]+)")
# What assemblers have turned into wrong code, some up to now: sums of two 16 bit numbers for sm_90, and |x| made of -x
# from sm_100 on (https://github.com/triton-lang/triton/issues/11581, https://github.com/pytorch/pytorch/issues/190973).
_MISCOMPILED = re.compile(r"add\.s16x2|neg\.s32\s+(%r\d+), (%r\d+);(?s:.)*?max\.s32\s+%r\d+, (?:\1, \2|\2, \1);")
SCALES = {  # types of what the decode GEMM loads as scales; for those of whole rows it loads nothing
    **{"nvfp4": "*i32", "mxfp4": "*i16", "nf4": "*fp32", "int4-32": "*i32", "int4-128": "*i16", "fp8-128x128": "*i16"},
    **dict.fromkeys(("fp8", "int8"), "*i32"),
}
SYMMETRIC = (  # arguments of `test_decode_mma` but for the card
    ("fp8", 8, 32, 3.4), ("int8", 64, 32, 5.4), ("fp8-128x128", 8, 32, 4.3), ("fp8", 64, 32, 5.7), ("int8", 8, 32, 2.9),
    ("fp8-128x128", 64, 32, 6.4), ("int4-32", 64, 32, 5.5), ("int4-128", 16, 32, 3.5),
)  # fmt: skip
HEAD = dict.fromkeys(("vocabulary", "stride"), "i32") | {"inverse_temperature": "fp32"}


@dataclass(frozen=True)
class Compiled:
    """One kernel for one architecture."""

    arch: int
    ptx: str
    sass: str
    registers: int  # per thread
    stack: int  # bytes per thread; above 0: registers spilled, or an array is in memory
    local: int  # bytes per thread
    shared: int  # bytes per program

    @cached_property
    def instructions(self) -> list[str]:
        """The SASS instructions in order, without addresses."""
        return [text.strip() for _, text in _ADDRESSED.findall(self.sass)]

    def count(self, pattern: str) -> int:
        """How many instructions match the regular expression `pattern`, such as "HGMMA" or "LDG.*128"."""
        return sum(re.search(pattern, text) is not None for text in self.instructions)

    @property
    def waits_first(self) -> bool:
        """Whether it lets the next kernel start and waits for earlier ones before it touches global memory."""
        touches = [i for i, text in enumerate(self.instructions) if re.search(r"\b(LDG|STG|LDGSTS|ATOMG|RED)\b", text)]
        waits = [i for i, text in enumerate(self.instructions) if re.search(r"\bACQBULK\b", text)]
        return self.count(r"\bPREEXIT\b") > 0 and bool(waits) and waits[0] < touches[0]

    @property
    def overlaps(self) -> bool:
        """Whether an instruction of programmatic dependent launch is in it."""
        return "griddepcontrol" in self.ptx or self.count(r"\b(ACQBULK|PREEXIT)\b") > 0

    @property
    def spills(self) -> bool:
        return self.stack > 0 or self.local > 0 or self.count(r"\b(LDL|STL)\b") > 0

    def loop(self, around: str = "") -> list[str]:
        """The instructions of the longest backward branch, which is the body of the main loop; empty if there is none.

        With `around`, a regular expression: the shortest body with an instruction that matches it. A compiler that
        moves unlikely code to the end creates longer backward branches that are no loops.
        """
        lines = [(int(at, 16), text) for at, text in _ADDRESSED.findall(self.sass)]
        places = {at: i for i, (at, _) in enumerate(lines)}
        bodies = [
            lines[places[int(target[1], 16)] : i + 1]
            for i, (at, text) in enumerate(lines)
            if (target := _BRANCH.search(text)) is not None and int(target[1], 16) < at and int(target[1], 16) in places
        ]
        if around:
            inner = [body for body in bodies if any(re.search(around, text) for _, text in body)]
            return [text.strip() for _, text in min(inner, key=len, default=[])]
        return [text.strip() for _, text in max(bodies, key=len, default=[])]


def compiled(
    kernel: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    arch: int,
    num_warps: int,
    num_stages: int = 2,
    aligned: tuple[str, ...] | None = None,
    **options: Any,
) -> Compiled:
    """Compile the jitted `kernel` for sm_`arch`.

    `signature` has the Triton type ("*bf16", "i32", "fp32") of each argument that is not in `constants`. All arguments,
    or those named in `aligned`, are assumed to be divisible by 16, as pointers and most sizes are.
    """
    if arch in (103, 110, 121) and triton.__version__.startswith("3.6."):
        pytest.skip("Triton 3.6 cannot disassemble this, nor assemble for sm_110")
    names = kernel.arg_names
    missing = [name for name in names if name not in signature and name not in constants]
    if missing:
        raise ValueError(f"{kernel.__name__}: neither a type nor a value for {', '.join(missing)}")
    types = {name: "constexpr" if name in constants else signature[name] for name in names}
    integral = [name for name in signature if signature[name].startswith(("*", "i", "u"))]
    chosen = integral if aligned is None else aligned
    attrs: dict[Any, Any] = {(names.index(name),): [["tt.divisibility", 16]] for name in chosen}
    make = GluonASTSource if kernel.is_gluon() else ASTSource
    source = make(kernel, types, constants, attrs)
    built = triton.compile(
        source,
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True, **options},
    )
    cache = get_cache_manager(built.hash)  # where Triton keeps what it has compiled; to disassemble takes longer
    kept = cache.get_file("kernel.sass") or cache.put(_dumped(built.asm["cubin"]), "kernel.sass", binary=False)
    sass = Path(kept).read_text()
    usage = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", sass)}
    return Compiled(arch, built.asm["ptx"], sass, usage["REG"], usage["STACK"], usage["LOCAL"], built.metadata.shared)


def _dumped(cubin: bytes) -> str:
    """Resource usage and SASS, as cuobjdump prints them."""
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [program, "--dump-resource-usage", "--dump-sass", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _sound(built: Compiled, overlapping: bool = False) -> None:
    assert not built.spills, (built.stack, built.local)
    assert built.shared <= SHARED_LIMIT[built.arch] * 1024
    assert built.waits_first if overlapping else not built.overlaps
    assert not _MISCOMPILED.search(built.ptx)
    assert not re.search("e2m1|mxf4", built.ptx)  # no native FP4, as kernels/README.md says


def _overlapping(arch: int) -> tuple[bool, ...]:
    """The values of PDL: launches have it from sm_90 on (`overlap`); Hopper stands for what runs without."""
    return (False, True) if arch == 90 else (arch > 90,)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("format_number", "kind", "scales", "shared", "bound"),
    [
        (0, "*u8", 4, 1, 11.8),
        (1, "*u8", 2, 1, 12.1),
        (2, "*fp32", 1, 1, 15.9),
        (3, "*i16", 0, 0, 16.3),
        (3, "*i16", 0, 2, 16.3),
        (4, "*i16", 0, 0, 12.4),
        (5, "*i16", 2, 1, 14.9),
        (5, "*i16", 1, 2, 14.9),
    ],
)
def test_dequantize(arch: int, format_number: int, kind: str, scales: int, shared: int, bound: float) -> None:
    """17 instructions a weight would cost as much time as the memory traffic; stores are whole lines."""
    from qerl_kernels import jit_dequantize

    signature = {"words": "*i32", "scales": kind, "table": "*fp32", "out": "*i32"}
    signature |= dict.fromkeys(("rows", "half_width", "columns", "offset"), "i32")
    constants = {"FORMAT": format_number, "S": scales, "SHARED": shared}
    built = compiled(jit_dequantize.dequantize, signature, constants, arch, num_warps=4)
    _sound(built)
    assert len(built.instructions) * 128 / 4096 <= bound
    assert built.count(r"LDG\.\S*128") == (2 if format_number in (3, 4) else 1)  # four words of each thread at once
    assert built.count(r"STG\.\S*128") == built.count("STG") == 4
    assert built.count("FTZ") == 0  # FP32 subnormals are codes here


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("scaled", "bound"), [(False, 24.0), (True, 31.0)])
def test_row_scores(arch: int, scaled: bool, bound: float) -> None:
    """The loop over the vocabulary: instructions a logit, the branches of rare blocks included."""
    from qerl_kernels import jit_loss_head
    from qerl_kernels.loss_head import SCORES

    names = ("logprob", "entropy", "entropy_t1", "likeliest", "logsumexp")
    signature = {"logits": "*bf16", "targets": "*i64"} | dict.fromkeys(names, "*fp32") | HEAD
    block, warps = SCORES
    built = compiled(jit_loss_head.row_scores, signature, {"SCALED": scaled, "BLOCK": block}, arch, num_warps=warps)
    _sound(built)
    assert 0 < len(built.loop()) * 32 * warps / block <= bound


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("with_entropy", "bound"), [(False, 21.0), (True, 26.0)])
def test_head_gradients(arch: int, with_entropy: bool, bound: float) -> None:
    from qerl_kernels import jit_loss_head
    from qerl_kernels.loss_head import GRADIENTS

    signature = {"logits": "*bf16", "entropy_gradient": "*bf16", "targets": "*i64"}
    signature |= {"logsumexp": "*fp32", "entropy": "*fp32"} | HEAD
    block, warps = GRADIENTS
    constants = {"WITH_ENTROPY": with_entropy, "BLOCK": block}
    built = compiled(jit_loss_head.gradients, signature, constants, arch, num_warps=warps)
    _sound(built)
    assert len(built.instructions) * 32 * warps / block <= bound


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("choice", ["GREEDY", "ON_DEVICE", "TOP_K TOP_P"])
def test_sampling(arch: int, choice: str) -> None:
    from qerl_kernels import jit_sampling
    from qerl_kernels.sampling import BLOCK, WARPS

    signature = {"logits": "*bf16", "keys": "*i64", "tokens": "*i64", "logprobs": "*fp32", "entropies": "*fp32"}
    signature |= dict.fromkeys(("position", "top_k"), "i32") | HEAD | {"top_p": "fp32"}
    constants: dict[str, Any] = {name: name in choice.split() for name in ("GREEDY", "TOP_K", "TOP_P", "ON_DEVICE")}
    if constants["ON_DEVICE"]:
        signature["position"] = "*i64"
    constants |= {"SHIFT": 16, "BLOCK": BLOCK, "BLOCKS": 64}
    aligned = ("logits", "vocabulary", "stride")
    for pdl in _overlapping(arch):
        built = compiled(jit_sampling.draw, signature, constants | {"PDL": pdl}, arch, num_warps=WARPS, aligned=aligned)
        _sound(built, pdl)


def _compiled_layer_op(
    kernel: Any, constants: dict[str, Any], arch: int, warps: int, stages: int = 2, dtype: str = "bf16"
) -> Compiled:
    types = dict.fromkeys(kernel.arg_names, f"*{dtype}")
    types |= dict.fromkeys(("weight", "partial", "maxima", "logprobs", "entropies"), "*fp32")
    types |= dict.fromkeys(("all_logprobs", "all_entropies"), "*fp32") | dict.fromkeys(("table", "clusters"), "*i32")
    types |= dict.fromkeys(("positions", "lengths", "prefixes", "state", "tokens", "stop_ids", "ids"), "*i64")
    types |= dict.fromkeys(("width", "window", "columns", "pieces", "stride", "count"), "i32")
    types |= dict.fromkeys(("gate_stride", "up_stride", "q_stride", "k_stride", "v_stride"), "i32")
    types |= {"epsilon": "fp32", "factor": "fp32"}
    if "partial" in types:
        types["total"] = "*fp32"
    wanted = {name: types[name] for name in kernel.arg_names if name not in constants}
    aligned = tuple(name for name in wanted if wanted[name].startswith("*"))
    return compiled(kernel, wanted, constants, arch, warps, stages, aligned)


def _attention(arch: int, dtype: str, size: int, prefix: bool, pdl: bool = False) -> Compiled:
    from qerl_kernels import jit_decoder_layer
    from qerl_kernels.decoder_layer import PAGE, PIECE, PREFIX_WARPS, key_block, own_warps

    torch_dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    block, warps = key_block(size, torch_dtype), own_warps(torch_dtype)
    shape = {"KV": 4, "GROUP": 7, "D": size, "DIM": size, "BLOCK": block, "PAGE": PAGE, "PIECE": PIECE}
    shape["PDL"] = pdl
    if prefix:
        shape |= {"MEMBERS": 9, "ROWS": 64}
        return _compiled_layer_op(jit_decoder_layer.attend_prefix, shape, arch, PREFIX_WARPS, 2, dtype)
    return _compiled_layer_op(jit_decoder_layer.attend_own, shape | {"ROWS": 16}, arch, warps, 3, dtype)


@pytest.mark.parametrize(("arch", "pdl"), [(arch, pdl) for arch in CARDS for pdl in _overlapping(arch)])
def test_decoder_layer(arch: int, pdl: bool) -> None:
    """Sizes of a 7B model; attention multiplies on the tensor cores and copies its keys ahead of use."""
    from qerl_kernels import jit_decoder_layer, jit_rows
    from qerl_kernels.decoder_layer import PAGE, PIECE

    def check(kernel: Any, warps: int, **constants: Any) -> None:
        _sound(_compiled_layer_op(kernel, constants | {"PDL": pdl}, arch, warps), pdl)

    for gemma in (False, True):
        check(jit_decoder_layer.add_norm, 8, ADD=True, UNIT_OFFSET=gemma, BLOCK=4096)
        check(jit_decoder_layer.gated, 4, GELU=gemma, BLOCK=1024)
    check(jit_decoder_layer.rotate_store, 1, D=128, DIM=128, KV=4, HEADS=28, HALF=64, PAGE=PAGE)
    for prefix in (False, True):
        attend = _attention(arch, "bf16", 128, prefix, pdl)
        _sound(attend, pdl)
        assert attend.count("MMA") > 0 and attend.count("LDGSTS") > 0
    check(jit_decoder_layer.combine_pieces, 1, D=128, DIM=128, HEADS=28, PIECE=PIECE, CHUNK=8)
    check(jit_rows.advance, 1, STOPS_BLOCK=2)


@pytest.mark.parametrize(("arch", "pdl"), [(arch, pdl) for arch in CARDS for pdl in _overlapping(arch)])
@pytest.mark.parametrize(("rank", "width", "beside"), [(96, 3584, False), (32, 18944, False), (32, 18944, True)])
def test_projection(arch: int, pdl: bool, rank: int, width: int, beside: bool) -> None:
    """Layers of a 7B model: tensor cores, whole vectors, and all inputs of a program copied ahead of use.

    Beside the decode GEMM it waits before it lets that start, otherwise the other way around.
    """
    from qerl_kernels import jit_projection
    from qerl_kernels.projection import pieces_of

    signature = {"x": "*bf16", "a": "*bf16", "y": "*bf16", "partial": "*fp32", "counters": "*i32"}
    signature |= dict.fromkeys(("rows", "rank", "width"), "i32")
    inputs, pieces = pieces_of(rank, width)
    constants = {"INPUTS": inputs, "PIECES": pieces, "TILE": 16, "COLUMNS": 64, "PDL": pdl, "BESIDE": beside}
    aligned = tuple(name for name in signature if name != "rows")
    built = compiled(jit_projection.project, signature, constants, arch, 4, 6, aligned)
    _sound(built, pdl)
    order = [text for text in built.instructions if re.search(r"\b(ACQBULK|PREEXIT)\b", text)]
    assert ["ACQBULK" in text for text in order] == ([beside, not beside] if pdl else [])
    assert built.count("MMA") == inputs // 16 and built.count(r"LDGSTS\.\S*128") == built.count("LDGSTS") > 0
    assert built.count("ATOM") == 2 and built.count(r"LDG\b") == pieces


@pytest.mark.parametrize("arch", CARDS)
def test_training_block(arch: int) -> None:
    """Sizes of a 7B model: no spills, and whole vectors from and to memory."""
    from qerl_kernels import jit_training_block
    from qerl_kernels.training_block import GATED, NORM_WARPS, ROTATED

    def built(name: str, warps: int, aligned: tuple[str, ...] = (), **constants: Any) -> Compiled:
        kernel = getattr(jit_training_block, name)
        types = dict.fromkeys(kernel.arg_names, "*bf16") | dict.fromkeys(("width", "rows"), "i32")
        types |= {"epsilon": "fp32", "weight": "*fp32"}
        wanted = {key: types[key] for key in kernel.arg_names if key not in constants}
        pointers = tuple(key for key in wanted if wanted[key].startswith("*"))
        return compiled(kernel, wanted, constants, arch, warps, aligned=pointers + aligned)

    kernels = [built("norm_gradient", NORM_WARPS, ("width",), ADD=True, BLOCK=4096)]
    block, warps = GATED
    kernels.append(built("swiglu_gradient", warps, ("width",), BLOCK=block))
    tokens, per_program, warps = ROTATED
    heads: dict[str, Any] = {"HEADS": 28, "KV": 4, "D": 128, "HALF": 64, "TOKENS": tokens, "PER_PROGRAM": per_program}
    kernels += [built(name, warps, **heads, NORM=True) for name in ("rotate", "rotate_back")]
    for kernel in kernels:
        _sound(kernel)
        assert kernel.count(r"STG\.\S*(64|128)") == kernel.count("STG") > 0


@pytest.mark.parametrize(("dtype", "size", "prefix"), [("bf16", 256, False), ("bf16", 256, True), ("fp32", 128, False)])
def test_attention_fits_small_gpus(dtype: str, size: int, prefix: bool) -> None:
    """Heads twice as wide in bytes as those of the 7B model, where a program may have 99 KiB."""
    attend = _attention(89, dtype, size, prefix)
    assert not attend.spills and 0 < attend.shared <= 99 * 1024


def test_a_kernel_that_spills_is_found() -> None:
    """The gate itself: the same kernel with a block far too large for its registers."""
    from qerl_kernels import jit_loss_head

    signature = {"logits": "*bf16", "entropy_gradient": "*bf16", "targets": "*i64"}
    signature |= {"logsumexp": "*fp32", "entropy": "*fp32"} | HEAD
    constants = {"WITH_ENTROPY": True, "BLOCK": 16384}
    assert compiled(jit_loss_head.gradients, signature, constants, 90, num_warps=1).spills
    with pytest.raises(ValueError, match="BLOCK"):
        compiled(jit_loss_head.gradients, signature, {"WITH_ENTROPY": True}, 90, num_warps=1)


def _decode(
    config: Config,
    format_name: str,
    rank: int,
    grouped: bool = False,
    scaled: bool = True,
    even: bool = True,
    beside: bool = False,
) -> Compiled:
    """The kernel of Hopper; `scaled`: with a scale for each row and a bias."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    from qerl_kernels import jit_decode

    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    signature = {"x_box": f"tensordesc<bf16[{config.tokens}, {64 * config.ring}],{layout!r}>"}
    signature |= dict.fromkeys(("words_ptr", "table_ptr", "counter_ptr", "items_ptr"), "*i32")
    rows = "*bf16" if format_name in ("fp8", "int8") else "*fp32"
    signature |= {"scales_ptr": SCALES[format_name], "row_scale_ptr": rows, "partial_ptr": "*fp32"}
    signature |= dict.fromkeys(("bias_ptr", "xa_ptr", "b_ptr", "y_ptr"), "*bf16")
    signature |= dict.fromkeys(("factor", "scaling"), "fp32")
    signature |= dict.fromkeys(
        ("M", "N", "COLUMNS", "TILES", "rank", "own", "end1", "end2", "stride_ym", "items"), "i32"
    )
    constants: dict[str, Any] = {"FORMAT": format_name, "BM": config.rows, "BN": config.tokens, "W": config.warps}
    constants |= {"RING": config.ring, "XBUF": config.buffers, "SPLIT": config.split, "SEPARATE": config.separate}
    constants |= {"RANK": rank, "OVERLAP": config.overlap, "EVEN": even, "BESIDE": beside}
    constants |= {"HAS_ROW_SCALE": scaled, "HAS_BIAS": scaled, "GROUPED": grouped, "PDL": True}
    aligned = tuple(name for name in signature if name.endswith("_ptr") or name in ("N", "rank", "own", "stride_ym"))
    limit = {} if config.registers is None else {"maxnreg": config.registers}
    return compiled(jit_decode.decode, signature, constants, 90, config.warps, aligned=aligned, **limit)


@pytest.mark.parametrize(
    ("format_name", "tokens", "rank", "grouped", "bound"),
    [
        ("nvfp4", 16, 0, False, 3.9),
        ("nvfp4", 16, 32, False, 3.9),
        ("nvfp4", 128, 0, False, 4.5),
        ("mxfp4", 16, 0, False, 3.6),
        ("nf4", 16, 0, False, 4.9),
        ("nvfp4", 16, 0, True, 3.9),  # of experts, with scale and bias
        ("mxfp4", 64, 0, True, 3.6),
        ("fp8", 16, 32, False, 3.6),
        ("fp8", 128, 32, False, 4.1),
        ("fp8-128x128", 16, 0, False, 4.4),
        ("fp8-128x128", 64, 32, False, 4.7),
        ("int8", 16, 32, False, 3.1),
        ("int4-32", 16, 32, False, 3.4),
        ("int4-128", 16, 32, False, 3.5),
        ("int4-128", 128, 32, False, 3.9),
    ],
)
def test_decode(format_name: str, tokens: int, rank: int, grouped: bool, bound: float) -> None:
    """The loop over K: wgmma, 16-byte loads, and fewer instructions a weight than memory leaves time for (4.4)."""
    ring = 4 if tokens == 16 else 2
    config = Config(64, tokens, 4, 2, ring, 2, overlap=tokens > 16)
    built = _decode(config, format_name, rank, grouped, scaled=rank > 0 or grouped)
    assert built.shared <= SHARED_LIMIT[90] * 1024
    assert built.overlaps and built.waits_first == grouped  # others read weights before they wait
    loop = built.loop("HGMMA")
    assert not any(text.startswith(("LDL", "STL")) for text in loop)
    assert sum("HGMMA" in text for text in loop) == 4 * ring
    eight = format_name in EIGHT_BITS
    assert sum("LDG" in text and ".128" in text for text in loop) == ring * (1 + eight)
    assert len(loop) * 32 * 4 / (64 * 64 * ring) <= bound


def _programs(built: Compiled, warps: int) -> int:
    """How many run on a processor of Hopper at once."""
    by_registers = 65_536 // (-(-built.registers // 8) * 8 * 32 * warps)
    return min(by_registers, SHARED_LIMIT[90] * 1024 // (built.shared + 1024))


@pytest.mark.parametrize("tokens", [1, 64, 256])
@pytest.mark.parametrize("shape", [(4608, 3584), (3584, 18944), (37888, 3584)])
def test_decode_beside_its_adapter(shape: tuple[int, int], tokens: int) -> None:
    """It waits for XA behind the loop over K, before it reads XA, writes or counts; no program of a processor less."""
    config = choose("NVIDIA H200", shape, tokens)
    plain, both = (_decode(config, "nvfp4", 32, scaled=False, beside=beside) for beside in (False, True))
    assert not both.spills and _programs(both, config.warps) == _programs(plain, config.warps)

    def halves(built: Compiled) -> tuple[list[str], list[str]]:
        """What is touched before and after the wait."""
        touches = r"\b(ACQBULK|ATOM\w*|HGMMA|LDG|RED|STG|UTMALDG)\b"
        order = [match[1] for text in built.instructions if (match := re.search(touches, text))]
        assert order.count("ACQBULK") == 1
        return order[: order.index("ACQBULK")], order[order.index("ACQBULK") + 1 :]

    before, after = halves(both)
    assert both.ptx.index("fence.proxy.async.global") < both.ptx.index("cp.async.bulk.tensor")
    assert {*before} == {"HGMMA", "LDG", "UTMALDG"} and "STG" in after and "UTMALDG" not in after
    assert "HGMMA" not in halves(plain)[0]
    without, _ = halves(_decode(config, "nvfp4", 0, scaled=False, beside=True))
    assert before.count("LDG") == without.count("LDG")  # all reads of XA come after


@pytest.mark.parametrize(
    ("shape", "tokens", "registers"),
    [
        ((37888, 3584), 128, (123, 123)),
        ((37888, 3584), 256, (123, 123)),
    ],
)
def test_an_adapter_costs_no_program_of_a_processor(
    shape: tuple[int, int], tokens: int, registers: tuple[int, ...]
) -> None:
    """Gate and up of a 7B model with the tiles of an H200."""
    config = choose("NVIDIA H200", shape, tokens)
    assert not config.separate
    without, beside = (_decode(config, "nvfp4", rank, scaled=False) for rank in (0, 32))
    assert [one.registers for one in (without, beside)] == pytest.approx(registers, abs=4)
    assert _programs(beside, config.warps) == _programs(without, config.warps) == 3
    assert beside.stack == 0 and beside.count("HGMMA") == without.count("HGMMA") + 2


def test_add_partials() -> None:
    """With the adapter of joined layers; the operands of the tensor core come straight from memory."""
    from qerl_kernels import jit_decode_end

    signature = {"row_scale_ptr": "*fp32", "partial_ptr": "*fp32", "factor": "fp32", "scaling": "fp32"}
    signature |= dict.fromkeys(("bias_ptr", "xa_ptr", "b_ptr", "y_ptr"), "*bf16")
    signature |= dict.fromkeys(("M", "N", "rank", "own", "end1", "end2", "stride_ym"), "i32")
    constants = {"BM": 64, "BN": 64, "PART": 16, "SPLIT": 2, "RANK": 32, "HAS_ROW_SCALE": True, "HAS_BIAS": True}
    aligned = tuple(name for name in signature if name.endswith("_ptr") or name in ("N", "rank", "own", "stride_ym"))
    for arch, wgmma in ((90, True), (90, False), (80, False)):
        constants |= {"PDL": arch >= 90, "WGMMA": wgmma}
        built = compiled(jit_decode_end.add_partials, signature, constants, arch, 4, aligned=aligned)
        _sound(built, overlapping=arch >= 90)
        assert built.count("HGMMA") == 2 * wgmma and built.count("HMMA") == 4 * (not wgmma)


def _decode_mma(arch: int, format_name: str, tokens: int, rank: int) -> Compiled:
    """The kernel of all cards but Hopper with the tiles of its rule; the most registers where the last program adds.

    Nothing is assumed of K, which comes in 8 numbers: rows with one scale may have 584 inputs.
    """
    from qerl_kernels import jit_decode_mma
    from qerl_kernels.decode_configs import MMA_V2, by_rule

    config = by_rule((4608, 3584), tokens, MMA_V2, format_name)
    signature = {"x_ptr": "*bf16", "scales_ptr": SCALES[format_name]}
    signature |= dict.fromkeys(("words_ptr", "table_ptr", "counter_ptr"), "*i32")
    rows = "*bf16" if format_name in ("fp8", "int8") else "*fp32"
    signature |= {"row_scale_ptr": rows, "partial_ptr": "*fp32"}
    signature |= dict.fromkeys(("bias_ptr", "xa_ptr", "b_ptr", "y_ptr"), "*bf16")
    signature |= dict.fromkeys(("factor", "scaling"), "fp32")
    sizes = ("M", "N", "K", "COLUMNS", "TILES", "rank", "own", "end1", "end2", "stride_x", "stride_ym")
    signature |= dict.fromkeys(sizes, "i32")
    constants: dict[str, Any] = {"FORMAT": format_name, "BM": config.rows, "BN": config.tokens, "W": config.warps}
    constants |= {"RING": config.ring, "XBUF": config.buffers, "SPLIT": 2, "SEPARATE": False, "RANK": rank}
    constants |= {"HAS_ROW_SCALE": rank > 0, "HAS_BIAS": rank > 0, "PDL": arch >= 90}
    aligned = tuple(n for n in signature if n.endswith("_ptr") or n in ("N", "rank", "own", "stride_ym"))
    return compiled(jit_decode_mma.decode, signature, constants, arch, config.warps, aligned=aligned)


@pytest.mark.parametrize(
    ("arch", "format_name", "tokens", "rank", "bound"),
    [  # a sample: each card, and each tile and format with and without an adapter
        (80, "nvfp4", 8, 128, 3.6),
        (80, "nf4", 64, 128, 7.4),
        (86, "nvfp4", 64, 128, 6.5),
        (89, "mxfp4", 16, 128, 3.6),
        (89, "nvfp4", 64, 0, 6.5),
        (90, "nvfp4", 16, 128, 4.0),
        (90, "nf4", 32, 0, 5.7),
        (100, "nf4", 16, 0, 5.0),
        (100, "nvfp4", 64, 128, 6.5),
        (103, "nf4", 64, 0, 7.4),
        (103, "nvfp4", 16, 128, 4.0),
        (110, "nvfp4", 64, 128, 6.5),
        (110, "mxfp4", 32, 0, 4.8),
        (120, "nvfp4", 32, 128, 4.8),
        (120, "mxfp4", 8, 0, 3.2),
        (121, "nvfp4", 64, 128, 6.5),
        (121, "nf4", 8, 0, 5.7),
        *((arch, *SYMMETRIC[i % 6]) for i, arch in enumerate(CARDS)),
        *((arch, *SYMMETRIC[6 + i % 2]) for i, arch in enumerate(CARDS)),
    ],
)
def test_decode_mma(arch: int, format_name: str, tokens: int, rank: int, bound: float) -> None:
    """The loop over K: mma.sync, ldmatrix and asynchronous copies of 16 bytes; instructions a weight, as of wgmma.

    A compiler may keep two numbers for the end in memory, to fit one more program on a processor.
    """
    from qerl_kernels.decode_configs import MMA_V2, by_rule

    built, config = _decode_mma(arch, format_name, tokens, rank), by_rule((4608, 3584), tokens, MMA_V2, format_name)
    assert built.stack <= 8 and built.shared <= 99 * 1024  # that of an RTX 4090
    assert built.overlaps == (arch >= 90) and not built.waits_first
    loop = built.loop("HMMA")
    assert not any(text.startswith(("LDL", "STL")) for text in loop)
    assert sum("HMMA.16816.F32.BF16" in text for text in loop) == config.ring * config.tokens // 2
    assert sum("LDSM.16.M88.4" in text for text in loop) == config.ring * config.tokens // 4
    assert sum(re.search(r"LDGSTS\S*\.128", text) is not None for text in loop) == config.ring * config.tokens // 16
    words = config.ring * (2 if format_name in EIGHT_BITS else 1)
    assert sum(re.search(r"LDG\.\S*\.128", text) is not None for text in loop) == words
    assert sum("BAR.SYNC" in text for text in loop) == 2  # more, and each copy would wait for the one before
    assert len(loop) * 32 * config.warps / (config.rows * 64 * config.ring) <= bound


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("format_name", "bound"), [("nvfp4", 9.6), ("bf16", 3.0)])
def test_grouped_gemm(arch: int, format_name: str, bound: float) -> None:
    """Experts on any GPU: tensor cores, and weights, scales and activations copied ahead of use; the loop over K."""
    from qerl_kernels import jit_grouped

    packed = format_name != "bf16"
    signature = {"x": "*bf16", "words": "*i32" if packed else "*bf16", "scales": "*i32", "table": "*fp32"}
    signature |= {"items": "*i32", "expert_scale": "*fp32", "bias": "*bf16", "y": "*bf16", "factor": "fp32"}
    sizes = ("rows", "width", "columns", "stride_x", "stride_expert", "stride_n")
    signature |= dict.fromkeys(sizes, "i32")
    block, warps = (64, 4) if packed else (128, 8)
    constants = {"FORMAT": 0 if packed else 3, "BM": block, "BN": 16, "stride_k": 1}
    constants |= {"EVEN": True, "HAS_SCALE": True, "HAS_BIAS": True}
    aligned = tuple(name for name in signature if name != "columns" and not signature[name].startswith("fp"))
    built = compiled(jit_grouped.grouped_gemm, signature, constants, arch, warps, 4, aligned)
    _sound(built)
    loop = built.loop("MMA")
    assert sum("MMA" in text for text in loop) > 0 and sum("LDGSTS" in text for text in loop) > 2
    assert len(loop) * 32 * warps / (64 * block) <= bound


def test_sort_rows() -> None:
    from qerl_kernels import jit_grouped

    signature = {"ids": "*i64"} | dict.fromkeys(("tokens", "places", "starts", "items"), "*i32")
    signature |= dict.fromkeys(("count", "chosen", "experts", "blocks"), "i32")
    constants = {"EXPERTS": 256, "ROWS": 16, "BLOCK": 64}
    pointers = tuple(name for name in signature if signature[name].startswith("*"))
    _sound(compiled(jit_grouped.sort_rows, signature, constants, 90, num_warps=8, aligned=pointers))


@pytest.mark.parametrize(("arch", "pdl"), [(arch, pdl) for arch in CARDS for pdl in _overlapping(arch)])
@pytest.mark.parametrize(("kind", "width"), [("nvfp4", 1536), ("mxfp4", 3584), ("fp8", 3584), ("int8", 8960)])
def test_rounded_inputs(arch: int, pdl: bool, kind: str, width: int) -> None:
    """A row stays in registers; its inputs are read once, in whole vectors."""
    from qerl_kernels import jit_activations
    from qerl_kernels.activations import shape_of

    block, blocks, warps = shape_of(kind, width)
    signature = {"x": "*bf16", "y": "*bf16", "counts": "*i64", "skipped": "*i64", "width": "i32"}
    constants = {"KIND": kind, "EPSILON": 2.0**-7, "B": block, "BLOCKS": blocks, "SKIPS": True, "PDL": pdl}
    built = compiled(jit_activations.round_row, signature, constants, arch, warps, enable_fp_fusion=False)
    _sound(built, pdl)
    assert built.registers * warps * 32 <= 65536
    assert built.count(r"LDG\.\S*128") == built.count("LDG") - 1 == 2  # and whether the row counts


@pytest.mark.parametrize("arch", [arch for arch in CARDS if arch >= 89])
def test_codes_of_inputs(arch: int) -> None:
    from qerl_kernels import jit_fp8

    signature = {"x": "*bf16", "codes": "*u8", "scales": "*fp32", "counts": "*i64", "skipped": "*i64"}
    signature |= {"factors": "*fp32", "width": "i32"}
    constants = {"EPSILON": 2.0**-7, "PART": 2048, "PARTS": 10, "CONVERTS": True, "PDL": arch >= 90}
    for factors in (False, True):
        constants |= {"SKIPS": not factors, "FACTORS": factors}
        built = compiled(jit_fp8.quantize_row, signature, constants, arch, 8, enable_fp_fusion=False)
        _sound(built, arch >= 90)
        each = len(built.loop()) / 8 if factors else len(built.instructions) / 80  # the second of the two loops
        assert each <= (26 if factors else 23) and built.count("F2FP.*E4M3") > 0
        assert not factors or (built.registers <= 64 and built.loop())


@pytest.mark.parametrize("arch", [arch for arch in CARDS if arch >= 89])
def test_transposed_codes(arch: int) -> None:
    """Loads and stores of whole vectors."""
    from qerl_kernels import fp8, jit_fp8

    signature = {"codes": "*u8", "out": "*u8", "rows": "i32", "width": "i32"}
    built = compiled(jit_fp8.transpose, signature, {"TILE": fp8.TRANSPOSED}, arch, 8)
    _sound(built)
    vectors, all_of_them = ([built.count(rf"{one}{size}") for one in ("LDG", "STG")] for size in (r"\.\S*128", ""))
    assert vectors == all_of_them == [4, 4] and len(built.instructions) / 64 <= 6


@pytest.mark.parametrize("arch", [arch for arch in CARDS if arch >= 89])
def test_dequantized_codes(arch: int) -> None:
    """One load of 16 codes for each thread, and stores of whole vectors."""
    from qerl_kernels import fp8, jit_fp8

    signature = {"codes": "*u8", "scales": "*fp32", "out": "*i16", "width": "i32"}
    built = compiled(jit_fp8.dequantize_row, signature, {"PART": fp8.DEQUANTIZED}, arch, 4)
    _sound(built)
    vectors, all_of_them = ([built.count(rf"{one}{size}") for one in ("LDG", "STG")] for size in (r"\.\S*128", ""))
    assert (vectors, all_of_them) == ([1, 2], [2, 2])  # and the scale of the row
    assert built.registers <= 32 and len(built.instructions) / 16 <= 11.5
