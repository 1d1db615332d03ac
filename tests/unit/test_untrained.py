"""The evaluation before training, remembered: equal files for equal policies, and nothing where anything differs."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from qerl_bench.commands.run import run_experiment
from qerl_bench.config import build
from qerl_bench.engine.hf import HFEngine
from qerl_bench.eval import task, untrained
from qerl_bench.eval.task import TaskEvaluation
from qerl_bench.eval.untrained import OF_TRAINING, OF_TRAINING_IN, key_of_untrained
from qerl_bench.experiment_spec import Experiment
from qerl_bench.model import check_cache
from qerl_bench.model.check_cache import exclusively, recall, remember
from tests.failing import shortages

pytestmark = pytest.mark.usefixtures("no_figures")
SHORT = ("steps=1", "save_every=1", "aqn=none")
TIMES = ("time", "speed/", "memory/", "wall", "energy")


@pytest.fixture
def asked(listen: Callable[..., Any]) -> list[Any]:
    """Grows with every evaluation that is made."""
    return listen(TaskEvaluation, "evaluate")


@pytest.fixture
def run(make_config: Callable[..., Any]) -> Callable[..., Path]:
    """run(root, name, *words): the folder of a run of one step."""

    def made(root: Path, name: str, *words: str) -> Path:
        cfg = make_config(*SHORT, *words, f"root={root}", f"name={name}")
        run_experiment(build(cfg), cfg)
        return root / "runs" / name

    return made


def written(folder: Path) -> dict[str, Any]:
    """All that a run says of its evaluations and of its training, but for times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [{key: value for key, value in line.items() if not key.startswith(TIMES)} for line in lines]
    names = ("eval.json", "formats.json", "preflight.json", "engine.json", "prompt.txt")
    texts = {name: (folder / name).read_text() for name in names if (folder / name).exists()}
    texts["preflight.json"] = ""  # says that the comparison was remembered, too
    samples = (folder / "samples.parquet").read_bytes()
    rollouts = (folder / "rollouts.jsonl").read_text()
    return texts | {"samples": samples, "metrics": metrics, "rollouts": rollouts}


WAYS_TO_TRAIN = {
    "as before": (),
    "noise on norms": ("aqn=exp", "steps=2"),
    "noise on adapters": ("aqn=exp", "steps=2", "noise.where=adapters"),
    "another algorithm": ("algo=dapo", "algo.on_no_signal=continue", "optim.lr=0.05"),
    "demonstrations": ("algo=sft",),
    "another reward": ("reward=random", "optim.lr=0.05"),
    "more of everything": (
        *("steps=3", "save_every=2", "rollout.group_size=2", "rollout.temperature=0.7", "rollout.lag=1"),
        *("train.micro_batch_tokens=64", "train.updates_per_batch=2", "train.kept_groups=2", "kl.coef=0.1"),
        *("eval.every=1", "eval.at=[2]", "eval.at_greedy=false"),
        *("train.on_nonfinite=skip", "train.entropy_coef=0.01", "importance_sampling.mode=truncate"),
    ),
    "another batch": (
        *("rollout.prompts_per_step=4", "eval.every_questions=2", "train.mismatch_share=0.5", "eval.also=[bf16]"),
    ),
}


BASES = {
    "adapter": ("quant=nvfp4",),
    "all weights": ("lora=none", "quant=bf16"),
    "norms": ("lora.train_norms=true", "model.dtype=bfloat16"),
}
PAIRS = [("adapter", way) for way in WAYS_TO_TRAIN] + [("all weights", "noise on norms"), ("norms", "noise on norms")]


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For the first run on each base, which others only read."""
    return {base: tmp_path_factory.mktemp("first") for base in BASES}


@pytest.mark.parametrize(("base", "way"), PAIRS)
def test_runs_of_one_base_write_what_they_would_alone(
    base: str, way: str, tmp_path: Path, run: Callable[..., Path], asked: list[Any], roots: dict[str, Path]
) -> None:
    words = (*BASES[base], *WAYS_TO_TRAIN[way])
    if not any(roots[base].iterdir()):
        run(roots[base], "first", *BASES[base])
    shutil.copytree(roots[base], tmp_path / "shared")
    del asked[:]
    second = run(tmp_path / "shared", "second", *words)
    shared = len(asked)
    apart = run(tmp_path / "apart", "second", *words)
    assert len(asked) == 2 * shared + 1
    assert written(second) == written(apart)


def test_a_run_with_another_seed_is_asked_no_greedy_answer_again(
    tmp_path: Path, run: Callable[..., Path], listen: Callable[..., Any]
) -> None:
    """And writes what it would alone, also where what is kept of them is damaged."""
    graded = listen(task, "grade_rollouts")
    words = ("quant=nvfp4", "seed=1")
    apart = run(tmp_path / "apart", "second", *words)
    run(tmp_path / "shared", "first", "quant=nvfp4")
    del graded[:]
    second = run(tmp_path / "shared", "second", *words)
    assert [mode for *_, mode in graded] == ["sampled", "greedy", "sampled"]
    assert written(second) == written(apart)
    (file,) = (tmp_path / "shared" / "cache" / "evaluations" / "greedy").glob("*.json")
    changed = json.loads(file.read_text())
    changed["measured"]["samples"].pop()
    file.write_text(json.dumps(changed | {"sha256": check_cache._seal(changed["measured"])}))
    for word, more in (("seed=2", 2), ("seed=3", 1), ("eval.top_p=0.9", 2), ("task.max_completion_tokens=10", 2)):
        del graded[:]
        run(tmp_path / "shared", word.replace("=", "-"), "quant=nvfp4", word)
        assert [mode for *_, mode in graded].count("greedy") == more, word


def test_every_option_of_training_is_one_that_a_way_to_train_changes(make_experiment: Callable[..., Any]) -> None:
    """But for those that change nothing in numbers at all."""
    plain = vars(make_experiment(*SHORT))
    changed: set[str] = set()
    for words in WAYS_TO_TRAIN.values():
        other = vars(make_experiment(*SHORT, *words))
        changed |= {name for name in other if other[name] != plain[name]}
        for option in OF_TRAINING_IN:
            fields = vars(other[option])
            changed |= {f"{option}.{name}" for name in fields if fields[name] != getattr(plain[option], name)}
    outside = {"name", "root", "device", "save_on_term", "checkpoints", "logger"}
    assert changed >= OF_TRAINING - outside
    assert changed >= {f"{option}.{name}" for option, names in OF_TRAINING_IN.items() for name in names}


def test_of_processes_that_ask_the_same_one_asks(tmp_path: Path) -> None:
    """The second waits for the first, and is told; another key waits for nobody."""
    key, began, asked = {"base": 1}, threading.Event(), []

    def ask(name: str) -> None:
        with exclusively(key, tmp_path, "the evaluation"):
            if recall(key, tmp_path) is None:
                began.set()
                with exclusively({"base": 2}, tmp_path, "another"):
                    time.sleep(0.3)
                asked.append(name)
                remember(key, {"scores": [name]}, tmp_path)

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("first", "second")]
    threads[0].start()
    began.wait(10)
    threads[1].start()
    for thread in threads:
        thread.join(10)
    assert asked == ["first"]
    assert recall(key, tmp_path) == {"scores": ["first"]}


def test_no_process_waits_where_nothing_can_be_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        exclusively({"base": 1}, tmp_path / "file" / "below", "it"),
        exclusively({"base": 1}, tmp_path / "file" / "below", "it"),
    ):
        assert recall({"base": 1}, tmp_path / "file" / "below") is None


OTHERS = {
    "seed": ("seed=1",),
    "dtype": ("model.dtype=bfloat16",),
    "adapter": ("lora.rank=2",),
    "trained norms": ("lora.train_norms=true",),
    "dropout": ("lora.dropout=0.1",),
    "samples": ("eval.samples=3",),
    "temperature": ("eval.temperature=0.5",),
    "nucleus": ("eval.top_p=0.9",),
    "questions": ("eval.questions=3",),
    "limit": ("eval.max_tokens=8",),
    "served": ("eval.quant=bf16",),
    "sampled": ("rollout.quant=bf16",),
    "task": ("task.max_completion_tokens=10",),
    "rows": ("engine.max_num_seqs=2",),
    "invariant": ("engine.invariant=true",),
    "kernel": ("kernel=torch",),
    "packing": ("train.packing=false",),
    "recompute": ("train.recompute=full",),
    "quantizer": ("quantizer=mse",),
    "weights": ("model.layers=1",),
}


@pytest.fixture
def key(make_policy: Callable[..., Any], make_experiment: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """key(*words, **changes): of the evaluation of an untrained policy with these options."""

    def made(*words: str, quant: str = "nvfp4", ranks: int = 1, adapted: bool = False, digest: str | None = "") -> Any:
        experiment: Experiment = make_experiment(*words, f"quant={quant}")
        policy = make_policy(adapted=adapted)
        policy.digest = str(vars(experiment.model)) if digest == "" else digest
        return key_of_untrained(vars(experiment), policy, None, ranks)

    yield made


def test_all_that_may_change_an_answer_is_in_the_key(key: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {name: key(*words) for name, words in OTHERS.items()}
    keys |= {"plain": key(), "two ranks": key(ranks=2), "format": key(quant="mxfp4")}
    for owner, name, value in (
        (check_cache, "code_digest", "other"),
        (check_cache, "versions", {"torch": "1", "transformers": "1"}),
        (untrained, "installed", [("sympy", "0")]),
        (torch, "get_num_threads", 77),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda value=value: value)
            keys[name] = key()
    assert None not in keys.values()
    assert len({json.dumps(one, sort_keys=True) for one in keys.values()}) == len(keys)
    assert keys["plain"] == key()


def test_a_part_that_is_not_known_is_no_key(
    key: Callable[..., Any], make_experiment: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert key(digest=None) is None
    assert key(adapted=True) is None  # an adapter that adds something
    assert key("eval=none") is None
    assert key("quantizer=gptq") is None
    vllm = type("VLLM", (), {"name": "vllm"})()
    options = vars(make_experiment())
    assert key_of_untrained(options | {"engine": vllm}, None, None, 1) is None  # type: ignore[arg-type]
    monkeypatch.setattr(check_cache, "versions", lambda: {"torch": None, "transformers": "5"})
    assert key() is None


def test_other_files_beside_the_weights_and_weights_written_again_count(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    before = untrained.files_of(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{ }")
    after = untrained.files_of(tmp_path)
    assert before["model.safetensors"] == after["model.safetensors"] and before != after
    (tmp_path / "model.safetensors").write_text("[]")
    assert untrained.files_of(tmp_path)["model.safetensors"] != after["model.safetensors"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"measured": {}}', '{"key": {}, "measured": {}}'])
def test_a_damaged_memory_is_made_again(
    content: str, tmp_path: Path, run: Callable[..., Path], asked: list[Any]
) -> None:
    first = run(tmp_path, "first")
    (file,) = (tmp_path / "cache" / "evaluations").glob("*.json")
    whole = file.read_text()
    file.write_text(content)
    del asked[:]
    second = run(tmp_path, "second")
    assert len(asked) == 2 and file.read_text() == whole
    assert written(first) == written(second)


def other_score(measured: dict[str, Any]) -> None:
    measured["scores"][0]["value"] += 0.25


def verdicts_turned(measured: dict[str, Any]) -> None:
    measured["samples"] = [row | {"correct": not row["correct"]} for row in measured["samples"]]


HARM: dict[str, Callable[[dict[str, Any]], object]] = {
    "other score": other_score,
    "a score of 9": lambda measured: measured["scores"][0].update(value=9.0),
    "other error": lambda measured: measured["scores"][0].update(stderr=0.0123),
    "verdicts turned": verdicts_turned,
    "no scores": lambda measured: measured.pop("scores"),
    "a score less": lambda measured: measured["scores"].pop(),
    "a field more": lambda measured: measured["scores"][0].update(more=1),
    "a sample less": lambda measured: measured["samples"].pop(),
    "no samples": lambda measured: measured.update(samples=[]),
    "rows that are none": lambda measured: measured.update(samples=[1, 2]),
    "a column less": lambda measured: measured["samples"][0].pop("finished"),
    "settings of a list": lambda measured: measured.update(settings=[1]),
}


def test_what_was_changed_in_the_memory_is_not_remembered(
    tmp_path: Path, run: Callable[..., Path], asked: list[Any], make_config: Callable[..., Any]
) -> None:
    """By its digest; with that made again, because scores are not those of samples, or not of all questions."""
    first = run(tmp_path, "first")
    (file,) = (tmp_path / "cache" / "evaluations").glob("*.json")
    whole, experiment = file.read_text(), build(make_config(*SHORT))
    content = json.loads(whole)
    assert recall(content["key"], file.parent) == content["measured"]
    assert untrained.evaluation_of(content["measured"], experiment.eval, experiment.task) is not None
    for name, harm in HARM.items():
        changed = json.loads(whole)
        harm(changed["measured"])
        assert untrained.evaluation_of(changed["measured"], experiment.eval, experiment.task) is None, name
        file.write_text(json.dumps(changed))
        assert recall(content["key"], file.parent) is None, name
    file.write_text(json.dumps({"key": content["key"], "measured": content["measured"]}))  # of an earlier version
    assert recall(content["key"], file.parent) is None
    changed = json.loads(whole)
    other_score(changed["measured"])
    changed["sha256"] = check_cache._seal(changed["measured"])
    file.write_text(json.dumps(changed))
    del asked[:]
    assert written(first) == written(run(tmp_path, "second"))
    assert len(asked) == 2 and file.read_text() == whole


def test_a_shortage_of_memory_is_not_remembered(
    tmp_path: Path, run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with shortages(HFEngine, "_generate", 1) as calls:
        run(tmp_path, "first")
    assert len(calls) > 1 and not list((tmp_path / "cache" / "evaluations").glob("*.json"))


def test_a_cache_that_cannot_be_written_stops_nothing(tmp_path: Path, run: Callable[..., Path]) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "evaluations").write_text("a file")
    assert (run(tmp_path, "first") / "eval.json").exists()
