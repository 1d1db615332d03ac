"""Releases of Triton that are refused on a card: they compile kernels like ours wrongly for it, or not at all.

Faults of capability 10 were found by others, on such cards; that of 11 by compiling our kernels. Capability 10 and 11
multiply 64 rows and more in a tensor memory, which two of our kernels do: experts, and attention over a shared prompt.
Left out: two products into one accumulator, wrong up to 3.7.1 (https://github.com/triton-lang/triton/issues/10821),
which no kernel here has.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    major: int  # of the compute capability
    over: tuple[int, int, int]  # the first release that is not known to have it
    what: str
    found: str


FAULTS = (
    Fault(10, (3, 7, 1), "sums differ between calls", "https://github.com/triton-lang/triton/issues/10590"),
    Fault(10, (3, 7, 1), "masked copies read outside of a tensor", "https://github.com/pytorch/pytorch/issues/187081"),
    Fault(11, (3, 7, 0), "its assembler does not know sm_110a", "tests/kernels/test_compile.py"),
)


def refusal(capability: tuple[int, int], release: str) -> str | None:
    """Why Triton `release`, such as "3.7.0+git1234", must not compile for a card of this capability; None: it may."""
    have = tuple(map(int, re.findall(r"\d+", release)[:3]))
    known = [fault for fault in FAULTS if fault.major == capability[0] and have < fault.over]
    if not known:
        return None
    first = ".".join(map(str, max(fault.over for fault in known)))
    faults = ", ".join(f"{fault.what} ({fault.found})" for fault in known)
    card = "{}.{}".format(*capability)
    return f"Triton {release} on compute capability {card}: {faults}; install Triton {first} or later"
