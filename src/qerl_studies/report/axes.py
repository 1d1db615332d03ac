"""The options of a run by which a study's page groups and filters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from qerl_studies.runs.load import noise_of

# Axes by which everything on the page is filtered, and the config key of each.
AXES = {
    "model": "model.name",
    "task": "task.name",
    "format": "quant.name",
    "noise": "aqn.name",
    "algorithm": "algo.name",
    "rank": "lora.rank",
}


def axis_of(items: Mapping[str, Any], key: str) -> Any:
    if key == "aqn.name":
        return noise_of(items)
    return 0 if key == "lora.rank" and items.get("lora.name") == "none" else items.get(key)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
