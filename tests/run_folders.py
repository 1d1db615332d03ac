"""Folders of runs with made-up numbers, as who reads runs finds them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import OmegaConf

SHORT: dict[str, Any] = {  # what every reader asks of a config, but for the name
    "steps": 3,
    "seed": 0,
    "quant": {"name": "nvfp4"},
    "quantizer": {"name": "rtn"},
    "aqn": {"name": "exp"},
    "algo": {"name": "grpo"},
    "lora": {"name": "default", "rank": 32},
    "model": {"name": "tiny"},
    "task": {"name": "arithmetic"},
}
DONE = {"wall_s": 1.0, "final": {}, "peak_memory_gib": 0.5}


def write_run(
    folder: Path,
    config: Mapping[str, Any] | str,
    lines: Iterable[Mapping[str, Any]],
    done: Mapping[str, Any] | None = None,
    environment: Mapping[str, Any] | None = None,
    answers: pd.DataFrame | None = None,
) -> Path:
    """Make `folder` with a config (or its YAML), metrics and, unless they are None, the end, env.json and answers.

    A config without a name has that of the folder.
    """
    folder.mkdir(parents=True)
    text = config if isinstance(config, str) else OmegaConf.to_yaml(OmegaConf.create({"name": folder.name, **config}))
    (folder / "config.yaml").write_text(text)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, content in (("done.json", done), ("env.json", environment)):
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    if answers is not None:
        answers.to_parquet(folder / "samples.parquet")
    return folder
