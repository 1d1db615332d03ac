"""The program as a user meets it: resume after a kill, identical reruns, and every refusal."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from qerl_bench.__main__ import main
from qerl_bench.commands.eval import main as evaluate_again
from qerl_bench.commands.run import run_experiment
from qerl_bench.config import build, compose
from qerl_bench.model.digest import file_digest
from qerl_bench.sweep.table import sweep_table
from qerl_core.checks import ConfigError
from qerl_core.process.arguments import whole
from tests.parallel import ranks
from tests.short_runs import killed_in_step, without_figures

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "src" / "run.py"
SMALL = [
    "experiment=smoke",
    "task=arithmetic",
    "model.hidden_size=64",
    "model.layers=2",
    "model.intermediate_size=64",
    "model.warm_start_steps=100",
    "task.max_completion_tokens=40",
]
MEASURED = re.compile(r"^(time|time/.*|speed/.*|memory/.*)$")  # what a clock or the memory meter says


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'kernels'}",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def run(*words: str, python: str | Path) -> subprocess.CompletedProcess[str]:
    command = [str(python), str(RUN), *words]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=400)


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the program, in this process, says on stderr before it exits with code 2."""
    with pytest.raises(SystemExit) as end:
        main(["run", *words])
    assert end.value.code == 2
    return whole(capsys.readouterr().err)


def run_dirs(root: Path) -> list[Path]:
    return sorted(path for path in (root / "runs").iterdir() if path.is_dir())


def records(run_dir: Path) -> list[dict]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not MEASURED.match(k)} for line in lines]


def assert_complete(run_dir: Path, logged: bool = True) -> None:
    """`logged`: by Hydra, which gives a run from the command line its run.log."""
    expected = {
        *("config.yaml", "seals.jsonl", "env.json", "metrics.jsonl", "rollouts.jsonl", "eval.json", "samples.parquet"),
        *("checkpoints", "figures", "done.json", *(["run.log"] if logged else [])),
    }
    assert expected <= {file.name for file in run_dir.iterdir()}
    assert {"reward.png", "entropy.png"} <= {file.name for file in (run_dir / "figures").iterdir()}
    done = json.loads((run_dir / "done.json").read_text())
    assert done["wall_s"] > 0
    assert done["peak_memory_gib"] > 0
    assert "eval/accuracy_greedy" in done["final"]


def assert_six_steps_with_noise(run_dir: Path, printed: str, quant: str) -> None:
    """What every run of `experiment=smoke aqn=exp` has and prints."""
    train = [record for record in records(run_dir) if record["kind"] == "train"]
    assert [record["step"] for record in train] == [1, 2, 3, 4, 5, 6]
    stages = {record["aqn/sigma"] for record in train}
    assert len(stages) >= 3
    assert train[0]["aqn/sigma"] == 0
    for record in train[1:]:
        assert record["aqn/norms_perturbed"] == 8
        assert record["aqn/sigma_realised"] == pytest.approx(record["aqn/sigma"], rel=0.15)
        assert record["grad_norm"] > 0 and record["reward/frac_zero_std"] == 0
        assert record["mismatch/noise_logp_abs_max"] > 0
    assert quant in printed
    assert "accuracy" in printed


@pytest.mark.parametrize("quant", ["bf16", "nf4", "mxfp4"])
def test_smoke_writes_a_complete_run_with_every_format(tmp_path, capsys, quant):
    """In this process, which has imported PyTorch; test_artifact.py has NVFP4, in a process of its own."""
    config = compose(["experiment=smoke", f"quant={quant}", "aqn=exp", "rollout.group_size=6", f"root={tmp_path}"])
    run_experiment(build(config), config)
    (run_dir,) = run_dirs(tmp_path)
    assert_complete(run_dir, logged=False)
    assert_six_steps_with_noise(run_dir, capsys.readouterr().out, quant)


def test_a_run_of_no_steps_evaluates_the_base_and_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its numbers are those of step 0 of a run that trains, whose answers the cache then has."""
    printed = []
    for name, steps in (("base", 0), ("trained", 1)):
        few = ["rollout.prompts_per_step=2", "rollout.group_size=4", "model.layers=1", f"steps={steps}"]
        config = compose(["experiment=smoke", "quant=nvfp4", *few, f"root={tmp_path}", f"name={name}"])
        run_experiment(build(config), config)
        printed.append(capsys.readouterr().out)
    base, trained = run_dirs(tmp_path)
    assert [record["step"] for record in records(base)] == [0]
    first = next(record for record in records(trained) if record["kind"] == "eval")
    without_time = [{key: value for key, value in one.items() if key != "time"} for one in (records(base)[0], first)]
    assert without_time[0] == without_time[1]
    assert not (base / "checkpoints").exists() and (base / "done.json").exists() and (base / "prompt.txt").exists()
    assert f"{100 * first['eval/accuracy_sampled']:.1f}" in printed[0] and "figures" not in printed[0]
    with pytest.raises(ConfigError, match=r"steps=0 .*eval=\.\.\."):
        evaluate_again([str(base), "eval.samples=2"])
    for command in (["compare", str(base), str(trained)], ["report", str(tmp_path), f"out={tmp_path / 'report'}"]):
        main(command)
    assert "eval/accuracy_greedy" in capsys.readouterr().out


@pytest.fixture(scope="module")
def learning_root(tmp_path_factory) -> Path:
    """A root whose cache holds a small warm-started model, so that rewards and gradients are not zero."""
    root = tmp_path_factory.mktemp("learning")
    made(root, "straight")
    return root


def made(root: Path, name: str) -> str:
    """What a run of that name, or its continuation, says: in a process of its own, which imports nothing again."""
    words = [*SMALL, "quant=nvfp4", "aqn=exp", "save_every=2", f"name={name}", f"root={root}"]
    ended = ranks.run(words, 1, root / f"{name}.log")
    assert ended.codes == [0], ended.said
    return ended.said


def test_the_environment_names_the_base_weights(learning_root):
    (warm,) = [path for path in (learning_root / "cache" / "runs").iterdir() if path.is_dir()]
    (weights,) = warm.glob("checkpoints/*/model/model.safetensors")
    recorded = json.loads((learning_root / "runs" / "straight" / "env.json").read_text())["base"]
    assert recorded == f"sha256:{hashlib.sha256(weights.read_bytes()).hexdigest()[:16]}"
    made = json.loads((warm / "env.json").read_text())["base"]
    assert made.startswith("untrained: hidden_size=64, layers=2,") and "seed=0" in made


def test_the_warm_start_is_made_once_and_gives_rewards(learning_root):
    (warm,) = [path for path in (learning_root / "cache" / "runs").iterdir() if path.is_dir()]
    finished = (warm / "done.json").stat().st_mtime_ns
    losses = [record["loss"] for record in records(warm)]
    assert losses[-1] < 0.7 * losses[0]
    train = [record for record in records(learning_root / "runs" / "straight") if record["kind"] == "train"]
    assert max(record["reward/mean"] for record in train) > 0
    assert max(record["grad_norm"] for record in train) > 0
    made(learning_root, "again")
    assert (warm / "done.json").stat().st_mtime_ns == finished


def test_both_ways_to_evaluate_agree_to_the_question(learning_root):
    """The warm-started model on 48 problems: eval=task and eval=lm_eval ask, answer and judge alike, step by step."""
    rows = {}
    for way in ("task", "lm_eval"):
        out = learning_root / "evaluated" / way
        evaluate_again([str(learning_root / "runs" / "straight"), f"eval={way}", "eval.questions=48", f"out={out}"])
        found = pd.read_parquet(out / "samples.parquet")
        rows[way] = found[found["mode"] == "greedy"].reset_index(drop=True)
    pd.testing.assert_frame_equal(rows["task"], rows["lm_eval"])
    assert sorted(set(rows["task"]["step"])) == [0, 6]
    assert 0 < rows["task"]["correct"].mean() < 1


def test_two_runs_of_one_seed_agree_bit_for_bit(learning_root):
    made(learning_root, "again")
    runs = [learning_root / "runs" / name for name in ("straight", "again")]
    first, second = (records(path) for path in runs)
    assert first == second
    adapters = [
        (path / "checkpoints" / "step_000006" / "adapter" / "adapter_model.safetensors").read_bytes() for path in runs
    ]
    assert adapters[0] == adapters[1]
    samples = [pd.read_parquet(path / "samples.parquet") for path in runs]
    pd.testing.assert_frame_equal(*samples)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_continues_and_equals_the_uninterrupted_one(learning_root, signum):
    """SIGTERM and Ctrl-C end it after its step with a checkpoint, kill -9 leaves that of step 2."""
    name = f"stopped-{signum}"
    words = [*SMALL, "quant=nvfp4", "aqn=exp", "save_every=2", f"name={name}", f"root={learning_root}"]
    log = learning_root / f"{name}.log"
    process = ranks.start(words, log, sabotage=hears_signals)
    metrics = learning_root / "runs" / name / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (metrics.exists() and '"kind": "train", "step": 3' in metrics.read_text()):
        assert process.is_alive(), "the run ended before it could be stopped"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(process.pid, signum)
    process.join()
    straight, stopped = (learning_root / "runs" / run_name for run_name in ("straight", name))
    kept = max(int(folder.name.removeprefix("step_")) for folder in (stopped / "checkpoints").glob("step_*"))
    if signum != signal.SIGKILL:
        said, named = log.read_text().splitlines()[-1], "SIGTERM: " if signum == signal.SIGTERM else ""
        assert process.exitcode == 128 + signum and kept in (3, 4)
        assert said == f"{named}stopped; step {kept} is saved, and the same command goes on from there"
        reason = "SIGTERM" if signum == signal.SIGTERM else "Ctrl-C"
        assert f"failed: {reason}" in (stopped / "run.log").read_text().splitlines()[-1]
    assert not (stopped / "done.json").exists()
    with open(metrics, "a") as file:
        file.write('{"kind": "train", "step": 4, "ti')  # what a kill in the middle of a write leaves
    continued = time.time()
    assert f"continuing after step {kept}" in made(learning_root, name)
    assert records(stopped) == records(straight)
    assert (stopped / "rollouts.jsonl").read_text() == (straight / "rollouts.jsonl").read_text()
    pd.testing.assert_frame_equal(*(pd.read_parquet(path / "samples.parquet") for path in (stopped, straight)))
    done, env = (json.loads((stopped / name).read_text()) for name in ("done.json", "env.json"))
    assert done["started"] < continued - 0.5 < continued < done["ended"]
    assert done["base"] == env["base"] and done["base"].startswith("sha256:")


def hears_signals(rank: int) -> None:
    """Whatever started the tests, as nohup and shells do in the background, may have ignored Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.slow
def test_ctrl_c_in_the_warm_start_saves_its_step_and_says_so(tmp_path):
    log = tmp_path / "said.log"
    words = [*SMALL, "model=tiny", "model.warm_start_steps=5000", f"root={tmp_path}"]
    process = ranks.start(words, log, sabotage=hears_signals)
    deadline = time.monotonic() + 300
    while not any('"step": 3' in file.read_text() for file in tmp_path.glob("cache/runs/*/metrics.jsonl")):
        assert process.is_alive() and time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    process.join()
    (saved,) = tmp_path.glob("cache/runs/*/checkpoints/step_*")
    step = int(saved.name.removeprefix("step_"))
    assert process.exitcode == 130 and 3 <= step < 100
    assert log.read_text().endswith(
        f"stopped; step {step} of the warm start of model=tiny is saved, and the same command goes on from there\n"
    )


def test_a_killed_warm_start_goes_on_from_step_100_to_the_same_base(tmp_path):
    experiment = build(compose(["model=tiny", *SMALL, "model.warm_start_steps=300"]))
    recipe = [*experiment.model.warm_start_overrides(), *experiment.task.warm_start_overrides()]
    for name in ("alone", "killed"):
        cfg = compose([*recipe, "steps=102", "rollout.prompts_per_step=4", f"root={tmp_path}", f"name={name}"])
        checkpoints = tmp_path / "runs" / name / "checkpoints"
        with without_figures():
            if name == "killed":
                with killed_in_step(102):
                    run_experiment(build(cfg), cfg)
                assert [folder.name for folder in checkpoints.iterdir()] == ["step_000100"]
            run_experiment(build(cfg), cfg)
        assert [folder.name for folder in checkpoints.iterdir()] == ["step_000102"]
    alone, killed = (tmp_path / "runs" / name for name in ("alone", "killed"))
    weights = "checkpoints/step_000102/model/model.safetensors"
    assert file_digest(alone / weights) == file_digest(killed / weights)
    assert records(alone) == records(killed)


def test_a_finished_run_is_not_run_again(learning_root):
    before = (learning_root / "runs" / "straight" / "metrics.jsonl").read_bytes()
    assert "finished before" in made(learning_root, "straight")
    assert (learning_root / "runs" / "straight" / "metrics.jsonl").read_bytes() == before


GSM8K = ["task=gsm8k", f"task.eval_file={ROOT / 'tests' / 'assets' / 'gsm8k_tiny.jsonl'}"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["quant=int3"], "int3"),
        (["lora.rnak=16"], "Did you mean lora.rank?"),
        (["aqn=exp", "aqn.sigma_strat=1"], "Did you mean aqn.sigma_start?"),
        (["aqn.level=0.01"], "aqn=none has no option aqn.level, which belongs to aqn=constant"),
        (["lora.rank=-4"], "lora.rank must be a whole number of at least 1, got -4"),
        (["lora.rank=0", "algo=grpo"], "lora=none"),
        (["lora=none", "quant=nvfp4"], "quant=bf16"),
        (["steps=-1"], "steps must be a whole number of at least 0, got -1"),
        (["steps=0", "eval=none"], "eval=task"),
        (["steps=soon"], "got 'soon'"),
        (["rollout.group_size=1"], "rollout.group_size must be at least 2, got 1"),
        (["aqn=exp", "aqn.sigma_end=0.5"], "sigma_end <= sigma_start"),
        (["device=tpu"], "device must be one of auto, cpu, cuda, got 'tpu'"),
        (["task.operations=[]"], "task.operations"),
        ([*GSM8K, "task.train_file=/nowhere/train.jsonl"], "/nowhere/train.jsonl"),
        (["task=aime24"], "train on bigmath or dapo_math"),
        (["experiment=smoke", "task.max_completion_tokens=4096"], "4096 tokens"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_bad_input_ends_with_one_message_and_code_2(tmp_path, capsys, words, message):
    said = refusal(capsys, *words, f"root={tmp_path}")
    assert message in said
    assert "Traceback" not in said
    assert len([line for line in said.strip().splitlines() if not re.match(r"\d\d:\d\d:\d\d ", line)]) <= 4
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "message"), [("", "empty"), ('{"question": "1+1?", "answer": "#### 2"}\n{"question": \n', "line 2")]
)
def test_a_broken_data_file_is_named(tmp_path, capsys, content, message):
    broken = tmp_path / "train.jsonl"
    broken.write_text(content)
    said = refusal(capsys, *GSM8K, f"task.train_file={broken}", f"root={tmp_path}")
    assert message in said
    assert str(broken) in said


def test_a_training_question_that_is_too_long_is_found_before_the_first_step(tmp_path, capsys):
    """One step draws 2 of the 12 questions: the long one is not among them."""
    train = tmp_path / "train.jsonl"
    long = json.dumps({"question": "1+" * 2048, "answer": "1 #### 1"})
    train.write_text("".join(f'{{"question": "{i}+1?", "answer": "#### {i + 1}"}}\n' for i in range(11)) + long + "\n")
    words = [*GSM8K, f"task.train_file={train}", "model.warm_start_steps=0", "steps=1", "eval=none"]
    said = refusal(capsys, *words, "rollout.prompts_per_step=2", f"root={tmp_path}")
    assert "1 of 12 prompts do not fit" in said and "4096" in said
    assert not (tmp_path / "runs").exists()


def test_a_root_that_cannot_be_written_is_refused(tmp_path, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert "not a writable folder" in refusal(capsys, "experiment=smoke", f"root={blocked}/inside")
    assert blocked.read_text() == "not a folder"


def test_another_config_in_the_same_folder_is_refused_and_nothing_is_lost(learning_root, capsys):
    run_dir = learning_root / "runs" / "straight"
    before = {file: file.read_bytes() for file in run_dir.rglob("*") if file.is_file()}
    said = refusal(capsys, *SMALL, "quant=nvfp4", "aqn=exp", "name=straight", "lora.rank=8", f"root={learning_root}")
    assert "lora.rank is 32 there and 8 here" in said
    assert {file: file.read_bytes() for file in run_dir.rglob("*") if file.is_file()} == before


def test_a_half_written_checkpoint_is_refused_and_nothing_is_lost(learning_root, tmp_path, capsys):
    run_dir = shutil.copytree(learning_root / "runs" / "straight", tmp_path / "runs" / "straight")
    (run_dir / "done.json").unlink()
    trainer = run_dir / "checkpoints" / "step_000006" / "trainer.pt"
    trainer.write_bytes(trainer.read_bytes()[:1000])
    before = {file: file.read_bytes() for file in run_dir.rglob("*") if file.is_file()}
    said = refusal(capsys, *SMALL, "quant=nvfp4", "aqn=exp", "save_every=2", "name=straight", f"root={tmp_path}")
    assert "step_000006 is damaged: trainer.pt" in said
    assert {file: file.read_bytes() for file in run_dir.rglob("*") if file.is_file()} == before


def test_a_sweep_with_a_bad_point_starts_nothing_and_leaves_nothing(tmp_path, programs):
    done = run("experiment=smoke", f"root={tmp_path}", "-m", "lora.rank=8,0", python=programs / "python")
    assert done.returncode == 2
    assert "lora.rank=0" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_sweep_reports_the_failed_run_and_repeats_only_that(tmp_path, programs):
    words = ["experiment=smoke", "steps=2", f"root={tmp_path}", "aqn=constant", "-m", "aqn.level=0.01,1e-12"]
    words.append("rollout.group_size=4")
    words.append("hydra.launcher.slots=2")
    done = run(*words, python=programs / "python")
    assert done.returncode == 1, done.stderr
    assert "1 of 2 runs failed" in done.stderr and "sweep of 2 runs: 0 finished before, 2 to do" in done.stderr
    good, bad = sorted(run_dirs(tmp_path), key=lambda run_dir: not (run_dir / "done.json").exists())
    assert f"{bad}: noise of sigma 1e-12 changed 0 of 8 norms" in whole(done.stderr).split("runs failed")[1]
    assert "changed 0 of 8 norms" in whole((bad / "launch.log").read_text())
    assert done.stdout == f"{sweep_table([good, bad])}\n"
    assert_complete(good)
    assert not (bad / "done.json").exists()
    finished = (good / "done.json").stat().st_mtime_ns
    again = run(*words, python=programs / "python")
    assert again.returncode == 1
    assert "1 finished before, 1 to do" in again.stderr
    assert (good / "done.json").stat().st_mtime_ns == finished


@pytest.mark.parametrize(("slots", "steps"), [(1, 4), (2, 0)], ids=["one at a time", "side by side"])
def test_a_quiet_sweep_prints_steps_and_its_table_alone(tmp_path, programs, slots, steps):
    """Runs side by side, here forks of a loaded parent, write their steps to launch.log in their folders."""
    words = ["experiment=smoke", "steps=2", "optim.warmup_steps=0", "eval=none", f"root={tmp_path}", "device=cpu"]
    words += ["-q", "-m", "seed=0,1", f"hydra.launcher.slots={slots}"]
    forks = slots == 1  # as elsewhere here, in place of the launcher's own
    done = run(
        *words, *(["hydra.launcher.preload=false"] * forks), python=programs / "python" if forks else sys.executable
    )
    assert done.returncode == 0, done.stderr
    assert [line.split("/")[0] for line in done.stderr.splitlines()] == ["step 1", "step 2"] * (steps // 2)
    assert done.stdout == f"{sweep_table(run_dirs(tmp_path))}\n"
    logs = [folder / "launch.log" for folder in run_dirs(tmp_path) if slots > 1]
    assert all(
        [line[:6] for line in log.read_text().splitlines() if line[:5] == "step "] == ["step 1", "step 2"]
        for log in logs
    )
