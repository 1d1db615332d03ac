"""What a run says of itself at its beginning and at its end."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from qerl_bench.conduct.run_messages import ending, opening
from qerl_bench.config import build, compose
from qerl_bench.sweep.grid import grid
from qerl_core.options.fingerprint import fingerprint
from qerl_core.process.arguments import WIDTH
from qerl_studies.runs.load import load_run
from qerl_studies.tables.terminal import render, summary

RUNS = sorted((Path(__file__).parents[1] / "assets" / "runs").iterdir())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], ["task arithmetic", "16 prompts x 8 completions", "150 steps", "0.0003", "held-out questions"]),
        (["algo=sft"], ["one demonstration each"]),
        (["eval=none"], ["no evaluation"]),
        (["eval.questions=null"], ["all held-out questions"]),
        (["eval.questions=7", "steps=3", "optim.lr=0.002"], ["7 held-out", "3 steps", "0.002"]),
    ],
    ids=" ".join,
)
def test_a_run_begins_with_what_is_asked(words: list[str], says: list[str]) -> None:
    experiment = build(compose(words))
    first, question = opening(experiment)
    assert [one for one in says if one not in first] == []
    (prompt,) = experiment.task.train_prompts(1, 1, experiment.seed)
    assert " ".join(prompt.question.split())[:60] in question


def test_a_task_without_questions_has_a_line_less() -> None:
    assert len(opening(build(compose(["task=shape", "model=shape/tiny", "eval=none"])))) == 1


DOSE = {
    "aqn/sigma": 0.01,
    "aqn/sigma_share": 0.02,
    "aqn/dose_kl": 0.002,
    "aqn/dose_entropy": 1.25,
    "aqn/norms_perturbed": 5,
}


@pytest.mark.parametrize("noisy", [False, True])
def test_a_run_ends_with_what_it_showed_and_what_to_type(noisy: bool, tmp_path: Path) -> None:
    shutil.copytree(RUNS[-1], tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    first = next(row for row in rows if row["kind"] == "train" and row["step"] == 3)
    first |= DOSE if noisy else {}
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    run = load_run(tmp_path / "run")
    text = "\n".join(ending(run, ["quant=nvfp4", "aqn=exp", "lora.rank=4", "name=x"]))
    for metric in ("reward/mean", "entropy"):
        values = run.series("train", metric)
        assert f"{values.iloc[0]:.3g} to {values.iloc[-1]:.3g}" in text
    dose = "first noise, step 3: sigma 0.01 (2.0% of the median norm scale): KL 0.002, entropy x1.25"
    assert (dose in " ".join(text.split())) == noisy and max(map(len, text.splitlines()[:-4])) <= WIDTH
    (command,) = [line for line in text.splitlines() if "qerl-bench run" in line]
    assert command.endswith("qerl-bench run -m quant=bf16,nvfp4 lora.rank=4")
    assert f"qerl-bench report {tmp_path}" in text


@pytest.mark.parametrize(
    "line",
    [
        "2 quant=fp8 lora.rank=4",
        "2 lora.rank=4",
        "0 quant=fp8 quant.activations=fp8",
        "0 quant=nvfp4 quantizer=mse",
        "0 lora=none",
        "0 experiment=tiny/main",
    ],
)
def test_a_sweep_that_is_suggested_makes_the_run(line: str, tmp_path: Path) -> None:
    points, *words = line.split()
    shutil.copytree(RUNS[-1], tmp_path / "run")
    OmegaConf.save(compose(words), tmp_path / "run" / "config.yaml")
    run = load_run(tmp_path / "run")
    found = [shlex.split(text.partition("-m ")[2]) for text in ending(run, words) if "run -m" in text]
    made = [fingerprint(compose(point)) for sweep in found for point in grid(sweep)[0]]
    assert len(made) == int(points) and made.count(fingerprint(run.config)) == len(found)


def test_a_run_whose_rewards_are_drawn_shows_nothing(tmp_path: Path) -> None:
    shutil.copytree(RUNS[-1], tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    assert ending(load_run(tmp_path / "run"), [])
    config.write_text(config.read_text().replace("name: arithmetic", "name: shape"))
    assert ending(load_run(tmp_path / "run"), []) == []


def test_greedy_answers_of_random_text_are_left_out(tmp_path: Path) -> None:
    shutil.copytree(RUNS[-1], tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    before = summary([tmp_path / "run"])
    assert "even_characters" not in render(before) and before["greedy_start"].notna().to_numpy().all()
    config.write_text(config.read_text().replace("name: arithmetic", "name: even_characters"))
    table = summary([tmp_path / "run"])
    assert table[["greedy_start", "greedy_final", "gain_final"]].isna().to_numpy().all()
    assert table["sampled_final"].notna().to_numpy().all() and "task=even_characters" in render(table)
