"""Every seed is a hash of its purpose, so no draw depends on the order of calls or on the process."""

from __future__ import annotations

import hashlib

BITS = 63  # of a seed


def derive(*parts: int | str) -> int:
    """A 63-bit seed from `parts`, e.g. derive(run_seed, "rollout", step)."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - BITS)
