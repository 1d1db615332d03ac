"""NaN and infinity in a loss, a gradient or the logits: find the first bad tensor and dump the batch.

Logits are checked after sampling as well, because a token can be drawn from NaN and means nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from safetensors.torch import save_file

from qerl_bench.model.block import without_fused_blocks
from qerl_bench.model.cut_tensors import own_part
from qerl_bench.model.policy import Policy
from qerl_bench.train.batch import make_batch
from qerl_core.checks import TrainingStopped
from qerl_core.records import Rollout
from qerl_core.rundir.durable import write_atomically
from qerl_core.rundir.run_dir import RunDir


class NonFiniteError(Exception):
    """A loss or gradient is NaN or infinite.

    `quantity` is "loss" or "gradient", `first` the first bad tensor on the way to it, and `tensors` are those to dump:
    of the micro-batch for a loss, of the whole batch for a gradient.
    """

    def __init__(self, quantity: str, first: str, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(f"the {quantity} is not finite. First: {first}")
        self.quantity, self.first, self.tensors = quantity, first, tensors

    def __reduce__(self) -> tuple[Any, ...]:  # to be sent to other ranks
        return type(self), (self.quantity, self.first, {name: tensor.detach() for name, tensor in self.tensors.items()})


def first_in_forward(model: torch.nn.Module, forward: Callable[[], object]) -> str:
    """The first non-finite parameter or buffer; if all are finite, the first non-finite output during `forward`."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and tensor.dtype.itemsize > 1 and not bool(own_part(tensor).isfinite().all()):
            return f"weight {name}"
    outputs: list[str] = []

    def hook_of(name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, inputs: object, output: object) -> None:
            value = output[0] if isinstance(output, tuple) else output
            if not outputs and isinstance(value, torch.Tensor) and not bool(value.isfinite().all()):
                outputs.append(f"output of {name or 'the model'}")

        return hook

    handles = [module.register_forward_hook(hook_of(name)) for name, module in model.named_modules()]
    try:
        with torch.no_grad(), without_fused_blocks(model):
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return outputs[0] if outputs else "computed from the logits: weights and activations are finite"


def first_in_backward(model: torch.nn.Module) -> str:
    """The first parameter, from the last layer back, whose gradient is not finite."""
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.grad is not None and not bool(own_part(parameter.grad).isfinite().all()):
            return f"gradient of {name}"
    return "the norm of all gradients together, which overflowed"


def require_finite_logits(policy: Policy, rollouts: Sequence[Rollout]) -> None:
    """Raise TrainingStopped if `rollouts` were sampled from logits that are not finite.

    NaN and infinity in the logits spread to log-probabilities and entropies, so one sum per completion shows them.
    """
    bad = [rollout for rollout in rollouts if not math.isfinite(sum(rollout.logprobs) + sum(rollout.entropies))]
    if not bad:
        return
    first = bad[0]
    batch = make_batch([first.prompt_ids], [first.token_ids], policy.pad_id, policy.device)
    where = first_in_forward(policy.model, lambda: policy.token_stats(batch.input_ids, batch.mask, 1.0))
    raise TrainingStopped(
        f"{len(bad)} of {len(rollouts)} completions were sampled from logits that are not finite. First, on the prompt "
        f"{first.prompt.id}: {where}. If that is a weight, use another checkpoint: delete the run's last one to "
        "continue from the one before, or choose another model. If it is an output, it overflowed: use a model.dtype "
        "of wider range, less noise (aqn) or a smaller optim.lr"
    )


@contextmanager
def blaming(where: str) -> Iterator[None]:
    """Put `where` in front of the message of a TrainingStopped raised inside this context."""
    try:
        yield
    except TrainingStopped as error:
        raise TrainingStopped(f"{where}: {error}") from None


def dump(run: RunDir, step: int, error: NonFiniteError) -> str:
    """Write the tensors and a report to nonfinite/step_<step>/ of the run; returns a message that names the folder."""
    folder = run.path / "nonfinite" / f"step_{step:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in error.tensors.items()}
    save_file(tensors, folder / "batch.safetensors")
    last_metrics = next(reversed(run.metrics()), None)
    report = {"step": step, "what": error.quantity, "first": error.first, "last_metrics": last_metrics}
    write_atomically(folder / "report.json", json.dumps(report, indent=1))
    return f"step {step}: {error}. Batch and last metrics: {folder}"
