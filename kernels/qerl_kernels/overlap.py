"""Programmatic dependent launch (PDL): a kernel starts while the one before it on its stream still runs.

Between two kernels of a decoding step the GPU would otherwise be idle for as long as many of them take. The rule: every
program of a kernel that is launched so lets the next kernel start at once, and then waits, before it reads or writes
memory that another kernel writes or reads. The wait ends when the kernel before has ended and its stores are visible.
That kernel has waited too, so then all earlier ones have ended: completion is transitive, and memory that is used again
(workspaces, counters, freed tensors) is safe, since nobody writes before all earlier readers have ended. A kernel of
which some program leaves without waiting, an idle row's say, would break the chain for all that follow.

A kernel that waits first, and only then lets the next one start, tells it that all before itself have ended. So the
next one may read at once what those wrote. It must wait before it reads what this one writes, and before it writes
anything. `project` does so for the decode GEMM, which then multiplies while x A^T is computed.

What no kernel of the step writes, such as packed weights, may be read before the wait. Kernels that know nothing of
this, such as PyTorch's, start when everything before has ended, and the next one starts when they have.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def overlapping(device: torch.device) -> dict[str, Any]:
    """Options of a launch for a kernel that begins with `jit_overlap.wait_for_earlier`: PDL where the GPU has it."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    return {"PDL": True, "launch_pdl": True} if able else {"PDL": False}
