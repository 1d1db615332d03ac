"""The speed studies on a model that a CPU can train: every completion has its length, and every step trains on it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from qerl_bench.config import build, compose
from qerl_studies.commands.figure import main as draw_figure
from tests.parallel import ranks

SMALL = (
    "model=shape/tiny", "device=cpu", "steps=3", "rollout.prompts_per_step=3", "rollout.group_size=4",
    "task.prompt_tokens=20", "lora.rank=4", "train.micro_batch_tokens=150",
)  # fmt: skip


def run(root: Path, *words: str) -> str:
    """What a run says."""
    ended = ranks.run([*words, f"root={root}"], 1, root / "said")
    assert ended.codes == [0], ended.said
    return (root / "said").read_text()  # with the lines of its table


def trained(folder: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "train"]


@pytest.mark.parametrize(
    ("study", "quant", "lengths"),
    [
        ("rollout", "nf4", ("task.completion_tokens=9",)),
        ("step", "nvfp4", ("task.completion_tokens=9", "task.max_completion_tokens=30")),
    ],
)
def test_a_speed_study_trains_on_completions_of_its_lengths(
    tmp_path: Path, study: str, quant: str, lengths: tuple[str, ...]
) -> None:
    words = [f"experiment=speed/{study}", *SMALL, f"quant={quant}", *lengths]
    said = run(tmp_path, *words)
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith(f"shape-tiny-{quant}-none-grpo-r4-s0-")
    experiment = build(compose(words))
    steps = trained(folder)
    assert len(steps) == 3
    for step, line in enumerate(steps, start=1):
        prompts = experiment.task.train_prompts(step, 3, seed=0)
        asked = [length for prompt in prompts for length in prompt.new_tokens or ()]
        assert (len(set(asked)) == 1) == (study == "rollout")
        assert line["completions/tokens"] == sum(asked)
        assert line["completions/mean_length"] == pytest.approx(sum(asked) / 12)
        # prompt and completion tokens over seconds: no prompt is shorter or longer than asked
        assert line["speed/train_tok_s"] * line["time/train_s"] == pytest.approx(sum(asked) + 12 * 20)
        assert line["train/taught_frac"] == 1.0 and line["grad_norm"] > 0
        assert line["reward/frac_zero_std"] == 0 and line["reward/mean"] == 0.5
    assert "train/taught_frac = 0" not in said
    lines = said.splitlines()
    (names,) = (number for number, line in enumerate(lines) if " taught " in line and "tok/s" in line)
    assert lines[names].split()[-2:] == ["taught", "GiB"] and lines[names + 1].split()[-2] == "1.00"
    draw_figure(["step_times", str(tmp_path / "runs"), "--out", str(tmp_path)])
    (found,) = csv.DictReader((tmp_path / "step_times.csv").read_text().splitlines())
    assert (found["format"], found["rank"], found["steps"], found["taught_frac"]) == (quant, "4", "2", "1")
    for part in ("step", "rollout", "reward", "sync", "train", "idle"):
        measured = sorted(line[f"time/{part}_s"] for line in steps[1:])
        assert float(found[part]) == pytest.approx(sum(measured) / 2, rel=1e-5)
        assert float(found[f"{part}_p80"]) == pytest.approx(0.2 * measured[0] + 0.8 * measured[1], rel=1e-5)
    for line in steps:
        parts = sum(line[f"time/{part}_s"] for part in ("rollout", "reward", "sync", "train", "idle"))
        assert parts == pytest.approx(line["time/step_s"]) and line["time/idle_s"] >= 0


def test_a_run_that_did_not_train_says_so(tmp_path: Path) -> None:
    """An untrained model that earns nothing: what its steps took is no speed of training."""
    words = ("experiment=smoke", "task=word_problems", "task.max_completion_tokens=4", "eval=none", "steps=2")
    said = run(tmp_path, *words, "task.format_weight=0")
    (folder,) = (tmp_path / "runs").iterdir()
    assert [line["train/taught_frac"] for line in trained(folder)] == [0.0, 0.0]
    assert said.count("train/taught_frac = 0") == 1 and "task=shape" in said
