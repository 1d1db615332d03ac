"""What a checkpoint keeps of training beside the policy: optimizer, random numbers, noise, lag and the clock."""

from __future__ import annotations

import json
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from qerl_bench.model.policy import Policy
from qerl_bench.train.lag import Lag
from qerl_bench.train.reduced_sizes import shortages_of
from qerl_bench.train.spec import Specs
from qerl_core.checks import ConfigError, require
from qerl_core.rundir.checkpoints import go_back, last_checkpoint
from qerl_core.rundir.run_dir import RunDir


def is_saved(specs: Specs, step: int) -> bool:
    return step % specs.save_every == 0 or step == specs.steps


def checkpoints_to_come(specs: Specs, step: int) -> int:
    """How many are written after `step` before any of them is dropped."""
    count = sum(is_saved(specs, later) for later in range(step + 1, specs.steps + 1))
    return count if specs.checkpoints.keep is None else min(count, 1)


def save_checkpoint(
    folder: Path,
    specs: Specs,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    lag: Lag,
    run: RunDir,
    step: int,
) -> None:
    """Fill `folder` with everything that the next step depends on."""
    policy.save(folder)
    state = {"optimizer": optimizer.state_dict(), "torch_rng": torch.get_rng_state(), "noise": policy.noise.state()}
    state["shortages"] = shortages_of(policy).state()
    if lag.steps:
        state["lag"] = lag.state()
    torch.save(state, folder / "trainer.pt")
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
    run_dir: Path, run: RunDir, policy: Policy, optimizer: torch.optim.Optimizer, lag: Lag | None = None
) -> None:
    """Restore from the last checkpoint in `run_dir` all that the next step depends on, and the clock."""
    folder = last_checkpoint(run_dir)
    require(folder is not None, f"only process 0 sees the checkpoint in {run_dir}: choose a root=DIR that all can read")
    assert folder is not None
    policy.load(folder)
    try:
        state: dict[str, Any] = torch.load(folder / "trainer.pt", map_location=policy.device, weights_only=True)
    except UnpicklingError as error:  # more than tensors and numbers, which nothing here has written
        raise ConfigError(f"checkpoint {folder} is damaged: trainer.pt is no checkpoint. {go_back(folder)}") from error
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["torch_rng"].cpu())
    policy.noise.restore(state["noise"])
    shortages_of(policy).restore(state.get("shortages"))  # which earlier versions did not write
    if lag is not None:
        lag.restore(state.get("lag", []))
    position = json.loads((folder / "state.json").read_text())
    run.spent_s, run.spent_j = position["wall_s"], position.get("energy_j")
    run.begun = position.get("started")
