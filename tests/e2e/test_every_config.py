"""Every file of conf/experiment and conf/recipe trains. A file that is added is run too.

What replaces the hub, GPUs and hours is in tests/startable.py, which says why. Of a study with a grid the last point is
run, which has quantization and noise where any has, and its first seed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from qerl_bench.commands.run import run_experiment
from qerl_bench.sweep.check import check
from qerl_core.process.installation import CONF_DIR
from tests.conftest import compose
from tests.short_runs import without_figures
from tests.startable import CHANGES, RANDOM, TINY, startable

FILES = [path for axis in ("experiment", "recipe") for path in sorted((CONF_DIR / axis).rglob("*.yaml"))]


def parts(file: Path) -> tuple[str, ...]:
    return file.relative_to(CONF_DIR).with_suffix("").parts


def word_of(file: Path) -> str:
    axis, *names = parts(file)
    return f"{axis}={'/'.join(names)}"


def grid(file: Path) -> dict[str, Any]:
    """What a study sweeps over, with what those that it begins with sweep over."""
    content = yaml.safe_load(file.read_text())
    first = [CONF_DIR / f"{name[1:]}.yaml" for name in content.get("defaults", []) if isinstance(name, str)]
    shared = {key: values for one in first for key, values in grid(one).items()}
    return shared | content.get("hydra", {}).get("sweeper", {}).get("params", {})


def last_point(file: Path) -> list[str]:
    swept = {key: str(values).split(",")[-1] for key, values in grid(file).items() if not key.endswith("seed")}
    return [word_of(file), *map("=".join, swept.items())]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where all runs lie, which share preflights and evaluations of equal bases."""
    with without_figures():
        yield tmp_path_factory.mktemp("root")


@pytest.mark.parametrize("file", FILES, ids=word_of)
def test_it_trains(file: Path, root: Path) -> None:
    cfg = compose(startable([*last_point(file), f"root={root}", f"name={'-'.join(parts(file))}"], root))
    run_experiment(check(cfg), cfg)
    folder = root / "runs" / cfg.name
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [record for record in records if record["kind"] == "train"]
    assert [record["step"] for record in trained] == [*range(1, cfg.steps + 1)]
    assert all(record["grad_norm"] > 0 and math.isfinite(record["loss"]) for record in trained)
    assert (trained[-1].get("aqn/sigma", 0) > 0) == (cfg.aqn.name != "none")
    assert [record["step"] for record in records if record["kind"] == "eval"] == (
        [] if cfg.eval.name == "none" else [0, cfg.steps]
    )


def test_files_of_both_folders_are_found_and_no_change_is_idle() -> None:
    assert {word_of(file).partition("=")[0] for file in FILES} == {"experiment", "recipe"}
    configs = [compose([*last_point(file), TINY, RANDOM]) for file in FILES]
    assert [change.why for change in CHANGES if not any(map(change.where, configs))] == []
