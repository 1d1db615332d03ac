"""One way to derive every seed: a hash of what it is for. Nothing depends on call order or process."""

from __future__ import annotations

import hashlib


def derive(*parts: int | str) -> int:
    """A 63-bit seed from `parts`, e.g. derive(run_seed, "rollout", step, prompt_id, sample)."""
    digest = hashlib.blake2b("/".join(str(part) for part in parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
