"""What the environment says of how this process was started, which is wrong for the processes that it starts."""

from __future__ import annotations

import locale
from collections.abc import Mapping

from qerl_core.checks import require

PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
OF_LAUNCHERS = (
    *(*PLACE, "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "NODE_RANK"),
    *("WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH", "WANDB_RUN_ID", "WANDB_RESUME"),  # of the run that an agent starts
    "WANDB_SERVICE",  # what wandb 0.31 leaves behind a run: a socket that goes with its process, and is on its machine
)
PREFIXES = ("TORCHELASTIC_", "PET_")  # what torchrun sets, and what it takes its own options from


def is_of_launcher(name: str) -> bool:
    """Whether a variable says which place a process has among others, as torchrun and W&B set it."""
    return name in OF_LAUNCHERS or name.startswith(PREFIXES)


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that is started on its own, by a rank or in a job that once was one."""
    return {name: value for name, value in environment.items() if not is_of_launcher(name)}


def refuse_other_encoding() -> None:
    """Raise ConfigError unless texts are UTF-8, which the files of runs and data are."""
    found = locale.getpreferredencoding(False)
    require(
        found.lower().replace("-", "") == "utf8",
        f"this shell's texts are in {found}, and those of runs in UTF-8: put PYTHONUTF8=1 before the command",
    )
