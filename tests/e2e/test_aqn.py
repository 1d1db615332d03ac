"""Noise as a user meets it: every recipe and variant in a real run, its numbers in metrics.jsonl, exact resumption."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path

import pytest

from qerl_bench.commands.run import run_experiment
from qerl_bench.config import build, compose

pytestmark = pytest.mark.usefixtures("no_figures")
TINY = [
    "experiment=smoke",
    "device=cpu",
    "quant=nvfp4",
    "eval=none",
    "model.hidden_size=32",
    "model.layers=2",
    "model.heads=2",
    "model.kv_heads=1",
    "model.intermediate_size=64",
    "task.max_completion_tokens=8",
    "lora.rank=4",
]
MEASURED = re.compile(r"^(time|time/.*|speed/.*|memory/.*)$")
REPO = ["0", "1.00e-02", "5.62e-03", "3.16e-03", "1.78e-03", "1.00e-03", "5.62e-04", "3.16e-04", "1.78e-04", "1.00e-04"]
PAPER = [*REPO[:2], "7.17e-03", "5.14e-03", "3.68e-03", "2.64e-03", "1.89e-03", "1.36e-03", "9.73e-04", "6.97e-04"]


def run(root: Path, *words: str) -> list[dict]:
    """The training records of one run, without what a clock says. In this process, which saves its start."""
    chosen = [word for word in TINY if word.split("=")[0] not in {other.split("=")[0] for other in words}]
    cfg = compose([*chosen, "name=run", *words, f"root={root}"])
    run_experiment(build(cfg), cfg)
    records = [json.loads(line) for line in (root / "runs" / "run" / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in record.items() if not MEASURED.match(key)}
        for record in records
        if record["kind"] == "train"
    ]


@pytest.mark.parametrize(
    ("recipe", "table", "stages"),
    [
        ("paper", PAPER, [k for k in range(10) for _ in range(2)]),
        ("repo", REPO, [0, *(k for k in range(1, 10) for _ in range(2)), 9]),
        ("as_released", REPO, [0, *(k for k in range(1, 10) for _ in range(2)), 9]),
    ],
)
def test_a_recipe_walks_through_its_ten_stages(
    tmp_path: Path, recipe: str, table: list[str], stages: list[int]
) -> None:
    records = run(tmp_path, f"recipe={recipe}", "steps=20")
    assert [record["step"] for record in records] == [*range(1, 21)]
    shown = [f"{record['aqn/sigma']:.2e}" if record["aqn/sigma"] else "0" for record in records]
    assert shown == [table[stage] for stage in stages]
    noisy = [record for record in records if record["aqn/sigma"] > 0]
    perturbed = [record["aqn/norms_perturbed"] for record in noisy]
    realised = [record["aqn/sigma_realised"] / record["aqn/sigma"] for record in noisy]
    if recipe == "paper":
        assert set(perturbed) == {4}  # two norms in each of two blocks, in FP32 down to the last stage
        assert realised == pytest.approx([1.0] * len(noisy), rel=5 / (2 * 4 * 32) ** 0.5)
    elif recipe == "repo":
        assert max(perturbed) == 5  # the final norm too
        assert (
            noisy[-1]["aqn/scales_changed"] < 0.25
        )  # BF16 rounds the late stages away; only the final norm has a walk
    else:
        assert set(perturbed) == set(realised) == {0}


VARIANTS = {
    "closed loop": ["aqn=entropy", "aqn.target_start=5.6", "aqn.target_end=5.5"],
    "accumulated": ["recipe=repo", "noise.accumulate=all", "noise.add_dtype=float32"],
    "per group, relative": [
        "aqn=layerwise",
        "noise.relative=true",
        "noise.cadence=group",
        "noise.norms=blocks_final",
    ],
    "trainer too": ["aqn=cosine", "noise.site=rollout_and_training"],
    "old policy": ["recipe=paper"],
    "log, batches": ["aqn=log", "noise.cadence=batch", "noise.prompts_per_draw=3"],
    "importance weights": [
        "aqn=exp",
        "aqn.sigma_start=0.5",
        "importance_sampling.mode=truncate",
        "importance_sampling.clip_max=1.01",
    ],
    "on adapters": ["aqn=exp", "aqn.sigma_start=0.5", "noise.where=adapters", "noise.cadence=group"],
    "on adapters, trainer too": ["aqn=linear", "noise.where=adapters", "noise.site=rollout_and_training"],
    "on adapters, closed loop": ["aqn=entropy", "aqn.target_start=5.6", "aqn.target_end=5.5", "noise.where=adapters"],
    "fixed error": ["experiment=control/format_error_fixed", "quant=bf16"],
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_resumes_exactly(tmp_path: Path, variant: str) -> None:
    """A run that is cut back to its first checkpoint writes the same numbers again."""
    words = [*VARIANTS[variant], "steps=6", "save_every=3"]
    if any(word.startswith("experiment=") for word in words):  # one experiment at a time: smoke's settings by hand
        small = [
            "steps=6",
            "model.warm_start_steps=0",
            "rollout.prompts_per_step=4",
            "rollout.group_size=4",
            "optim.warmup_steps=1",
        ]
        words = [*words, *small]
    straight = run(tmp_path, *words)
    assert len(straight) == 6
    folder = tmp_path / "runs" / "run"
    (folder / "done.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "step_000006")
    assert run(tmp_path, *words) == straight
    assert any(record["aqn/sigma_realised"] > 0 for record in straight)
    if variant == "importance weights":
        assert any(record["importance_sampling/changed_frac"] > 0 for record in straight)
    if variant == "closed loop":
        for before, after in itertools.pairwise(straight):
            assert after["aqn/sigma"] == before["aqn/sigma_next"]
        assert len({record["aqn/sigma"] for record in straight}) == 6


def test_a_run_names_the_steps_whose_samples_count_for_few(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The bar at 1, which no step with noise reaches."""
    records = run(
        tmp_path, "aqn=constant", "aqn.level=0.5", "steps=3", "optim.warmup_steps=1", "importance_sampling.warn_ess=1"
    )
    warned = [record.getMessage() for record in caplog.records if "importance_sampling.warn_ess" in record.getMessage()]
    expected = [f"step {record['step']}: mismatch/ess is {record['mismatch/ess']:.3f}" for record in records]
    assert len(warned) == 3 and all(line.startswith(start) for line, start in zip(warned, expected, strict=True))
