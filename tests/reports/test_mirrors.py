"""Mirrors at W&B and Trackio, in their own stores on this machine: a run that is run again, and names in folders."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_wandb import labels, mirrored

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import json, shutil, sys
from pathlib import Path

from qerl_bench.logger.{module} import {name}

spec = {name}(**json.loads(sys.argv[1]))


def run(name, values, records=(), fail=False):
    folder = Path("runs", *name.split("/"))
    folder.mkdir(parents=True, exist_ok=True)
    config = {{"name": name, "seed": 0, "quant": {{"name": "nvfp4"}}}}
    mirror = spec.mirror(folder, [dict(kind="train", step=s, time=0.0, loss=v) for s, v in records], config)
    for step, value in values:
        mirror.log("train", step, {{"loss": value}})
    mirror.__exit__(RuntimeError if fail else None, None, None)


def again(name):
    shutil.move(Path("runs", *name.split("/")), f"deleted-{{name.replace('/', '-')}}")  # its files are read below


"""
# --- a deleted run, run again, shows the old numbers: https://github.com/wandb/wandb/issues/6216, --------------------
# https://github.com/wandb/wandb/issues/1192 and https://github.com/mozilla/translations/issues/875

OLD, NEW = [(1, 1.0), (2, 2.0), (3, 3.0)], [(1, 10.0), (2, 20.0), (3, 30.0), (4, 40.0)]
RUNS = f"""
run("lr1/base", {OLD})
again("lr1/base")
run("lr1/base", {NEW[:2]}, fail=True)
run("lr1/base", {NEW[2:]}, records={NEW[:2]})
run("lr2/base", {OLD})
run("lr1-base", {OLD})
"""


def programmed(folder: Path, module: str, name: str, spec: dict[str, Any], more: str = "") -> str:
    """What a process of its own says that makes RUNS in `folder`, and then does `more`."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB_", "TRACKIO_"))}
    environment |= {"TRACKIO_DIR": str(folder / "trackio"), "HF_HUB_OFFLINE": "1", "WANDB_SILENT": "true"}
    paths = [str(ROOT / "src"), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    program = PROGRAM.format(module=module, name=name) + RUNS + more
    words = [sys.executable, "-c", program, json.dumps(spec)]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "is off" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_run_that_was_deleted_begins_anew_at_wandb(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    spec = {"name": "wandb", "project": "p", "entity": None, "mode": "offline", "names": None}
    programmed(tmp_path, "wandb", "WandB", spec)
    found: dict[str, list[tuple[str, list[tuple[int, float]]]]] = {}
    for file in tmp_path.rglob("*.wandb"):
        id, name, _, _ = labels(file)
        steps = [(step, row["loss"]) for step, row in mirrored(file)[0].items()]
        found.setdefault(id, []).append((name, steps))
    runs = {id: {name for name, _ in parts} for id, parts in found.items()}
    assert sorted(runs.values(), key=str) == sorted([{"lr1/base"}, {"lr1/base"}, {"lr2/base"}, {"lr1-base"}], key=str)
    assert all(len(id) <= 128 and not {*id} & {*"/\\#?%:"} for id in runs)
    of_lr1 = {max(parts, key=lambda part: len(part[1]))[1][-1]: parts for parts in found.values()}
    assert [steps for _, steps in of_lr1[4, 40.0]].count(NEW) == 1 and len(of_lr1[4, 40.0]) == 2  # killed, continued
    last = json.loads((tmp_path / "runs" / "lr1" / "base" / "mirror.json").read_text())["wandb"]
    assert found[last] == of_lr1[4, 40.0]


@pytest.mark.slow
def test_a_run_that_was_deleted_begins_anew_at_trackio(tmp_path: Path) -> None:
    if importlib.util.find_spec("trackio") is None:
        pytest.skip("extra trackio is not installed")
    more = """
from trackio.sqlite_storage import SQLiteStorage as store
shown = {name: store.get_logs("p", run=name) for name in ("lr1/base", "lr2/base", "lr1-base")}
every = [store.get_logs("p", run_id=record["id"]) for record in store.get_run_records("p")]
print("FOUND" + json.dumps([shown, every]))
"""
    said = programmed(tmp_path, "trackio", "Trackio", {"name": "trackio", "project": "p", "names": None}, more)
    shown, every = json.loads(next(line for line in said.splitlines() if line.startswith("FOUND"))[5:])
    values = {name: [(row["step"], row["loss"]) for row in rows] for name, rows in shown.items()}
    assert values == {name: [*map(tuple, rows)] for name, rows in
                      {"lr1/base": NEW, "lr2/base": OLD, "lr1-base": OLD}.items()}  # fmt: skip
    assert sorted(len(rows) for rows in every) == [3, 3, 3, 4]  # the first record of lr1/base is still there


def test_the_id_of_a_record_is_kept_as_long_as_there_is_something_to_continue(tmp_path: Path) -> None:
    from qerl_bench.logger.base import keep_id, kept_id

    records = [{"kind": "train", "step": 1}]
    assert kept_id(tmp_path, "wandb", records) is None
    keep_id(tmp_path, "wandb", "one")
    keep_id(tmp_path, "trackio", "other")
    assert [kept_id(tmp_path, name, records) for name in ("wandb", "trackio")] == ["one", "other"]
    assert kept_id(tmp_path, "wandb", []) is None  # nothing was kept of the attempt before
    assert [path.name for path in tmp_path.iterdir()] == ["mirror.json"]
