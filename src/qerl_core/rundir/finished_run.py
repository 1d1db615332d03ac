"""What later commands read of a finished run: its config, with keys that came later, and its checkpoints."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from pydoc import locate
from typing import Any

from omegaconf import DictConfig, OmegaConf

from qerl_core.checks import require
from qerl_core.options import user_options
from qerl_core.options.fingerprint import added_later
from qerl_core.options.names import load_option
from qerl_core.rundir.checkpoints import checkpoints, is_finished, step_of
from qerl_core.rundir.checksums import DONE
from qerl_core.rundir.read_files import read_config, read_object
from qerl_core.rundir.recorded_types import RESULT, require_environment, require_kinds
from qerl_core.rundir.run_checks import check_records, damage_remedy

LATER_WITHOUT_EFFECT = {"eval": {"every": 0, "every_questions": 1}, "logger": {"names": None}}  # keys by group


def stored_config(run_dir: Path) -> DictConfig:
    """The config of a finished run, with the root it has now. Raises ConfigError if there is no finished run."""
    require(
        (run_dir / "config.yaml").is_file(),
        f"{run_dir} is not a run: {'it has no config.yaml' if run_dir.exists() else 'there is no such folder'}. "
        "qerl-bench status lists the runs",
    )
    require(
        is_finished(run_dir),
        f"{run_dir} is not finished (it has no done.json), so there is no final policy. The command that "
        "started it, argv in env.json, continues it",
    )
    check_records(run_dir, "Or take another run")
    cfg = OmegaConf.create(with_later_keys(read_config(run_dir / "config.yaml")))
    places = Path("runs", cfg.name).parts
    here = run_dir.resolve()
    if here.parts[-len(places) :] == places:
        cfg.root = str(here.parents[len(places) - 1])
    return cfg


def own_folders(run_dir: Path) -> list[str]:
    """The folders of options of its own that a run had; none of one that was made before they were on record."""
    file = run_dir / "env.json"
    said = read_object(file, damage_remedy(run_dir, file.name, True)) if file.is_file() else {}
    require_environment(str(file), said, "Take another run")
    return said.get("own_folders", [])


def with_later_keys(config: dict[str, Any]) -> dict[str, Any]:
    """`config` with keys that were added after the run was made, at neutral values, where its classes have them."""

    def grown(group: str, part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        known = keys_of(part.get("_target_", ""))
        later = added_later(group) | LATER_WITHOUT_EFFECT.get(group, {})
        return {key: value for key, value in later.items() if key in known} | part

    checkpoints = {"_target_": "qerl_bench.train.spec.CheckpointSpec", "keep": None}
    whole = {"checkpoints": checkpoints, "reward": added_later("reward")} | config
    return {group: grown(group, part) for group, part in whole.items()}


def keys_of(target: str) -> set[str]:
    """The keys of one of our classes; none of one that is not ours or no longer there."""
    made = locate(target) if target.startswith("qerl_bench.") else None
    return {field.name for field in fields(made)} if is_dataclass(made) else set()


def chosen_checkpoint(run_dir: Path, which: str, steps: int) -> Path:
    """The checkpoint `which` of a finished run of `steps` steps: last, best, or one by its step or name.

    Raises ConfigError if it is not there.
    """
    found = {step_of(folder): folder for folder in checkpoints(run_dir)}
    require(
        steps > 0,
        f"{run_dir} has steps=0 and no checkpoint: it asked the base. To ask it otherwise repeat its command, steps=0, "
        "with another eval=... or eval.quant=...",
    )
    require(bool(found), f"{run_dir} has no checkpoint; delete the folder and run it again")
    done = read_object(run_dir / DONE, damage_remedy(run_dir, DONE, True))
    require_kinds(str(run_dir / DONE), done, RESULT, "Take another run")
    best = done.get("checkpoints", {}).get("best")
    if which == "last":
        require(
            steps in found,
            f"{run_dir} ended with step {steps}, and its last checkpoint is {found[max(found)].name}: the final policy "
            "is gone. Delete done.json, and the command that started the run makes it again",
        )
    require(
        which != "best" or best is not None,
        f"checkpoint=best: {run_dir} does not know its best checkpoint, because none was evaluated during training. "
        "eval.every=N, with N a multiple of save_every, does that in a new run",
    )
    step = {"last": str(steps), "best": str(best)}.get(which, which.removeprefix("step_"))
    require(
        step.isdecimal() and int(step) in found,
        f"checkpoint={which} must be last, best or the step of one of the checkpoints of {run_dir}: "
        f"{', '.join(map(str, sorted(found)))}",
    )
    return found[int(step)]


def without_training(cfg: DictConfig, alone: bool = True) -> DictConfig:
    """`cfg` without formats of weights and inputs in evaluations and rollouts, which its engine may lack.

    But with those of weights that were trained merged (train.merge). And without what training alone asks of a task:
    demonstrations, and answers that fit a micro-batch. In one process, `alone`, its base is not sharded.
    """
    cfg = cfg.copy()
    cfg.train.micro_batch_tokens = None
    cfg.parallel.shard = cfg.parallel.shard and not alone
    cfg.algo, cfg.rollout.group_size = load_option(user_options.folders(), "algo", "grpo"), 2
    merged = OmegaConf.select(cfg, "train.merge", default="none") != "none"
    for part in (cfg.eval,) if merged else (cfg.eval, cfg.rollout):
        part.update({key: None for key in ("quant", "activations") if key in part})
    cfg.rollout.merge, cfg.rollout.lag = merged, 0
    return cfg
