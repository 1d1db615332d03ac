"""Runs of TRL's GRPOTrainer: a folder for each, ARM-sSEED, with what `Trainer` wrote into its output_dir.

    trainer_state.json      its log (trainer.save_state()); or that of the last checkpoint, or log.json with a list
    training_args.json      its options and seed (trainer.args.to_json_string()); without it they are not known
    completions/*.parquet   with log_completions=True: rewards of each completion, with which the log is compared

Never opened: training_args.bin and optimizer.pt, which are pickles and could run anything, and weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from qerl_core.checks import ConfigError, require
from qerl_studies.foreign.files import inside, read_json
from qerl_studies.foreign.formulas import of_completions
from qerl_studies.foreign.gather import ForeignRun, check_against, check_order, named_seed, numbers_of
from qerl_studies.runs.reported import LARGEST, check_size

STATE, ARGS = "trainer_state.json", "training_args.json"
LOGS = ("log.json", "log_history.json")
CHECKPOINT = re.compile(r"checkpoint-(\d{1,12})")
TAKEN = ("step", "prompt", "completion", "advantage")  # columns of completions that are no reward
RUNS_HELP = (
    "a folder ARM-sSEED for each run, with trainer_state.json (trainer.save_state()) and training_args.json "
    "(trainer.args.to_json_string())"
)


def read(root: Path, accuracy: str | None = None) -> list[ForeignRun]:
    """The runs below `root`. `accuracy` is the reward function that gives 1 for a right answer and else 0.

    Raises ConfigError without a run, for a file that cannot be read, and if that function gives other numbers.
    """
    runs = [_run(root, folder, accuracy) for folder in _folders(root)]
    require(bool(runs), f"{root} has no run of TRL: give a folder with {RUNS_HELP}")
    return runs


def _folders(root: Path) -> Iterator[Path]:
    for folder in [root, *sorted(path for path in root.rglob("*") if path.is_dir())]:
        if inside(root, folder) and not CHECKPOINT.fullmatch(folder.name) and _log_file(folder) is not None:
            yield folder


def _log_file(folder: Path) -> Path | None:
    plain = [folder / name for name in (STATE, *LOGS) if (folder / name).is_file()]
    if plain:
        return plain[0]
    saved = _checkpoints(folder)
    return saved[max(saved)] if saved else None


def _checkpoints(folder: Path) -> dict[int, Path]:
    """The states of checkpoints by their step."""
    found = {int(match[1]): path / STATE for path in folder.iterdir() if (match := CHECKPOINT.fullmatch(path.name))}
    return {step: path for step, path in found.items() if path.is_file()}


def _run(root: Path, folder: Path, accuracy: str | None) -> ForeignRun:
    file = _log_file(folder)
    assert file is not None
    inside(root, file, refuse=True)
    content = read_json(file)
    history = _history(content, file)
    name = folder.relative_to(root).as_posix() if folder != root else root.resolve().name
    args = read_json(folder / ARGS) if (folder / ARGS).is_file() and inside(root, folder / ARGS) else {}
    require(isinstance(args, dict), f"{folder / ARGS} must hold one JSON object")
    run = ForeignRun(name, f"{name}/{file.relative_to(folder).as_posix()}", {}, options=args)
    run.seed = args["seed"] if type(args.get("seed")) is int else named_seed(name)
    if run.seed != (named := named_seed(name)) and named is not None:
        run.refused.append(f"it is called seed {named}, and its {ARGS} says seed {run.seed}")
    run.logged, trained = _logged(history, str(file))
    check_order(run, trained)
    _check_end(run, content)
    _check_checkpoints(root, folder, run)
    _completions(root, folder, run, accuracy)
    return run


def _history(content: Any, file: Path) -> list[Any]:
    found = content if isinstance(content, list) else content.get("log_history") if isinstance(content, dict) else None
    require(isinstance(found, list), f"{file} has no log_history: it is no state of TRL's Trainer")
    assert isinstance(found, list)
    return found


def _logged(history: Sequence[Any], where: str) -> tuple[dict[int, dict[str, float]], list[int]]:
    """Numbers by step, and the steps that have a reward, in their order. The last entry of a log, about the whole
    training, has its own keys and joins the last step."""
    found: dict[int, dict[str, float]] = {}
    trained = []
    for place, entry in enumerate(history):
        step = entry.get("step") if isinstance(entry, dict) else None
        require(type(step) is int and step >= 0, f"{where}: entry {place} of log_history has no step")
        assert isinstance(step, int) and isinstance(entry, dict)
        numbers = {key: value for key, value in numbers_of(entry).items() if key not in ("step", "epoch")}
        if "reward" in numbers:
            trained.append(step)
        found[step] = numbers | found.get(step, {})
    return found, trained


def _check_checkpoints(root: Path, folder: Path, run: ForeignRun) -> None:
    """Refuse a run one of whose checkpoints has another log up to its step: a rerun overwrites some of them."""
    for step, file in sorted(_checkpoints(folder).items()):
        if inside(root, file):
            kept, _ = _logged(_history(read_json(file), file), str(file))
            own = {at: {key: run.logged.get(at, {}).get(key) for key in numbers} for at, numbers in kept.items()}
            if repr(own) != repr(kept):  # NaN is NaN there
                run.refused.append(f"checkpoint-{step} has another log than it up to that step: a rerun?")


def _check_end(run: ForeignRun, content: Any) -> None:
    last = max(run.logged, default=0)
    planned = content.get("max_steps") if isinstance(content, dict) else None
    if type(planned) is int and planned > last:
        run.refused.append(f"it stopped at step {last} of {planned}")
    every = run.options.get("logging_steps")
    if isinstance(every, int | float) and 1 < every <= LARGEST:
        run.notes.append(f"logging_steps={every:g}: a number stands for the mean of so many steps")


def _completions(root: Path, folder: Path, run: ForeignRun, accuracy: str | None) -> None:
    """Compare the log with the rewards of completions, and take the share of right ones from them."""
    means: dict[int, float] = {}
    for file in sorted((folder / "completions").glob("completions_*.parquet")):
        if not inside(root, file):
            continue
        step, rewards = _rewards(file, run)
        total = np.sum([values * _weight(run.options, at) for at, values in enumerate(rewards.values())], axis=0)
        means[step] = of_completions(total)
        run.counts[str(step)] = len(total)
        if accuracy is not None:
            right = rewards.get(accuracy)
            require(right is not None, f"{file} has no reward function {accuracy}: it has {', '.join(rewards)}")
            assert right is not None
            require({*np.unique(right)} <= {0.0, 1.0}, f"{file}: {accuracy} has numbers besides 0 and 1")
            run.extra[step, "accuracy"] = of_completions(right), f"completions for which {accuracy} is 1"
    if means:
        check_against(run, "reward", means)
    elif accuracy is not None:
        raise ConfigError(f"accuracy={accuracy} needs completions/*.parquet, which log_completions=True writes")
    else:
        run.notes.append("no completions: the logged rewards could not be compared with them")


def _rewards(file: Path, run: ForeignRun) -> tuple[int, dict[str, np.ndarray]]:
    """The step of a file of completions, and the rewards by function."""
    check_size(file)
    try:
        # Texts are left on the disk.
        heads = parquet.read_schema(file)
        kept = [name for name in heads.names if name not in TAKEN[1:] and _is_number(heads.field(name).type)]
        table = parquet.read_table(file, columns=kept)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ConfigError(f"{file} is no Parquet file ({error}): leave the run out") from error
    require("step" in kept and len(table) > 0 and len(kept) > 1, f"{file} is no file of TRL's completions")
    steps = {*table["step"].to_pylist()}
    require(len(steps) == 1 and type(next(iter(steps))) is int, f"{file} is of several steps")
    logged = run.logged.get(next(iter(steps)), {})
    functions = [name for name in kept if f"rewards/{name}/mean" in logged] or [n for n in kept if n != "step"]
    return next(iter(steps)), {name: table[name].to_numpy().astype(float) for name in functions}


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def _weight(options: Mapping[str, Any], place: int) -> float:
    weights = options.get("reward_weights")
    weight = weights[place] if isinstance(weights, list) and place < len(weights) else 1.0
    known = isinstance(weight, int | float) and abs(weight) <= LARGEST
    require(known, f"{ARGS}: reward_weights must be numbers, got {str(weight)[:80]!r}: leave the run out")
    return float(weight)
