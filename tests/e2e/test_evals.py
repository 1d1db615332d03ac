"""`qerl-bench eval`: a finished run under another protocol, its own record untouched."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from qerl_bench.commands import eval as again
from qerl_bench.commands.eval import main
from qerl_bench.commands.run import run_experiment
from qerl_bench.config import build
from qerl_core.checks import ConfigError
from qerl_core.process.arguments import WIDTH
from qerl_core.rundir.finished_run import stored_config

pytestmark = pytest.mark.usefixtures("no_figures")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, make_config: Callable[..., Any], no_figures: None) -> Path:
    """A run that has visibly changed its policy: supervised, with a large learning rate."""
    root = tmp_path_factory.mktemp("root")
    cfg = make_config("quant=mxfp4", "algo=sft", "optim.lr=0.05", f"root={root}", "name=done", "eval.questions=5")
    run_experiment(build(cfg), cfg)
    return root / "runs" / "done"


def contents(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file() and "evals" not in path.relative_to(folder).parts]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_same_protocol_gives_the_same_record_and_leaves_the_run_alone(finished: Path) -> None:
    before = contents(finished)
    main([str(finished), "eval.samples=2"])  # as it was
    (folder,) = (finished / "evals").glob("task-*")
    ours, theirs = (pd.read_parquet(place / "samples.parquet") for place in (finished, folder))
    pd.testing.assert_frame_equal(ours, theirs)
    texts = {step: list(rows["completion"]) for step, rows in theirs.groupby("step")}
    assert len(texts) == 2 and texts[0] != texts[4]  # the adapter answers at step 4, the base at step 0
    settings = [json.loads((place / "eval.json").read_text()) for place in (finished, folder)]
    assert settings[0] == settings[1]
    assert contents(finished) == before


def test_both_parts_of_the_error_are_metrics_of_the_run(finished: Path) -> None:
    """Against the sums of docs/evaluation.md, over the answers that the run kept."""
    rows = pd.read_parquet(finished / "samples.parquet").query("mode == 'sampled'")
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    evaluated = {line["step"]: line for line in lines if line["kind"] == "eval"}
    assert set(evaluated) == {0, 4}
    for step, found in evaluated.items():
        answers = [list(map(float, x)) for _, x in rows[rows["step"] == step].groupby("question")["correct"]]
        assert [len(row) for row in answers] == [2] * 5
        means = [sum(row) / 2 for row in answers]
        centre = sum(means) / 5
        whole = sum((m - centre) ** 2 for m in means) / 4 / 5
        sampling = sum(sum((x - m) ** 2 for x in row) / 1 / 2 for row, m in zip(answers, means, strict=True)) / 5**2
        assert found["eval/accuracy_sampled"] == pytest.approx(centre)
        assert found["eval/accuracy_sampled_stderr"] == pytest.approx(whole**0.5)
        assert found["eval/accuracy_sampled_stderr_sampling"] == pytest.approx(sampling**0.5)
        rest = max(0.0, whole - sampling) ** 0.5
        assert found["eval/accuracy_sampled_stderr_questions"] == pytest.approx(rest)


def test_another_protocol_has_its_own_folder_and_is_done_once(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(finished)
    words = [str(finished), "eval=quick", "eval.questions=3", "eval.samples=4", "eval.k=2", "eval.top_p=0.5"]
    main(words)
    (folder,) = (finished / "evals").glob("quick-*")
    entries = json.loads((folder / "eval.json").read_text())
    assert {entry["n"] for entry in entries} == {3}
    assert {entry["step"] for entry in entries} == {0, 4}
    assert {"eval/gain_greedy", "eval/gain_sampled"} <= {entry["metric"] for entry in entries if entry["step"] == 4}
    assert (entries[0]["settings"]["top_p"], entries[0]["settings"]["k"]) == (0.5, 2)
    assert "eval/pass_at_k" in capsys.readouterr().out
    made = (folder / "done.json").stat().st_mtime_ns
    main(words)
    assert (folder / "done.json").stat().st_mtime_ns == made
    assert "eval/pass_at_k" in capsys.readouterr().out
    assert contents(finished) == before


def test_stdout_has_the_scores_and_stderr_how_they_came_to_be(finished: Path, tmp_path: Path, programs: Path) -> None:
    words = [programs / "qerl-bench", "eval", str(finished), "eval.questions=2", f"out={tmp_path / 'out'}"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == f"{again.render(tmp_path / 'out')}\n", done.stderr
    assert "step 4, 2 questions" in done.stderr and "eval/accuracy" not in done.stderr
    assert max(map(len, done.stderr.splitlines())) <= WIDTH


def test_other_questions_into_another_folder_from_a_run_that_has_moved(finished: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "runs" / "done"
    shutil.copytree(finished, moved, ignore=shutil.ignore_patterns("evals"))
    out = tmp_path / "out"
    main([str(moved), "task.operations=[1]", "seed=7", f"out={out}"])
    rows = pd.read_parquet(out / "samples.parquet")
    assert all(sum(map(question.count, "+-")) == 1 for question in rows["question"])  # two numbers
    assert not (moved / "evals").exists()
    with pytest.raises(ConfigError, match=r"holds a run of another config.*Choose another place: out=DIR$"):
        main([str(moved), "task.operations=[2]", f"out={out}"])


def test_a_seed_changes_the_samples_and_not_the_policy(finished: Path, tmp_path: Path) -> None:
    for seed in (0, 7):
        main([str(finished), f"seed={seed}", f"out={tmp_path / str(seed)}"])
    first, second = (pd.read_parquet(tmp_path / str(seed) / "samples.parquet") for seed in (0, 7))
    for mode, equal in (("greedy", True), ("sampled", False)):
        texts = [list(rows.loc[rows["mode"] == mode, "completion"]) for rows in (first, second)]
        assert (texts[0] == texts[1]) is equal


def test_answers_may_be_longer_than_the_micro_batches_of_training(
    make_config: Callable[..., Any], tmp_path: Path
) -> None:
    words = ["steps=1", f"root={tmp_path}", "name=short", "eval.questions=2", "task.max_completion_tokens=8"]
    cfg = make_config("quant=bf16", "train.micro_batch_tokens=64", *words)
    run_experiment(build(cfg), cfg)
    longer = "task.max_completion_tokens=80"
    with pytest.raises(ConfigError, match=r"train\.micro_batch_tokens=64 cannot hold"):
        build(make_config("train.micro_batch_tokens=64", longer))
    main([str(tmp_path / "runs" / "short"), longer, f"out={tmp_path / 'out'}"])
    rows = pd.read_parquet(tmp_path / "out" / "samples.parquet")
    assert rows["tokens"].max() > 64
    assert "micro_batch_tokens: 64" in (tmp_path / "out" / "config.yaml").read_text()


@pytest.mark.parametrize("group_size", [1, 8])
def test_a_supervised_run_can_be_asked_what_nobody_can_demonstrate(
    make_config: Callable[..., Any], tmp_path: Path, group_size: int
) -> None:
    words = ["steps=1", "eval=none", f"rollout.group_size={group_size}", f"root={tmp_path}", "name=taught"]
    cfg = make_config("quant=bf16", "algo=sft", *words)
    run_experiment(build(cfg), cfg)
    with pytest.raises(ConfigError, match="task=even_characters has no worked solutions"):
        build(make_config("algo=sft", "task=even_characters"))
    asked = ["task=even_characters", "eval=task", "eval.questions=2", "eval.samples=2"]
    main([str(tmp_path / "runs" / "taught"), *asked, f"out={tmp_path / 'out'}"])
    rows = pd.read_parquet(tmp_path / "out" / "samples.parquet")
    assert set(rows["gold"]) == {"even"} and set(rows["step"]) == {0, 1}
    assert "name: sft" in (tmp_path / "out" / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "say what to change. usage: qerl-bench eval RUN_DIR"),
        (["quant=nf4"], "quant=nf4 would change what was trained.* eval, task,"),
        (["lora.rank=2"], "would change what was trained"),
        (["eval.sampels=3"], r"no option eval\.sampels\. Did you mean eval\.samples\?"),
        (["eval.samples=1,2"], "one plain value for each key"),
        (["+eval.x=1"], "one plain value for each key"),
        (["eval=none"], "eval=none evaluates nothing"),
        (["eval.samples=0"], r"eval\.samples must be a whole number of at least 1"),
        (["eval.name=paper"], "eval.name=paper would change the name of eval"),
        (["eval.samples=2", "eval.k=3"], r"eval\.k=3 .* eval\.samples=2"),
        (["eval.top_p=1.5"], r"eval\.top_p .* got 1\.5"),
        (["seed=1", "out=a", "out=b"], "out= takes one value"),
        (["checkpoint=1", "checkpoint=2"], "checkpoint= takes one value"),
    ],
)
def test_words_that_cannot_be_are_refused(finished: Path, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main([str(finished), *words])


def test_a_folder_without_a_finished_run_is_refused_with_a_remedy(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a run: it has no config\.yaml"):
        main([str(tmp_path), "eval=task"])
    with pytest.raises(ConfigError, match=r"first word must be the folder of a run .*steps=0.*; usage"):
        main(["eval=task"])
    with pytest.raises(ConfigError, match=r"it takes one run, and was given 2: .*; usage"):
        main([str(finished), str(tmp_path), "eval=task"])
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    with pytest.raises(ConfigError, match="is the run itself"):
        main([str(copy), "eval=quick", f"out={copy}"])
    (copy / "checkpoints" / "step_000004" / "trainer.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match="is damaged"):
        main([str(copy), "eval=quick"])
    (copy / "done.json").unlink()
    with pytest.raises(ConfigError, match=r"is not finished.*continues it"):
        main([str(copy), "eval=quick"])


def test_the_name_tells_protocols_apart(finished: Path) -> None:
    stored = stored_config(finished)
    names = [
        again.evaluation_name(again.apply_overrides(stored, words.split()))
        for words in ("eval.k=1", "eval.k=2", "eval.k=1.0", "device=cpu eval.k=1", "device=auto eval.k=1", "seed=5")
    ]
    assert len(set(names)) == 4
    assert names[0] == names[2] == names[3]  # the run was made with device=cpu
    assert all(name.startswith("task-") for name in names)
