"""What remains of a step that produced NaN or infinity: the offending batch, last metrics, where it began.

Sampling stops the run too: from logits that are not finite a token is drawn all the same, and means nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from qerl_bench.checks import TrainingStopped
from qerl_bench.records import Rollout
from qerl_bench.rundir import RunDir, write_atomically
from qerl_bench.train.batch import make_batch

if TYPE_CHECKING:
    from qerl_bench.model.policy import Policy


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """A loss or a gradient that is not a number, and the first tensor on the way to it that is not."""

    what: str  # "loss" | "gradient"
    tensor: str
    tensors: dict[str, torch.Tensor]  # the micro-batch of a loss, the whole batch of a gradient


def first_in_forward(model: torch.nn.Module, forward: Callable[[], object]) -> str:
    """The first non-finite tensor: a parameter or buffer if there is one, or else an output in order of computation."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and tensor.dtype.itemsize > 1 and not bool(tensor.isfinite().all()):
            return f"weight {name}"
    found: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, inputs: object, output: object) -> None:
            value = output[0] if isinstance(output, tuple) else output
            if not found and isinstance(value, torch.Tensor) and not bool(value.isfinite().all()):
                found.append(f"output of {name or 'the model'}")

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules()]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else "what is made of the logits: weights and activations are finite"


def first_in_backward(model: torch.nn.Module) -> str:
    """The first non-finite gradient of a parameter in order of the backward pass, which runs from the last layer."""
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            return f"gradient of {name}"
    return "the norm of all gradients together, which overflows"


def require_finite_logits(policy: Policy, rollouts: Sequence[Rollout]) -> None:
    """Raise TrainingStopped if the policy's logits were not finite where `rollouts` were sampled.

    Log-probabilities and entropies hold whatever the logits do, so one sum a completion tells.
    """
    bad = [rollout for rollout in rollouts if not math.isfinite(sum(rollout.logprobs) + sum(rollout.entropies))]
    if not bad:
        return
    first = bad[0]
    batch = make_batch([first.prompt_ids], [first.token_ids], policy.pad_id, policy.device)
    where = first_in_forward(policy.model, lambda: policy.token_stats(batch.input_ids, batch.mask, 1.0))
    raise TrainingStopped(
        f"{len(bad)} of {len(rollouts)} completions were sampled from logits that are not finite, and mean nothing. "
        f"First, on the prompt {first.prompt.id}: {where}. If that is a weight, use another checkpoint: delete the "
        "run's last one to continue from the one before, or choose another model. If it is an output, it overflowed: "
        "use a model.dtype of wider range, less noise (aqn) or a smaller optim.lr"
    )


@contextmanager
def during(where: str) -> Iterator[None]:
    """Say where it was that a run inside this context was stopped."""
    try:
        yield
    except TrainingStopped as error:
        raise TrainingStopped(f"{where}: {error}") from None


def dump(run: RunDir, step: int, case: NonFinite) -> str:
    """Write nonfinite/step_<step>/ into the run directory and return a sentence that says what was found where."""
    folder = run.path / "nonfinite" / f"step_{step:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in case.tensors.items()}
    save_file(tensors, folder / "batch.safetensors")
    last: list[dict[str, Any]] = run.metrics()[-1:]
    report = {"step": step, "what": case.what, "first": case.tensor, "last_metrics": last[0] if last else None}
    write_atomically(folder / "report.json", json.dumps(report, indent=1))
    return f"step {step}: the {case.what} is not finite. First: {case.tensor}. Batch and last metrics: {folder}"
