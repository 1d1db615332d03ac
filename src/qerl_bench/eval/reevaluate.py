"""A finished run, evaluated under another protocol; `qerl-bench eval` is the command."""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
from contextlib import ExitStack
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from qerl_bench.checks import require
from qerl_bench.config import CONF_DIR, build, canonical, compose, plain
from qerl_bench.option_names import is_fixed
from qerl_bench.renamed_keys import require_current
from qerl_bench.rundir import (
    RunDir,
    as_dict,
    check_checkpoint,
    flat,
    is_finished,
    last_checkpoint,
    step_of,
    write_atomically,
)

ASKED = ("eval", "task", "engine", "device", "seed")  # what another evaluation of the same policy may change

log = logging.getLogger(__name__)


def stored_config(run_dir: Path) -> DictConfig:
    """The config of a finished run, its root being where it lies now. Raises ConfigError unless there is one."""
    require((run_dir / "config.yaml").is_file(), f"{run_dir} is not a run: it has no config.yaml")
    require(
        is_finished(run_dir),
        f"{run_dir} is not finished (it has no done.json): there is no last policy to evaluate. The command that "
        "started it continues it; env.json has it under argv",
    )
    cfg = OmegaConf.load(run_dir / "config.yaml")
    assert isinstance(cfg, DictConfig)
    require_current(as_dict(cfg), run_dir)
    places = Path("runs", cfg.name).parts
    here = run_dir.resolve()
    if here.parts[-len(places) :] == places:
        cfg.root = str(here.parents[len(places) - 1])
    return cfg


def asked_again(stored: DictConfig, words: list[str]) -> DictConfig:
    """`stored` with what `words` change: options are chosen first (eval=task), then values in them (eval.samples=8).

    Raises ConfigError for words that would change the policy, and for keys that are not there.
    """
    cfg = stored.copy()
    search_path = [word for word in words if word.startswith("hydra.searchpath=")]
    parsed = OverridesParser.create().parse_overrides([word for word in words if word not in search_path])
    for override in parsed:
        word, key = str(override.input_line), override.key_or_group
        require(
            key.split(".")[0] in ASKED,
            f"{word} would change what was trained; another evaluation changes {', '.join(ASKED)} only",
        )
        plain_word = not (override.is_add() or override.is_delete() or override.is_sweep_override())
        require(plain_word, f"{word}: one plain value for each key, please; a sweep takes a command for each of them")
    options = [override for override in parsed if (CONF_DIR / override.key_or_group).is_dir()]
    composed = compose([*search_path, *(str(override.input_line) for override in options)])
    for override in options:
        cfg[override.key_or_group] = composed[override.key_or_group]
    for override in (override for override in parsed if override not in options):
        keys = [*flat(as_dict(cfg))]
        close = difflib.get_close_matches(override.key_or_group, keys, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        require(override.key_or_group in keys, f"there is no option {override.key_or_group}.{hint}")
        place, _, key = override.key_or_group.rpartition(".")
        target = OmegaConf.select(cfg, f"{place}._target_") if place else None
        require(
            target is None or not is_fixed(key, target),
            f"{override.input_line} would change what {place} is called and not what it is; leave it out, and choose "
            f"another option by its name: {place}=...",
        )
        OmegaConf.update(cfg, override.key_or_group, override.value())
    return cfg


def name_of(cfg: DictConfig) -> str:
    """<evaluation>-<first 8 hex digits of the SHA-256 of everything in ASKED>."""
    asked = {key: plain(cfg, key) for key in ASKED}
    return f"{cfg.eval.name}-{hashlib.sha256(json.dumps(canonical(asked), sort_keys=True).encode()).hexdigest()[:8]}"


def evaluate_again(run_dir: Path, stored: DictConfig, cfg: DictConfig, out: Path) -> None:
    """Evaluate base and policy of the run in `run_dir` as `cfg` says, and leave the record in `out`.

    Does nothing if that record is there. Raises ConfigError if it cannot be made.
    """
    trained, asked = build(stored), build(cfg)
    asked.eval.check(asked.task)  # faulty data are found before anything is written
    asked.engine.check(asked)
    require(asked.eval.name != "none", "eval=none evaluates nothing; choose another evaluation")
    require(out.resolve() != run_dir.resolve(), f"out={out} is the run itself, whose record is not to be touched")
    checkpoint = last_checkpoint(run_dir)
    require(checkpoint is not None, f"{run_dir} has no checkpoint to evaluate; delete the folder and run it again")
    assert checkpoint is not None
    check_checkpoint(checkpoint)

    import torch

    from qerl_bench.device import resolve_device
    from qerl_bench.eval.record import record_evaluation
    from qerl_bench.model.digest import digest_of
    from qerl_bench.model_setup import base_checkpoint, build_policy
    from qerl_bench.train.nonfinite import during

    device = resolve_device(asked.device)
    reason = trained.quant.unsupported_reason(device)
    require(reason is None, f"quant={trained.quant.name} cannot run here: {reason}")
    if device == "cpu":
        torch.use_deterministic_algorithms(True)
    with ExitStack() as stack:
        record = stack.enter_context(RunDir(out, cfg, "out=DIR"))
        if record.finished:
            log.info("evaluated before (delete the folder to do it again)")
            return
        base = base_checkpoint(trained.model, trained.task, trained.root)
        record.write_environment(device, digest_of(trained.model, base))
        policy = build_policy(trained, base, device)
        engine = asked.engine.build(policy)
        stack.callback(engine.close)
        for step in (0, step_of(checkpoint)):
            if step > 0:
                policy.load(checkpoint)
            with during(f"evaluation after step {step}"):
                found = asked.eval.evaluate(policy, engine, asked.task, record, asked.seed)
            scores = record_evaluation(record, asked.task.name, step, found)
            log.info("step %d, %d questions: %s", step, scores[0].n, ", ".join(map(str, scores)))
        write_atomically(out / "done.json", json.dumps({"run": str(run_dir.resolve())}, indent=1))


def render(out: Path) -> str:
    """The scores of eval.json as aligned text."""
    lines = [f"{'step':>6}  {'metric':28}  {'value':>7}  {'s.e.':>6}  {'cut':>6}  {'no answer':>9}  questions"]
    for entry in json.loads((out / "eval.json").read_text()):
        shares = ["-" if entry[key] is None else f"{entry[key]:.1%}" for key in ("truncated", "format_failed")]
        lines.append(
            f"{entry['step']:6}  {entry['metric']:28}  {entry['value']:7.4f}  {entry['stderr']:6.4f}  {shares[0]:>6}  "
            f"{shares[1]:>9}  {entry['n']:9}"
        )
    return "\n".join([*lines, "", str(out)])
