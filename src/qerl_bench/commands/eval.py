"""Evaluate a finished run again with another protocol.

The policy is the run's: same config, same packed base, the adapter of its last checkpoint, or of checkpoint=best or
of a step. Only eval, task, engine, device and seed may differ; --config-dir DIR adds a folder of options. The base
before training is evaluated first, as in the run, for the gain on the same questions. The run itself is not changed:
the result goes to RUN_DIR/evals/<name>-<fingerprint>/ or to out=DIR, and consists of config.yaml (the run's, with the
changes), env.json, preflight.json, eval.json, samples.parquet, seals.jsonl and done.json.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from qerl_bench.config import build
from qerl_bench.parallel import ALONE, World, joined_ranks
from qerl_core.checks import require
from qerl_core.options.composer import Composer, register_resolvers
from qerl_core.options.fingerprint import as_dict, canonical, flat, plain, with_effect
from qerl_core.options.names import is_fixed, refuse_foreign_classes, search_folders
from qerl_core.options.user_options import split_search_path
from qerl_core.process.cards import require_gpu
from qerl_core.process.installation import CONF_DIR
from qerl_core.process.terminal import log_to_stderr
from qerl_core.rundir.checkpoints import check_checkpoint, step_of
from qerl_core.rundir.finished_run import chosen_checkpoint, own_folders, stored_config, without_training
from qerl_core.rundir.refusals import nothing_left_if_refused
from qerl_core.rundir.run_dir import RunDir

CHANGEABLE = ("eval", "task", "engine", "device", "seed")  # keys that another evaluation of the same policy may change
OURS = ("out", "checkpoint")
OTHERS = " ".join(f"{key}=..." for key in CHANGEABLE[1:])
USAGE = f"usage: qerl-bench eval RUN_DIR eval=... [{OTHERS} checkpoint=last|best|STEP out=DIR]"

log = logging.getLogger(__name__)


def main(argv: list[str]) -> None:
    with joined_ranks() as world:
        reevaluate_run(argv, world)


def reevaluate_run(argv: list[str], world: World) -> None:
    log_to_stderr()
    for package in ("bitsandbytes", "torchao", "torch.utils._pytree"):  # as in conf/run.yaml
        logging.getLogger(package).setLevel(logging.ERROR)
    register_resolvers()
    require(
        bool(argv) and "=" not in argv[0],
        "the first word must be the folder of a run (a base is evaluated by qerl-bench run steps=0 model=..., and "
        f"looked at by qerl-bench probe); {USAGE}",
    )
    run_dir, words = Path(argv[0]), argv[1:]
    given = {key: [word.removeprefix(f"{key}=") for word in words if word.startswith(f"{key}=")] for key in OURS}
    words = [word for word in words if word.partition("=")[0] not in OURS]
    for key, values in given.items():
        require(len(values) <= 1 and "" not in values, f"{key}= takes one value; {USAGE}")
    further = [word for word in words if "=" not in word and Path(word).is_dir()]
    require(not further, f"it takes one run, and was given {1 + len(further)}: {run_dir} {' '.join(further)}; {USAGE}")
    stored = stored_config(run_dir)
    require(
        bool(words or given["checkpoint"]),
        f"{run_dir}/eval.json has the evaluation as it was; say what to change. {USAGE}",
    )
    cfg = apply_overrides(stored, words, own_folders(run_dir))
    checkpoint = chosen_checkpoint(run_dir, (given["checkpoint"] or ["last"])[0], stored.steps)
    name = evaluation_name(cfg) + ("" if step_of(checkpoint) == stored.steps else f"-{checkpoint.name}")
    out = Path(given["out"][0]) if given["out"] else run_dir / "evals" / name
    reevaluate(run_dir, stored, cfg, out, checkpoint, world)
    if world.first:
        print(render(out))


def apply_overrides(stored: DictConfig, words: list[str], had: Sequence[str] = ()) -> DictConfig:
    """`stored` with the overrides `words`: first the options (eval=task), then values in them (eval.samples=8).

    Its run `had` these folders of options of its own. Raises ConfigError for keys that do not exist and for words that
    would change the policy.
    """
    cfg = stored.copy()
    search_path, others = split_search_path(words)
    parsed = OverridesParser.create().parse_overrides(others)
    for override in parsed:
        word, key = str(override.input_line), override.key_or_group
        require(
            key.split(".")[0] in CHANGEABLE,
            f"{word} would change what was trained; another evaluation can change only {', '.join(CHANGEABLE)}",
        )
        plain_word = not (override.is_add() or override.is_delete() or override.is_sweep_override())
        require(plain_word, f"{word}: give one plain value for each key; to sweep, run the command for each value")
    options = [override for override in parsed if (CONF_DIR / override.key_or_group).is_dir()]
    composed, runtime = Composer().chosen([*search_path, *(str(override.input_line) for override in options)])
    folders = search_folders(runtime)
    refuse_foreign_classes(as_dict(stored), "", folders, had)
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
            f"{override.input_line} would change the name of {place} and not the option; leave it out, and choose "
            f"another option with {place}=...",
        )
        OmegaConf.update(cfg, override.key_or_group, override.value())
    refuse_foreign_classes(OmegaConf.to_container(cfg, resolve=False), "", folders)
    return cfg


def evaluation_name(cfg: DictConfig) -> str:
    """<evaluation>-<first 8 hex digits of the SHA-256 of the config under the keys CHANGEABLE>."""
    config = with_effect({key: plain(cfg, key) for key in CHANGEABLE})
    return f"{cfg.eval.name}-{hashlib.sha256(json.dumps(canonical(config), sort_keys=True).encode()).hexdigest()[:8]}"


def reevaluate(
    run_dir: Path, stored: DictConfig, cfg: DictConfig, out: Path, checkpoint: Path, world: World = ALONE
) -> None:
    """Evaluate the base and the policy in `checkpoint` of the run in `run_dir` under the protocol of `cfg`.

    The record is in `out`; nothing is done if that is complete. Raises ConfigError if the evaluation is not possible.
    All ranks of `world` call this; rank 0 writes the record.
    """
    trained, protocol = (build(without_training(one, world.size == 1)) for one in (stored, cfg))
    if not (trained.quantizer.rescales or protocol.answering.quantizer.rescales):  # one copy of the base will do
        quant, quantizer = (OmegaConf.select(cfg, f"eval.{key}") for key in ("quant", "quantizer"))
        trained, protocol = (one.in_format("eval.quant", quant, quantizer=quantizer) for one in (trained, protocol))
    require_gpu(protocol.device)
    protocol.eval.check(protocol.task)  # find faulty data before anything is written
    protocol.engine.check(protocol.device, protocol.quant)
    require(protocol.eval.name != "none", "eval=none evaluates nothing; choose another evaluation")
    require(out.resolve() != run_dir.resolve(), f"out={out} is the run itself; its record must not change")
    check_checkpoint(checkpoint)

    from qerl_bench.eval.trained_on import without_trained
    from qerl_bench.evaluation import evaluate
    from qerl_bench.run_setup import prepare_device, require_places, set_up
    from qerl_bench.train.data_parallel import require_equal_weights

    asked, trained_on = without_trained(protocol.task, getattr(protocol.eval, "questions", None), trained.task)
    protocol = replace(protocol, task=asked)
    require_places(protocol, world, trains=False)
    device = prepare_device(protocol.device, trained.quant)
    folder = world.folder(out)
    with nothing_left_if_refused(folder), RunDir(folder, cfg, "out=DIR") as record:
        if world.from_first(lambda: record.finished):
            log.info("evaluated before (delete the folder to repeat it)")
            return
        with set_up(trained, protocol.engine, record, device, world, trains=False) as setup:
            evaluated = setup._replace(experiment=protocol)
            require_equal_weights(setup.policy.model, world)
            evaluate(evaluated, 0, trained_on)
            setup.policy.load(checkpoint)
            evaluate(evaluated, step_of(checkpoint), trained_on)
        earlier = {} if step_of(checkpoint) == trained.steps else {"checkpoint": checkpoint.name}
        record.mark_finished({"run": str(run_dir.resolve())} | earlier)


def render(out: Path) -> str:
    """The scores of eval.json as a table of text."""
    lines = [f"{'step':>6}  {'metric':28}  {'value':>7}  {'s.e.':>6}  {'cut':>6}  {'no answer':>9}  questions"]
    for entry in json.loads((out / "eval.json").read_text()):
        shares = ["-" if entry[key] is None else f"{entry[key]:.1%}" for key in ("truncated", "format_failed")]
        lines.append(
            f"{entry['step']:6}  {entry['metric']:28}  {entry['value']:7.4f}  {entry['stderr']:6.4f}  {shares[0]:>6}  "
            f"{shares[1]:>9}  {entry['n']:9}"
        )
    return "\n".join([*lines, "", str(out)])
