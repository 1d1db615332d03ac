"""The pages of docs/how-to are true: their files and commands, as printed, make runs."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from safetensors import safe_open

from qerl_bench.__main__ import main
from qerl_bench.conduct.draft import Budget
from tests.models import builds, gguf_files
from tests.parallel.programs import UNDRAWN
from tests.unpacked import unpack

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "how-to"


LITTLE = "experiment=smoke rollout.group_size=4 model.layers=1 task.max_completion_tokens=8"
TINY = {"experiment=smoke": LITTLE}
SMALL = {  # words of a page -> words of its test
    "model=MODEL": f"model=tiny_untrained {LITTLE}",
    "task=gsm8k": "task=even_characters device=cpu",
    "steps=100": "steps=2 save_every=2 eval.questions=4",
    "formats=nvfp4,bf16": "formats=nvfp4,bf16 questions=4 samples=2 temperatures=0,1 rise=0",
    "minutes=240 runs": "minutes=20 run_minutes=1 runs",
    "aqn=none,matched": "aqn=none,exp",  # random weights have no entropy left to raise
    "minutes=240 out": "slots=2 with_changes=true despite=pass,groups,rise,KL,headroom,gain out",
}


Follow = Callable[..., list[Path]]


@pytest.fixture
def follow(tmp_path: Path, programs: Path) -> Follow:
    """follow("page.md", {words: others}): do what the page says in the folder of the test, with words replaced."""
    variables = {key: value for key, value in os.environ.items() if key != "QERL_ROOT"}
    variables |= {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1", UNDRAWN: "1"}

    def do(page: str, changed: Mapping[str, str] | None = None) -> list[Path]:
        """Write the files, then run the commands. Returns the runs, sorted by name."""
        text = (PAGES / page).read_text()
        for words, others in (changed or {}).items():
            assert words in text
            text = text.replace(words, others)
        files = re.findall(r"`(mine/\S+)`:\n\n```\w+\n(.*?)```", text, flags=re.DOTALL)
        commands = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
        assert commands and len(files) + len(commands) == text.count("```") // 2
        for name, content in files:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(content)
        for command in commands:
            words = ["sh", "-ec", command]
            done = subprocess.run(words, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=500)
            assert done.returncode == 0, done.stderr
        return sorted(run.parent for run in tmp_path.glob("runs/*/done.json"))

    return do


def trained(run: Path) -> list[dict[str, Any]]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if record["kind"] == "train"]


def test_every_page_is_tested() -> None:
    """Four elsewhere: test_python_api.py, test_rented_card.py, tests/vllm for serve.md, and test_sql_page.py."""
    names = ["does-it-help.md", "gguf.md", "import.md", "learning-rate.md", "own-claim.md", "own-format.md"]
    names += ["own-model.md", "own-schedule.md", "own-task.md", "python.md", "rented-card.md", "resume.md"]
    names += ["serve.md", "sql.md"]
    assert [page.name for page in sorted(PAGES.iterdir())] == names


def test_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its commands as printed, on runs of others that lie where the page says."""
    commands = re.findall(r"^    qerl-bench (.*)$", (PAGES / "import.md").read_text(), flags=re.MULTILINE)
    trl, verl, table, ours, theirs, register = map(shlex.split, commands)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "studies").symlink_to(ROOT / "studies")
    runs, study = tmp_path / "my-runs", tmp_path / "my-study"

    def foreign(name: str) -> None:
        for old in (runs, study):
            shutil.rmtree(old, ignore_errors=True)
        unpack(ROOT / "tests" / "assets" / "foreign" / f"{name}.tar.xz", tmp_path)
        (tmp_path / name).rename(runs)

    foreign("trl")
    for seed in (0, 1):
        (runs / f"beta-0-s{seed}").rename(runs / f"bf16-s{seed}")
        (runs / f"beta-0.04-s{seed}").rename(runs / f"fp8-s{seed}")
    assert main(trl) == 0 and "| fp8 - bf16 | reward/mean |" in (study / "verdict.md").read_text()
    foreign("verl")
    assert main(verl) == 0 and "| mxfp8 - bf16 | eval/accuracy_greedy |" in (study / "verdict.md").read_text()
    assert main(theirs) == 0 and "mxfp8: **not tested**" in capsys.readouterr().out  # answers are greedy
    foreign("verl")
    for file in runs.glob("*.yaml"):  # which say how it answers
        file.unlink()
    assert main([*verl, "answers=sampled"]) == 0
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(ours)
    assert end.value.code == 1 and "quant nvfp4: **fail**" in capsys.readouterr().out
    assert main(theirs) == 0 and "mxfp8: **too few**" in capsys.readouterr().out
    shutil.rmtree(study)
    rows = [f"{arm},{seed},{right}" for arm, right in (("bf16", 0.5), ("fp8", 0.4)) for seed in (0, 1)]
    (tmp_path / "numbers.csv").write_text("\n".join(["format,seed,greedy", *rows]) + "\n")
    assert main(table) == 0 and "eval/accuracy_greedy" in (study / "reported.csv").read_text()
    shutil.rmtree(study)
    claim = re.findall(r"```yaml\n(.*?)```", (PAGES / "own-claim.md").read_text(), flags=re.DOTALL)[0]
    (tmp_path / "mine" / "claim").mkdir(parents=True)
    (tmp_path / "mine" / "claim" / "first_entropy.yaml").write_text(claim)
    assert main(register) == 0 and main(["check", "my-study"]) == 0


@pytest.mark.slow
def test_own_claim(tmp_path: Path, follow: Follow) -> None:
    assert len(follow("own-claim.md", {"experiment=smoke": f"{LITTLE} steps=2"})) == 4
    (row,) = (tmp_path / "verdicts" / "mine.md").read_text().splitlines()[-1:]
    assert row.startswith("| Somebody (arXiv 2700.00001) | NVFP4 starts surer | `python src/run.py experiment=smoke")
    assert "no runs" not in row and "nvfp4 - bf16: ×" in row


@pytest.mark.slow
def test_own_schedule(follow: Follow) -> None:
    runs = follow("own-schedule.md", TINY)
    assert sorted([record["aqn/sigma"] for record in trained(run)] for run in runs) == [
        [0.01, 0.01, 0.005, 0.005, 0.0025, 0.0025],
        [0.02, 0.02, 0.01, 0.01, 0.005, 0.005],
    ]
    for run in runs:
        environment = json.loads((run / "env.json").read_text())
        assert list(environment["own_code"]) == ["halving.py"]


@pytest.mark.slow
def test_own_format(
    tmp_path: Path, follow: Follow, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (run,) = follow("own-format.md", TINY)
    assert "-fp6-" in run.name and all(record["grad_norm"] > 0 for record in trained(run))
    environment = json.loads((run / "env.json").read_text())
    assert environment["own_folders"] == [str(tmp_path / "mine")] and [*environment["own_code"]] == ["fp6.py"]
    layers = pd.read_parquet(run / "layers.parquet")
    assert {*layers["quant"]} == {"fp6"} and layers["relative_error"].between(0.05, 0.06).all()
    scores = json.loads((tmp_path / "again" / "eval.json").read_text())
    assert {(score["n"], score["settings"]["quant"]) for score in scores} == {(4, "fp6")}
    assert run.name in (tmp_path / "report" / "index.html").read_text()
    assert '"fp6"' in (tmp_path / "probe" / "probe.json").read_text()
    packed = [sum("weight_packed" in name for name in tensors_of(tmp_path / part)) for part in ("merged", "packed")]
    assert packed == [0, len(layers)]
    monkeypatch.chdir(tmp_path)
    for words, said in {  # without the folder first: a process keeps it
        (f"runs/{run.name}",): f"--config-dir {tmp_path / 'mine'}",
        (f"runs/{run.name}", "quant=fp6", "--config-dir", "mine"): "quant=fp6 has no name in checkpoints of other",
        ("model=tiny_untrained", "quant=fp6", "--config-dir", "mine"): "quant=fp6 has no name in checkpoints of other",
    }.items():
        with pytest.raises(SystemExit) as ended:
            main(["export", *words, "out=refused"])
        assert ended.value.code == 2 and said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "refused").exists()


def tensors_of(folder: Path) -> list[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return [*file.keys()]


@pytest.mark.slow
def test_own_task_and_reward(follow: Follow) -> None:
    brief, run = sorted(
        follow("own-task.md", TINY), key=lambda run: "name: spelling" in (run / "config.yaml").read_text()
    )
    assert all(record["reward/mean"] < 0 for record in trained(brief))  # wrong, and longer than nothing
    assert [*json.loads((brief / "env.json").read_text())["own_code"]] == ["brief.py"]
    assert "-spelling-" not in run.name and "name: spelling" in (run / "config.yaml").read_text()
    groups = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    assert groups[0]
    near = [record["reward/near"] for record in trained(run)]
    assert all(0 < value < 1 for value in near)
    assert [record["reward/mean"] for record in trained(run)] == pytest.approx([0.5 * value for value in near])


@pytest.mark.slow
def test_own_model(tmp_path: Path, follow: Follow) -> None:
    builds.build("llama", tmp_path / "checkpoints" / "mini")
    (run,) = follow("own-model.md")
    assert run.name.startswith("mini-nvfp4-exp-grpo-")
    assert all(record["grad_norm"] > 0 for record in trained(run))
    assert trained(run)[-1]["aqn/norms_perturbed"] > 0


@pytest.mark.slow
def test_a_gguf_file_and_a_dithered_copy(tmp_path: Path, follow: Follow) -> None:
    (tmp_path / "models").mkdir()
    file = gguf_files.write(tmp_path / "models" / "mini.gguf", gguf_files.model_of("qwen2"), "Q4_1")
    short = {"aqn=exp experiment=smoke": "aqn=exp experiment=smoke steps=1 task.max_completion_tokens=4"}
    environments = [json.loads((run / "env.json").read_text()) for run in follow("gguf.md", short)]
    assert {environment["gguf"]["dither"] for environment in environments} == {None, 1}
    assert len({environment["base"] for environment in environments}) == 2
    for environment in environments:
        assert environment["gguf"]["digest"] == f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()[:16]}"


@pytest.mark.slow
def test_resume_here_and_elsewhere(tmp_path: Path, follow: Follow) -> None:
    """The first command is killed behind a checkpoint."""
    first = f"qerl-bench run {LITTLE} steps=8 save_every=2 name=mine || true"
    saved = "until test -e runs/mine/checkpoints/step_000002; do sleep 0.1; done"
    stopped = f"{first.removesuffix(' || true')} & {saved}; kill -9 $!"
    (run,) = follow("resume.md", TINY | {first: stopped})
    steps = [record["step"] for record in trained(run)]
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8] and (run / "env_1.json").is_file()
    elsewhere = tmp_path / "elsewhere" / "runs" / "mine"
    assert (elsewhere / "done.json").is_file() and (elsewhere / "env_2.json").is_file()


def test_rates_of_the_table_are_those_of_the_steps(make_experiment: Any) -> None:
    rows = re.findall(r"^\| `(\w+)`.*\| ([-e\d. ]+) \|$", (PAGES / "learning-rate.md").read_text(), re.MULTILINE)
    assert [name for name, _ in rows] == ["constant", "linear", "cosine"]
    for name, rates in rows:
        optim = make_experiment("steps=8", "optim.lr=1e-4", "optim.warmup_steps=2", f"optim.schedule={name}").optim
        assert [f"{optim.lr_at(step, 8):.2e}" for step in range(1, 9)] == rates.split()


@pytest.mark.slow
def test_a_learning_rate_with_warm_up_and_decay(follow: Follow) -> None:
    (run,) = follow("learning-rate.md", TINY)
    rates = [record["lr"] for record in trained(run)]
    assert rates[2] == max(rates) and rates[-1] == pytest.approx(4.95e-6, rel=1e-3)


@pytest.mark.slow
def test_does_it_help(tmp_path: Path, follow: Follow) -> None:
    runs = follow("does-it-help.md", SMALL)
    design = yaml.safe_load((tmp_path / "noise" / "study.yaml").read_text())
    assert [*design["arms"]] == ["none", "exp"] and (tmp_path / "probe" / "probe.html").is_file()
    assert len(runs) == len(design["arms"]) * design["seeds"]  # the first run is one of them
    page = (tmp_path / "report" / "index.html").read_text()
    assert "<td>exp - none</td>" in page and page.index("exp - none") < page.index('id="verdicts"')


def test_the_table_of_what_seeds_find_is_computed() -> None:
    rows = re.findall(r"^\| (\d+) \| (\S+) points \|$", (PAGES / "does-it-help.md").read_text(), re.MULTILINE)
    assert [seeds for seeds, _ in rows] == ["4", "8", "16", "32"]
    budget = Budget(
        minutes=9, run_minutes=0.1, slots=1, models=1, arms=2, formats=1, answers=256, dosed=0, margin=1, sd=3
    )
    assert [f"{budget.detectable(int(seeds)):.1f}" for seeds, _ in rows] == [found for _, found in rows]
