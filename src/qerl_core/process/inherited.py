"""What the environment says of how this process was started, which is wrong for the processes that it starts."""

from __future__ import annotations

from collections.abc import Mapping

PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
OF_LAUNCHERS = (
    *(*PLACE, "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "NODE_RANK"),
)
PREFIXES = ("TORCHELASTIC_", "PET_")  # what torchrun sets, and what it takes its own options from


def is_of_launcher(name: str) -> bool:
    """Whether a variable says which place a process has among others, as torchrun and its like set it."""
    return name in OF_LAUNCHERS or name.startswith(PREFIXES)


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that is started on its own, by a rank or in a job that once was one."""
    return {name: value for name, value in environment.items() if not is_of_launcher(name)}
