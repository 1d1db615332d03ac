"""Scripts that are in no package, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]


def script(place: str) -> ModuleType:
    """A Python file of the checkout, such as studies/dag-2026/rungs.py. It may import files beside it, as when run."""
    name = place.removesuffix(".py").replace("/", "_").replace("-", "_")
    spec = importlib.util.spec_from_file_location(name, ROOT / place)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # where dataclasses look for their module
    sys.path.insert(0, str((ROOT / place).parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module
