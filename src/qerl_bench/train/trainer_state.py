"""What training keeps from step to step beside the policy: as an object, and in a checkpoint.

A checkpoint has the optimizer, random numbers, noise, lag, shortages of memory and the clock.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from qerl_bench.model.cut_tensors import cut_like, is_cut, whole
from qerl_bench.model.policy import Policy
from qerl_bench.train.lag import Lag
from qerl_bench.train.recorded_passes import RecordedPasses
from qerl_bench.train.reduced_sizes import Shortages, Size
from qerl_bench.train.spec import Specs
from qerl_core.checks import ConfigError, require
from qerl_core.process.out_of_memory import Releasable
from qerl_core.rundir.checkpoints import go_back, last_checkpoint
from qerl_core.rundir.run_dir import RunDir


@dataclass
class TrainerState:
    """What a run keeps for updates and engines; a checkpoint has its shortages, and memory.json its size."""

    shortages: Shortages = field(default_factory=Shortages)
    size: Size | None = None  # of micro-batches, as planned; None until it is measured
    passes: RecordedPasses | None = None  # None if passes have no fixed shapes
    engines: list[SharesMemory] = field(default_factory=list)  # that are open

    @contextmanager
    def joined_by(self, engine: object) -> Iterator[None]:
        """In this block `engine`, if it is a `SharesMemory`, and training release memory for each other."""
        if not isinstance(engine, SharesMemory):
            yield
            return
        engine.join(self)
        self.engines.append(engine)
        try:
            yield
        finally:
            self.engines.remove(engine)


@runtime_checkable
class SharesMemory(Releasable, Protocol):
    """An engine that samples in the memory of training."""

    def join(self, state: TrainerState) -> None:
        """Sample from now on within the limits of `state`, and release its passes if memory runs out."""


def is_saved(specs: Specs, step: int) -> bool:
    return step % specs.save_every == 0 or step == specs.steps


def checkpoints_to_come(specs: Specs, step: int) -> int:
    """How many are written after `step` before any of them is dropped."""
    count = sum(is_saved(specs, later) for later in range(step + 1, specs.steps + 1))
    return count if specs.checkpoints.keep is None else min(count, 1)


class Trained(NamedTuple):
    """What is trained, whole on the host where it was cut among ranks, and as it is otherwise."""

    weights: dict[str, torch.Tensor] | None  # of the whole model if it is trained; None if it is the policy's own
    optimizer: dict[str, Any]
    lag: list[Any]


def gather_trained(policy: Policy, optimizer: torch.optim.Optimizer, lag: Lag, kept: bool) -> Trained:
    """What a checkpoint holds of trained tensors. All ranks call this together; not `kept` gives empty tensors."""
    weights = policy.model.state_dict() if any(map(is_cut, policy.trainable)) else None
    return Trained(whole(weights, kept), whole(optimizer.state_dict(), kept), whole(lag.state(), kept))


def save_checkpoint(
    folder: Path,
    specs: Specs,
    policy: Policy,
    trained: Trained,
    lag: Lag,
    state: TrainerState,
    run: RunDir,
    step: int,
) -> None:
    """Fill `folder` with everything that the next step depends on; it does not tell how many ranks there were."""
    policy.save(folder, trained.weights)
    kept = {"optimizer": trained.optimizer, "torch_rng": torch.get_rng_state(), "noise": policy.noise.state()}
    kept["shortages"] = state.shortages.state()
    if lag.steps:
        kept["lag"] = trained.lag
    torch.save(kept, folder / "trainer.pt")
    position = {
        "step": step,
        "prompts_seen": step * specs.rollout.prompts_per_step,
        "sigma": policy.noise.controller.sigma(step),
        "lr": specs.optim.lr_at(step, specs.steps),
        "started": run.begun,
        "wall_s": run.wall_s,
        "energy_j": run.energy_j,
    }
    (folder / "state.json").write_text(json.dumps(position, indent=1))


def load_checkpoint(
    run_dir: Path,
    run: RunDir,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    lag: Lag | None = None,
    state: TrainerState | None = None,
) -> None:
    """Restore from the last checkpoint in `run_dir` all that the next step depends on, and the clock."""
    folder = last_checkpoint(run_dir)
    require(folder is not None, f"only process 0 sees the checkpoint in {run_dir}: choose a root=DIR that all can read")
    assert folder is not None
    policy.load(folder)
    try:
        kept: dict[str, Any] = torch.load(folder / "trainer.pt", map_location=policy.device, weights_only=True)
    except UnpicklingError as error:  # more than tensors and numbers, which nothing here has written
        raise ConfigError(f"checkpoint {folder} is damaged: trainer.pt is no checkpoint. {go_back(folder)}") from error
    trained, moments = policy.trainable, kept["optimizer"]["state"]
    for number, of_one in moments.items():
        moments[number] = {name: cut_like(value, trained[number]) for name, value in of_one.items()}
    for there, here in zip(kept["optimizer"]["param_groups"], optimizer.param_groups, strict=True):
        there |= {"foreach": here["foreach"]} if "foreach" in here else {}  # of one kind of tensors, or not
    optimizer.load_state_dict(kept["optimizer"])
    torch.set_rng_state(kept["torch_rng"].cpu())
    policy.noise.restore(kept["noise"])
    if state is not None:
        state.shortages.restore(kept.get("shortages"))  # which earlier versions did not write
    if lag is not None:
        past = kept.get("lag", [])
        lag.restore([[cut_like(*pair) for pair in zip(numbers, trained, strict=True)] for numbers in past])
    position = json.loads((folder / "state.json").read_text())
    run.spent_s, run.spent_j = position["wall_s"], position.get("energy_j")
    run.begun = position.get("started")
