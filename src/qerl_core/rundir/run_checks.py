"""Whether a run can start, continue or be read in its folder: place, lock, config, and damage."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from qerl_core.checks import MAX_STEPS, ConfigError, RunLocked, require
from qerl_core.options.fingerprint import as_dict, flat, with_effect
from qerl_core.process.arguments import unwritable
from qerl_core.rundir.checkpoints import (
    check_checkpoint,
    checkpoints,
    is_finished,
    last_checkpoint,
    read_manifest,
    step_of,
)
from qerl_core.rundir.checksums import DONE, GROWING, SEALS, Seal, are_seals, broken, find_damage
from qerl_core.rundir.locks import holder
from qerl_core.rundir.read_files import read_config, read_object

log = logging.getLogger(__name__)
ELSEWHERE = "root=DIR or name=NAME; a name that is left out is derived from the config"
MADE_AGAIN = (
    "env.json",
    "preflight.json",
    "prompt.txt",
    "engine.json",
    "layers.parquet",
)  # by each attempt; the old env.json becomes env_<n>.json


class RunDamaged(ConfigError):
    """A run can neither continue nor be taken as finished, because its files are not as it wrote them."""


def check_run_dir(path: Path, cfg: DictConfig | dict[str, Any], elsewhere: str = ELSEWHERE) -> None:
    """Raise ConfigError, with `elsewhere` as the remedy, if the run can neither start nor continue in `path`.

    It is RunDamaged for an unfinished run that is damaged in anything that it continues from, and for a finished one
    in what `quick` finds.
    """
    if not is_finished(path):
        refuse_unwritable(path, elsewhere)
    try:
        refuse_damaged(path, elsewhere)
    except ConfigError as error:
        raise RunDamaged(str(error)) from error
    if (path / "config.yaml").exists():
        refuse_other_config(path, cfg, elsewhere)


def refuse_damaged(path: Path, elsewhere: str = ELSEWHERE) -> None:
    """Raise ConfigError for what is damaged of a finished run, or of what an unfinished one continues from."""
    finished, checkpoint = is_finished(path), last_checkpoint(path)
    if checkpoint is not None or finished:
        check_records(path, f"Or choose another place: {elsewhere}", to_continue=True)
    if checkpoint is not None:
        check_checkpoint(checkpoint, quick=finished)


def refuse_unwritable(path: Path, elsewhere: str = ELSEWHERE) -> None:
    """Raise ConfigError if nothing can be written to the folder `path`, or where it would have to be made."""
    reason = unwritable(path)
    require(reason is None, f"cannot write the run to {path}: {reason}. Choose another place: {elsewhere}")


def refuse_other_config(path: Path, cfg: DictConfig | dict[str, Any], elsewhere: str) -> None:
    """Raise ConfigError if `path` holds a run of a config that gives other numbers."""
    stored, wanted = (flat(with_effect(container)) for container in (read_config(path / "config.yaml"), as_dict(cfg)))
    different = sorted(key for key in stored.keys() | wanted.keys() if stored.get(key) != wanted.get(key))
    shown = ", ".join(f"{key} is {stored.get(key)!r} there and {wanted.get(key)!r} here" for key in different[:4])
    more = f", and {len(different) - 4} more" if len(different) > 4 else ""
    require(
        not different,
        f"{path} holds a run of another config ({shown}{more}). Nothing was changed there. "
        f"Choose another place: {elsewhere}",
    )


def refuse_locked(path: Path, elsewhere: str = ELSEWHERE) -> None:
    """Raise RunLocked if another process is running in the folder of a run."""
    if who := holder(path / ".lock"):
        raise RunLocked(
            f"another process is running in {path} ({who}); wait for it, or choose another place: {elsewhere}"
        )


def check_records(path: Path, otherwise: str, to_continue: bool = False) -> None:
    """Raise ConfigError as `check_seals`, and for a finished run without one train line of each step."""
    if check_seals(path, otherwise, to_continue):
        steps = read_config(path / "config.yaml").get("steps")
        check_steps(path, whole_lines(path / "metrics.jsonl"), steps, otherwise)


def check_seals(path: Path, otherwise: str, to_continue: bool = False) -> bool:
    """Raise ConfigError, with what can be saved, if a file of the run in `path` is not as the run wrote it.

    Files above seals.QUICK_BYTES are compared by length only, unless an unfinished run is `to_continue`; then those
    that are made again are left out. A run from before seals is taken as it is. Returns whether the run is finished and
    vouches for its metrics, so that `check_steps` is due.
    """
    finished = is_finished(path)
    skip = MADE_AGAIN if to_continue and not finished else ()
    for _ in range(2):  # a running process may have replaced a file between its seal and its content
        vouched = vouched_seals(path)
        damage = find_damage(path, vouched, finished=finished, quick=finished or not to_continue, skip=skip)
        if damage is None:
            break
    if damage is not None:
        name, reason = damage
        raise ConfigError(f"{path} is damaged: {reason}. {damage_remedy(path, name, finished)}. {otherwise}")
    if not vouched and not (path / SEALS).exists() and (finished or last_checkpoint(path) is not None):
        log.info("%s is a run from before seals, so damage to its files cannot be seen", path)
    return finished and "metrics.jsonl" in vouched


def check_steps(path: Path, records: Iterable[Mapping[str, Any]], steps: object, otherwise: str) -> None:
    """Raise ConfigError if `records`, the lines of a finished run's metrics, lack one of the `steps` of its config."""
    reason = lacking_steps(path, records, steps)
    require(reason is None, f"{reason}. {otherwise}")


def vouched_seals(path: Path) -> dict[str, Seal]:
    """The seals of growing files that done.json or the last checkpoint keeps; empty without either."""
    checkpoint = last_checkpoint(path)
    if is_finished(path):
        remedy = damage_remedy(path, DONE, True)
        seals = read_object(path / DONE, remedy).get("seals", {})
        require(are_seals(seals), f"{path / DONE} is damaged. {remedy}")
        return seals
    return {} if checkpoint is None else read_manifest(checkpoint)["run"]


def damage_remedy(path: Path, name: str, finished: bool) -> str:
    """What is left of a run in which the file `name` is damaged, and how to go on with it."""
    if name == DONE:
        return "Delete it, and the same command finishes the run again"
    if name in GROWING:
        later: list[str] = []
        for checkpoint in sorted(checkpoints(path), key=step_of, reverse=True):
            expected = read_manifest(checkpoint)["run"].get(name)
            if expected and broken(path / name, expected, quick=False, grows=True) is None:
                return continues_from(checkpoint, later, finished)
            later.append(checkpoint.name)
        return "What is left of it belongs to no checkpoint: delete the folder to run it again"
    if name in MADE_AGAIN and finished:
        return f"Delete {name} and {DONE}, and the same command writes both again"
    return (
        "The numbers in metrics.jsonl are whole. Put back a copy of the damaged file, or delete the folder to run it "
        "again"
    )


def continues_from(checkpoint: Path, later: Sequence[str], finished: bool) -> str:
    """What to delete so that a run continues from `checkpoint`, whose records are whole; `later` ones are named."""
    delete = [*([DONE] if finished else []), *(f"checkpoints/{folder}" for folder in later)]
    asked = f"delete {', '.join(delete)}, and the" if delete else "the"
    return f"It is whole up to step {step_of(checkpoint)}: {asked} same command continues from there"


def lacking_steps(path: Path, records: Iterable[Mapping[str, Any]], steps: object) -> str | None:
    """What is wrong if `records`, the lines of metrics.jsonl, have not one train line of each of the `steps`, or None.

    A run is not whole without them, whatever sealed its file.
    """
    found = Counter(str(record.get("step")) for record in records if record.get("kind") == "train")
    expected = range(1, steps + 1) if isinstance(steps, int) and steps <= MAX_STEPS else ()
    wrong = [step for step in expected if found[str(step)] != 1]
    if not wrong:
        return None
    by_step = {step_of(folder): folder for folder in checkpoints(path)}
    whole = [step for step in by_step if step < wrong[0]]
    later = [by_step[step].name for step in sorted(by_step) if step >= wrong[0]]
    remedy = "Delete the folder to run it again"
    if whole:
        remedy = continues_from(by_step[max(whole)], later, is_finished(path))
    listed = f"{', '.join(map(str, wrong[:4]))}{', ...' if len(wrong) > 4 else ''}"
    return f"{path} is damaged: metrics.jsonl has not one train line of each of {steps} steps ({listed}). {remedy}"


def whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects among the whole lines of a file; who reads their numbers names the other lines."""
    for line in path.read_bytes().split(b"\n")[:-1]:
        with suppress(ValueError, RecursionError):
            if isinstance(record := json.loads(line), dict):
                yield record
