"""A frozen layer with an adapter: gradients against finite differences, and a weight that lives for one matmul only."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from qerl_kernels.dequantize import dequantize
from qerl_kernels.layout import repack, unpack
from qerl_kernels.nvfp4 import operand
from qerl_kernels.training_linear import Adapter, packed_linear

ONE = [(slice(None), 0.7)]
TWO = [(slice(0, 3), 0.7), (slice(3, 5), -1.3)]  # a layer joined from two, each with its tensor scale


def _double(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("scales", [ONE, TWO])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(4, 6), (1, 6), (2, 3, 6)])
def test_gradcheck(shape: tuple[int, ...], with_bias: bool, scales: list[tuple[slice, float]]) -> None:
    weight, bias = _double(5, 6).detach(), _double(5).detach() if with_bias else None
    x, a, b = _double(*shape), _double(2, 6), _double(5, 2)

    def adapted(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return packed_linear(x, lambda _: weight, scales, bias, Adapter(a, b, 1.5))

    dense = torch.cat([weight[these] * scale for these, scale in scales])
    wanted = torch.nn.functional.linear(x, dense + 1.5 * b @ a, bias)
    assert torch.allclose(adapted(x, a, b), wanted, rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(adapted, (x, a, b))
    assert torch.autograd.gradcheck(lambda x: packed_linear(x, lambda _: weight, scales, bias), (x,))
    recomputed = checkpoint(adapted, x, a, b, use_reentrant=False)
    plain = torch.autograd.grad(wanted.sum(), (x, a, b))
    assert all(map(torch.allclose, torch.autograd.grad(recomputed.sum(), (x, a, b)), plain))
    adapted(x.detach(), a, b).sum().backward()  # the first layer of a model: its input needs no gradient
    assert a.grad is not None and b.grad is not None


@pytest.mark.parametrize("scales", [ONE, TWO])
def test_joined_layers_have_an_adapter_each(scales: list[tuple[slice, float]]) -> None:
    """Of three layers in one matmul the second has no adapter, and the others differ in rank and scaling."""
    weight, x = _double(9, 6).detach(), _double(4, 6)
    scales = [scales[0], (slice(3, 9), scales[1][1])] if len(scales) > 1 else scales
    matrices = _double(2, 6), _double(4, 2), _double(3, 6), _double(3, 3)

    def joined(x: torch.Tensor, *matrices: torch.Tensor) -> torch.Tensor:
        first, last = Adapter(matrices[0], matrices[1], 1.5), Adapter(matrices[2], matrices[3], -0.5)
        return packed_linear(x, lambda _: weight, scales, None, [(slice(0, 4), first), (slice(6, 9), last)])

    dense = torch.cat([weight[these] * scale for these, scale in scales])
    added = torch.cat([1.5 * matrices[1] @ matrices[0], torch.zeros(2, 6).double(), -0.5 * matrices[3] @ matrices[2]])
    assert torch.allclose(joined(x, *matrices), x @ (dense + added).t(), rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(joined, (x, *matrices))
    with pytest.raises(ValueError, match="another layer"):
        wrong = Adapter(matrices[0], matrices[1], 1.0)
        packed_linear(x, lambda _: weight, scales, None, [(slice(0, 3), wrong)])


def test_layers_may_share_one_buffer() -> None:
    """The second layer overwrites the weight of the first before that one's backward pass."""
    first, second, buffer = _double(4, 4).detach(), _double(4, 4).detach() * 2, torch.empty(4, 4, dtype=torch.float64)
    x = _double(3, 4)
    y = packed_linear(x, lambda _: buffer.copy_(first), ONE, None)
    y = packed_linear(y, lambda _: buffer.copy_(second), ONE, None)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.allclose(grad, torch.ones(3, 4).double() @ second @ first * 0.49)


def test_an_adapter_of_another_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="another layer"):
        packed_linear(_double(3, 6), lambda _: _double(5, 6), ONE, None, Adapter(_double(2, 5), _double(5, 2), 1.0))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # PyTorch's word to the first backward of a process
@pytest.mark.parametrize(("rows", "shape"), [(1, (17, 64)), (300, (200, 320)), (2049, (1024, 512))])
def test_packed_weights_on_a_gpu(rows: int, shape: tuple[int, int]) -> None:
    """Forward and all gradients in bfloat16 against FP64 on the very same weights; the same bits twice."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    n, k = shape
    generator = torch.Generator().manual_seed(rows)
    packed = {
        "weight_packed": torch.randint(0, 256, (n, k // 2), generator=generator, dtype=torch.uint8),
        "weight_scale": torch.randint(1, 127, (n, k // 16), generator=generator, dtype=torch.uint8),
    }
    packed["weight_scale"] = packed["weight_scale"].view(torch.float8_e4m3fn)
    laid = repack("nvfp4", packed, shape).to("cuda")
    assert torch.equal(unpack(laid)["weight_packed"].cpu(), packed["weight_packed"])
    dense = operand(packed["weight_packed"], packed["weight_scale"], torch.float32).double().cuda() * 1e-3
    x, a, b = ((torch.randn(*s, generator=generator) * 0.5).cuda() for s in ((rows, k), (8, k), (n, 8)))
    x = x.bfloat16().requires_grad_()
    a.requires_grad_()
    b.requires_grad_()
    grad = torch.randn(rows, n, generator=generator).bfloat16().cuda()

    def ours() -> tuple[torch.Tensor, ...]:
        y = packed_linear(x, lambda _: dequantize(laid), [(slice(None), 1e-3)], None, Adapter(a, b, 0.25))
        return y.detach(), *torch.autograd.grad(y, (x, a, b), grad)

    wide = [tensor.detach().double().requires_grad_() for tensor in (x, a, b)]
    y = wide[0] @ dense.t() + 0.25 * wide[0] @ wide[1].t() @ wide[2].t()
    wanted = y, *torch.autograd.grad(y, wide, grad.double())
    found = ours()
    assert found[2].dtype == found[3].dtype == torch.float32
    for one, other in zip(found, wanted, strict=True):
        assert float((one.double() - other).detach().norm() / other.detach().norm()) < 8e-3
    assert all(torch.equal(one, again) for one, again in zip(found, ours(), strict=True))
