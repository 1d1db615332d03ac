"""What a program of the decode GEMM asks for in the L2 cache: hints, which no number depends on (`ahead`)."""

# Triton's compiler wants constexpr annotations, although calls pass plain numbers.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qerl_kernels import ahead
from qerl_kernels.jit_decode_end import rows_of

BRING, OPERANDS = gl.constexpr(ahead.BRING), gl.constexpr(ahead.BRING_OPERANDS)
LINE, LINE_OPERANDS = gl.constexpr(ahead.BRING_LINE), gl.constexpr(ahead.BRING_LINE_OPERANDS)


@gluon.jit
def bring_share(ptr, program, total, each):
    """`each` of `total` bytes from `ptr` on, the share of this program, one behind the other."""
    first = program * each
    size = gl.minimum(each, total - first)
    address = ptr.to(gl.int64) + first
    gl.inline_asm_elementwise(BRING, OPERANDS, [address, size], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def bring_adapter(
    b_ptr, n0, N, rank, own, end1, end2,
    BM: gl.constexpr, RANK: gl.constexpr, GATED: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """The columns of B (N, rank) that this program reads in its rows, BM from n0 on."""
    n = gl.minimum(rows_of(n0, N, BM, GATED, gl.BlockedLayout([1], [32], [W], [0])), N - 1)
    first = own * ((n >= end1).to(gl.int32) + (n >= end2).to(gl.int32))
    for i in gl.static_range(0, RANK, 64):
        address = (b_ptr + n * rank + first + gl.minimum(i, own - 1)).to(gl.int64)
        gl.inline_asm_elementwise(LINE, LINE_OPERANDS, [address], dtype=gl.int32, is_pure=False, pack=1)
