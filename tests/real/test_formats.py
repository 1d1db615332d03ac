"""A pretrained model trains one step on word problems in each weight format, and in each quantizer's codes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pandas as pd
import pytest

from qerl_bench.commands.run import run_experiment
from qerl_bench.sweep.check import check
from tests.conftest import compose
from tests.e2e.test_every_config import FILES, grid, word_of
from tests.real.questions import write_questions
from tests.short_runs import without_figures

QUANTS = ("bf16", "nvfp4", "mxfp4", "nf4", "fp8", "int8", "int4")
OTHERS = (("nvfp4", "mse"), ("nvfp4", "awq"), ("nvfp4", "gptq"), ("mxfp4", "awq"), ("int4", "gptq"))
PAIRS = (*((quant, "rtn") for quant in QUANTS), *OTHERS)
CALIBRATED = ("awq", "gptq")
SAMPLES = 16
SMALL = (
    *("steps=1", "device=cpu", "reward=random", "optim.warmup_steps=0", "eval=none", "train.micro_batch_tokens=512"),
    *("rollout.prompts_per_step=2", "rollout.group_size=4", "task.max_completion_tokens=24"),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where all runs lie, which share the conversion of the file."""
    folder = tmp_path_factory.mktemp("formats")
    write_questions(folder, {"train": 64, "eval": 8})
    with without_figures():
        yield folder


@pytest.mark.parametrize(("quant", "quantizer"), PAIRS)
def test_it_trains_a_step(quant: str, quantizer: str, smollm: Path, root: Path) -> None:
    rows = [f"task.{split}_file={root}/{split}.jsonl" for split in ("train", "eval")]
    calibrated = [f"quantizer.calibration.samples={SAMPLES}"] if quantizer in CALIBRATED else []
    chosen = [f"quant={quant}", f"quantizer={quantizer}", *calibrated, f"root={root}", f"name={quant}-{quantizer}"]
    cfg = compose(["model=hub", f"model.id={smollm}", "task=gsm8k", *rows, *SMALL, *chosen])
    run_experiment(check(cfg), cfg)
    folder = root / "runs" / cfg.name
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    (step,) = (line for line in lines if line["kind"] == "train")
    assert step["grad_norm"] > 0 and math.isfinite(step["loss"])
    layers = pd.read_parquet(folder / "layers.parquet")
    assert {*layers["quant"]} == {quant} and {*layers["quantizer"]} == {quantizer}
    assert len(layers) == 210  # 30 blocks of 7
    # GPTQ moves weights as far as outputs on its calibration text allow
    errors = layers["output_error" if quantizer == "gptq" else "relative_error"]
    within = errors == 0 if quant == "bf16" else errors.between(0, 0.2, inclusive="neither")
    assert within.all(), layers[~within].to_string()
    assert (folder / "calibration.json").exists() == (quantizer in CALIBRATED)


def test_the_pairs_of_all_experiments_and_recipes_are_among_them() -> None:
    used = set()
    for file in FILES:
        swept = {key: str(values).split(",") for key, values in grid(file).items() if key in ("quant", "quantizer")}
        for values in product(*swept.values()):
            cfg = compose([word_of(file), *map("=".join, zip(swept, values, strict=True))])
            used.add((cfg.quant.name, cfg.quantizer.name))
    assert used <= {*PAIRS}
