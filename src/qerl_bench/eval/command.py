"""Evaluate a finished run again with another protocol.

The policy is the run's: same config, same packed base, the adapter of its last checkpoint, or of checkpoint=best or
of a step. Only eval, task, engine, device and seed may differ; --config-dir DIR adds a folder of options. The base
before training is evaluated first, as in the run, for the gain on the same questions. The run itself is not changed:
the result goes to RUN_DIR/evals/<name>-<fingerprint>/ or to out=DIR, and consists of config.yaml (the run's, with the
changes), env.json, preflight.json, eval.json, samples.parquet, seals.jsonl and done.json.
"""

from __future__ import annotations

import logging
from pathlib import Path

from qerl_bench.checkpoints import step_of
from qerl_bench.checks import require
from qerl_bench.composer import register_resolvers
from qerl_bench.eval.reevaluate import (
    CHANGEABLE,
    apply_overrides,
    chosen_checkpoint,
    evaluation_name,
    reevaluate,
    render,
    stored_config,
)
from qerl_bench.parallel import World, joined
from qerl_bench.terminal import log_to_stderr

OURS = ("out", "checkpoint")
OTHERS = " ".join(f"{key}=..." for key in CHANGEABLE[1:])
USAGE = f"usage: qerl-bench eval RUN_DIR eval=... [{OTHERS} checkpoint=last|best|STEP out=DIR]"


def main(argv: list[str]) -> None:
    with joined() as world:
        again(argv, world)


def again(argv: list[str], world: World) -> None:
    log_to_stderr("qerl_bench")
    for package in ("bitsandbytes", "torchao", "torch.utils._pytree"):  # as in conf/run.yaml
        logging.getLogger(package).setLevel(logging.ERROR)
    register_resolvers()
    require(bool(argv) and "=" not in argv[0], f"the first word must be the folder of a run; {USAGE}")
    run_dir, words = Path(argv[0]), argv[1:]
    given = {key: [word.removeprefix(f"{key}=") for word in words if word.startswith(f"{key}=")] for key in OURS}
    words = [word for word in words if word.partition("=")[0] not in OURS]
    for key, values in given.items():
        require(len(values) <= 1 and "" not in values, f"{key}= takes one value; {USAGE}")
    stored = stored_config(run_dir)
    require(
        bool(words or given["checkpoint"]),
        f"{run_dir}/eval.json has the evaluation as it was; say what to change. {USAGE}",
    )
    cfg = apply_overrides(stored, words)
    checkpoint = chosen_checkpoint(run_dir, (given["checkpoint"] or ["last"])[0], stored.steps)
    name = evaluation_name(cfg) + ("" if step_of(checkpoint) == stored.steps else f"-{checkpoint.name}")
    out = Path(given["out"][0]) if given["out"] else run_dir / "evals" / name
    reevaluate(run_dir, stored, cfg, out, checkpoint, world)
    if world.first:
        print(render(out))
