"""Where the kernels run: on the GPU if there is one, and always as Python under Triton's interpreter, in FP32."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import qerl_kernels


def _forget_kernels() -> None:
    """Triton decides when a kernel is defined whether to interpret it."""
    for name in [name for name in sys.modules if name.startswith("qerl_kernels.jit_")]:
        del sys.modules[name]
        delattr(qerl_kernels, name.rpartition(".")[2])


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton kernels run as Python on CPU tensors. Its bfloat16 arithmetic is wrong (Triton 3.6 to 3.9).

    Triton's own functions, such as its sum, are kernels too, and were defined when it was imported. The interpreter
    puts its own in place of the language's and leaves some there, with which nothing compiles any more. Its products of
    tiles are a library's, whose FP32 sums may depend on a row's place in the tile (an AMD EPYC): here they are in FP64.
    """
    triton = pytest.importorskip("triton")
    from triton.runtime import interpreter as triton_interpreter
    from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle

    create_dot = InterpreterBuilder.create_dot

    def rounded_once(self: object, a: object, b: object, sums: Any, *options: object) -> object:
        wide = TensorHandle(sums.data.astype("float64"), triton.language.float64)
        product = create_dot(self, a, b, wide, *options)
        return TensorHandle(product.data.astype(sums.data.dtype), sums.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", rounded_once)

    modules = [module for name, module in sys.modules.items() if name.startswith("triton.language")]
    classes = [value for value in vars(triton.language.core).values() if isinstance(value, type)]
    own = [value for value in classes if value.__module__.startswith("triton.")]
    before = [(owner, dict(vars(owner))) for owner in (*modules, *own)]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, triton.JITFunction):
                setattr(module, name, InterpretedFunction(value.fn))
    _forget_kernels()
    # Once, and not at each launch and each call of a function in it, which takes a third of the time.
    both = SimpleNamespace(__globals__={"tl": triton.language, "core": triton.language.core})
    scope = type(triton_interpreter._patch_lang(both))
    monkeypatch.setattr(triton_interpreter, "_patch_lang", lambda function: scope())
    yield
    _forget_kernels()
    for owner, attributes in before:
        for name, value in list(vars(owner).items()):
            if name not in attributes and isinstance(owner, type):  # a class had it of another one, such as __bool__
                delattr(owner, name)
            elif name in attributes and value is not attributes[name]:
                setattr(owner, name, attributes[name])


@pytest.fixture
def whole_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Integers that overflow are not looked for: that takes a third of the time, and each kernel's own tests do it."""
    runtime = pytest.importorskip("triton.runtime.interpreter")
    builder = runtime.interpreter_builder
    monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """ "cpu" under the interpreter, and "cuda"."""
    import torch

    if request.param == "cpu":
        request.getfixturevalue("interpreter")
    elif not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return request.param
