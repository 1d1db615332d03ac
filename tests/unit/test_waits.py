"""Training waits for the GPU once an update, not several times a micro-batch.

On a CPU nothing waits, so this counts the calls that would: reading a number, moving to the host, and indexing by a
mask, whose result has a size that only the device knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from qerl_bench.model import lm_head
from qerl_bench.train import update as module
from qerl_bench.train.batch import make_batch

READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero", "masked_select")
OPERATORS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique")


class Reads(TorchFunctionMode):
    """Counts the calls of methods that read a tensor, while `on`."""

    def __init__(self) -> None:
        super().__init__()
        self.on, self.seen = False, []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if self.on and name in READS:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Counts the operators below autograd whose result the host has to know, while `reads` is on."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self.reads, self.seen = reads, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in args[1]
        )
        if self.reads.on and (name in OPERATORS or by_mask):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("algo", "words"),
    [
        ("sft", ()),
        ("grpo", ("aqn=constant", "aqn.level=0.1", "train.mismatch_share=1")),
        ("dapo", ("kl.coef=0.1", "importance_sampling.mode=truncate", "train.recompute=selective")),
        ("gspo", ("train.updates_per_batch=3", "train.entropy_coef=0.1", "train.recompute=full")),
    ],
)
def test_an_update_waits_once_however_many_micro_batches_it_has(
    make_policy: Callable[..., Any],
    make_experiment: Callable[..., Any],
    stand_in: Callable[..., None],
    algo: str,
    words: tuple[str, ...],
) -> None:
    words = (f"algo={algo}", *words, "train.micro_batch_tokens=21")
    experiment, policy = make_experiment("quant=nvfp4", *words), make_policy(*words, adapted=True)
    rows = [[1, 2, 3]] * 5, [[4] * length for length in (4, 12, 1, 9, 6)]
    logprobs = [[-5.0] * len(row) for row in rows[1]]
    batch = make_batch(*rows, policy.pad_id, policy.device, logprobs, torch.tensor([1.0, -1.0, 0.0, 2.0, 0.5]))
    if "aqn=constant" in words:
        with policy.noise.for_rollout(1, 0):
            pass
    optimizer: Any = torch.optim.SGD(policy.trainable, lr=1e-3)  # AdamW reads its counters, which are on the host
    reads = Reads()
    split = module.split

    def parts(*given: Any) -> Any:
        made = split(*given)  # from the batch, which is on the host
        reads.on = True
        return made

    # What follows is on the host.
    stand_in(module.StepAccumulator, include=lambda *_: setattr(reads, "on", False), metrics=lambda *_: {})
    stand_in(module.compute, taught_frac=lambda *_: 1.0)
    stand_in(lm_head, require_logprobs=lambda _: None)  # not called on a GPU
    to_host = module.to_host

    def watched(*given: Any) -> Any:
        reads.seen.append("to_host")
        reads.on = False
        found = to_host(*given)
        reads.on = True
        return found

    stand_in(module, split=parts, require_logprobs=lambda _: None, to_host=watched)  # it reads what has been fetched
    no_run: Any = None
    with reads, Operators(reads) as operators:
        found = module.update(experiment, policy, optimizer, batch, no_run, 1)
    assert found["train/micro_batches"] > 2
    assert reads.seen == ["to_host"] * experiment.train.updates_per_batch
    assert operators.seen == []


def test_the_watch_sees_what_waits() -> None:
    reads, values = Reads(), torch.arange(3.0)
    reads.on = True
    with reads, Operators(reads) as operators:
        assert values.sum().item() == 3 and bool((values > 0).any()) and len(values[values > 0]) == 2
    assert reads.seen == ["item", "__bool__"] and operators.seen.count("_local_scalar_dense") == 2
    assert "index" in operators.seen
