"""What a model is called in runs and tables, from its id."""

from __future__ import annotations

import re
from pathlib import Path

_CACHED = re.compile(r"models--(?:[^/]+--)?([^/]+)/snapshots/[0-9a-f]+/?$")  # a folder in the cache of huggingface_hub


def short_name(id: str | None) -> str:
    """What the model `id` is called in runs and tables: the last part of a hub id or path, in lower case, no .gguf."""
    return re.sub(r"[^a-z0-9._-]+", "-", last_part(str(id)).lower().removesuffix(".gguf"))


def last_part(id: str) -> str:
    """The last part of a hub id or path; the repository's name for a folder in the cache of huggingface_hub."""
    cached = _CACHED.search(id)
    return cached[1] if cached else Path(id).resolve().name
