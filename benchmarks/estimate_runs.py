"""Committed runs as what they computed and what was measured, and the kernels' table of rollouts: for estimate.py."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qerl_bench.estimate.sizes import Sizes
from qerl_bench.estimate.work import Work
from qerl_bench.quant.base import WeightFormat
from qerl_core.options.names import option
from qerl_studies.runs.committed import read_study

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("studies/h200/data", "studies/real-2026")
# Which runs were beside these on the card is not what they record: the first had other work there, as its micro-batches
# show (2,800 tokens on a card of its own), and of the second four runs had six places.
OTHER_WORK = ("real-2026/pilot/data/rates-15b-up", "real-2026/pilot/data/rates-05b-higher")
DECODING = ROOT / "kernels/results/h200_decoding.csv"
# The released models of these studies, by their config.json; others say their sizes themselves.
SIZES = {
    "qwen2.5-coder-0.5b-instruct": Sizes(24, 896, 4864, 896, 128, 151_936, True),
    "qwen2.5-coder-1.5b-instruct": Sizes(28, 1536, 8960, 1536, 256, 151_936, True),
}
PROMPT_TOKENS = {"gsm8k": 110}  # with their chat template (docs/LOG.md, 2026-11-26)
QUESTIONS = {"gsm8k": 1319}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A run: what it computed, and what was measured. Seconds and tokens are medians of its steps after the second."""

    session: str
    name: str
    model: str
    task: str
    work: Work
    tokens: float | None
    rollout: float | None
    train: float | None
    step: float | None
    wall: float
    peak: float

    @property
    def setting(self) -> tuple[Any, ...]:
        work = self.work
        return (self.session, self.model, work.quant, work.rank, work.completions, work.modules, work.per_card)


def rows() -> Iterator[Row]:
    """The finished runs on an H200 below FOLDERS."""
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("settings.json.gz")):
            study = read_study(file.parent)
            session = str(file.parent.relative_to(ROOT / "studies"))
            for name, run in sorted(study.runs.items()):
                environment = study.environment(name)
                if run["finished"] and "H200" in str(environment["gpu"]) and session not in OTHER_WORK:
                    config = study.configs[run["fingerprint"]]
                    yield row(session, name, run, config, environment, study.metrics[name])


def row(
    session: str, name: str, run: dict[str, Any], config: dict[str, Any], environment: dict[str, Any], metrics: Any
) -> Row:
    def median(metric: str) -> float | None:
        values = metrics[(metrics["kind"] == "train") & (metrics["metric"] == metric)].sort_values("step")["value"]
        later = values.iloc[2:] if len(values) > 4 else values.iloc[1:]
        return float(later.median()) if len(later) else None

    model, task, early = config["model.name"], config["task.name"], session.startswith("h200/")
    tokens = median("completions/mean_length")
    work = Work.of(
        config,
        SIZES.get(model) or made_here(config),
        bits(config["quant.name"]),
        PROMPT_TOKENS.get(task) or config["task.prompt_tokens"],
        config.get("task.completion_tokens") or tokens or config["task.max_completion_tokens"],
        QUESTIONS.get(task, 0),
        environment.get("runs_on_gpu") or 1,
    )
    if size := config.get("train.micro_batch_size"):  # completions, of a fixed length
        work = replace(work, micro_batch=int(size * (work.prompt_tokens + work.limit)))
    if early:  # before blocks were fused unless asked, and prompts computed once
        work = replace(work, shares_prompts=False, modules=config.get("kernel") != "block")
    return Row(
        session=session,
        name=name,
        model=model,
        task=task,
        work=work,
        tokens=tokens,
        rollout=median("time/rollout_s"),
        train=median("time/train_s"),
        step=median("time/step_s"),
        wall=run["wall_s"],
        peak=run["peak_memory_gib"],
    )


def made_here(config: dict[str, Any]) -> Sizes:
    hidden, heads = config["model.hidden_size"], config["model.heads"]
    keys = config["model.kv_heads"] * hidden // heads
    shape = config["model.layers"], hidden, config["model.intermediate_size"], hidden, keys
    return Sizes(*shape, config["model.vocabulary"], config["model.tied"])


def bits(quant: str) -> float | None:
    found: WeightFormat = option("quant", quant)
    return found.bits_per_weight


def decoding() -> Iterator[tuple[Work, float]]:
    """Rollouts of the kernels' table: 256 tokens to each prompt of 256, recorded, one length."""
    sizes = Sizes(28, 3584, 18944, 3584, 512, 152_064, False)
    with open(DECODING) as file:
        for line in csv.DictReader(file):
            if line["way"] == "recorded":
                batch, group, quant = int(line["batch"]), int(line["group"]), line["format"]
                config = {
                    "quant.name": quant,
                    "lora.rank": int(line["rank"]),
                    "steps": 1,
                    "task.max_completion_tokens": int(line["new"]),
                    "rollout.prompts_per_step": batch // group,
                    "rollout.group_size": group,
                }
                yield Work.of(config, sizes, bits(quant), int(line["prompt"]), int(line["new"])), float(line["total_s"])
