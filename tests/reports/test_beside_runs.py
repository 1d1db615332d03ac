"""What other programs leave beside runs, and half of a run: left out of what is read, by name, and never counted.

https://github.com/wandb/wandb/issues/1370, https://github.com/iterative/dvc/issues/1871 and
https://github.com/mlflow/mlflow/issues/2797
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qerl_core.checks import ConfigError
from qerl_core.process.arguments import whole
from qerl_core.sweeps.status import statuses
from qerl_studies.commands import claims, collect, compare
from qerl_studies.runs.comparable import load_runs

ASSETS = Path(__file__).parents[1] / "assets" / "runs"
FIRST, SECOND = sorted(path.name for path in ASSETS.iterdir())[:2]
