"""Quantizers that need a text, on tasks that read a data set, and policies that answer on the base of another."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qerl_bench.commands.run import run_experiment
from qerl_bench.config import build
from qerl_bench.experiment_spec import Experiment
from qerl_bench.model.byte_tokenizer import byte_tokenizer
from qerl_bench.model_setup import build_policy
from qerl_bench.quantizer.awq import AWQ
from qerl_bench.quantizer.calibrate import InputGroup
from qerl_bench.quantizer.calibration import Calibration
from qerl_bench.run_setup import on_base_of
from qerl_bench.sweep.check import check
from qerl_bench.task.chat_template import demonstration_ids
from qerl_core.checks import ConfigError

ROWS = [
    {"question": f"What is {a} + {b}?", "answer": f"{a} + {b} = {a + b}.\n#### {a + b}"}
    for a in (3, 4)
    for b in range(6)
]
IDS = torch.arange(24).reshape(2, 12) % 97
CALIBRATED = [(quant, quantizer) for quant in ("nvfp4", "mxfp4") for quantizer in ("awq", "gptq")]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The words of a data set in the shape of GSM8K: ten training questions and two held-out ones."""
    folder = tmp_path_factory.mktemp("data")
    for name, rows in {"train": ROWS[:10], "eval": ROWS[10:]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["task=gsm8k", *(f"task.{name}_file={folder / name}.jsonl" for name in ("train", "eval"))]


def logprobs(policy: Any) -> torch.Tensor:
    with torch.no_grad():
        return policy.token_stats(IDS, IDS > 0, 1.0).logprobs


# --- data sets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("quant", "quantizer"), CALIBRATED)
def test_a_run_calibrates_on_the_training_questions_and_says_so(
    quant: str,
    quantizer: str,
    files: list[str],
    make_config: Callable[..., Any],
    tmp_path: Path,
    no_figures: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    words = (
        "eval=none",
        "steps=1",
        "quantizer.calibration.samples=10",
        f"root={tmp_path}",
        "task.max_completion_tokens=8",
    )
    cfg = make_config(*files, f"quant={quant}", f"quantizer={quantizer}", *words)
    with caplog.at_level("INFO"):
        run_experiment(check(cfg), cfg)
    (record,) = (json.loads(file.read_text()) for file in tmp_path.glob("runs/*/calibration.json"))
    task = build(cfg).task
    shown = task.demonstrations(1, 10, 0)
    assert {one.prompt.question for one in shown} == {row["question"] for row in ROWS[:10]}
    assert record["source"] == "task=gsm8k, demonstrations of seed 0" and record["sequences"] == 10
    prompts, completions = demonstration_ids(byte_tokenizer(), shown, {})
    assert record["tokens"] == sum(map(len, [*prompts, *completions]))
    said = f"quantizer={quantizer} runs 10 sequences, {record['tokens']:,} tokens, of {record['source']}"
    assert any(said in message for message in caplog.messages)


def test_other_text_than_the_task_has(files: list[str], make_config: Callable[..., Any], tmp_path: Path) -> None:
    text = tmp_path / "other.jsonl"
    text.write_text("".join(json.dumps({"text": f"Once upon a time there were {n} stones."}) + "\n" for n in range(5)))
    words = (
        *("eval=none", "quant=nvfp4", "quantizer=gptq"),
        *(f"quantizer.calibration.file={text}", "quantizer.calibration.samples=4"),
    )
    policy = build_policy(check(make_config(*files, *words)), None, "cpu")
    assert policy.calibration is not None
    assert (policy.calibration["source"], policy.calibration["sequences"]) == ("other.jsonl", 4)


REFUSED = {
    "a task without a training part": (["task=aime24"], r"task=aime24 .*no training questions.*calibration\.file=TEXT"),
    "more than the task has": (
        ["quantizer.calibration.samples=11"],
        r"samples=11 .*the 10 training questions.*at most 10",
    ),
    "another column": (["quantizer.calibration.file={folder}/columns.jsonl"], r"columns\.jsonl:2: .*string under text"),
    "too few lines": (["quantizer.calibration.file={folder}/few.jsonl"], r"few\.jsonl gives 2 samples.*samples=256"),
    "no file": (["quantizer.calibration.file={folder}/none.txt"], r"none\.txt is not a file"),
    "no worked solutions": (["task=even_characters"], r"no worked solutions.*calibration\.file=TEXT"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("of_evaluations", [False, True])
def test_what_cannot_calibrate_is_refused_before_a_model_is_loaded(
    case: str,
    of_evaluations: bool,
    files: list[str],
    make_config: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words, message = REFUSED[case]
    (tmp_path / "columns.jsonl").write_text('{"text": "one"}\n{"body": "two"}\n')
    (tmp_path / "few.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (tmp_path / "eval.jsonl").write_text(json.dumps({"problem": "1 + 1", "answer": "2"}) + "\n")
    given = [word.format(folder=tmp_path) for word in words]
    aime = [f"task.eval_file={tmp_path / 'eval.jsonl'}"] if "task=aime24" in given else []
    data = [] if given[0].startswith("task=") else files
    chosen = (
        ["quant=bf16", "eval.quant=nvfp4", "eval.quantizer=gptq"]
        if of_evaluations
        else ["quant=nvfp4", "quantizer=gptq"]
    )
    if of_evaluations and not given[0].startswith("task="):
        chosen = ["quant=nvfp4", "quantizer=gptq", "eval.quantizer=awq"]
    cfg = make_config(*data, *aime, *chosen, *given)
    monkeypatch.setattr("qerl_bench.model.load.load_packed", None)
    with pytest.raises(ConfigError, match=message):
        build(cfg).check_calibration()


# --- answers on another base ------------------------------------------------------------------------------------------


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """AWQ moves factors from 1/4 to 4 whatever the text is: an adapter that does not follow answers otherwise."""

    def scales(self: AWQ, group: InputGroup, weight_format: Any) -> torch.Tensor:
        draw = torch.Generator().manual_seed(len(group.second_moment))
        exponents = 4 * torch.rand(len(group.second_moment), generator=draw) - 2
        return group.averaged_over_repeats(torch.exp2(exponents))

    monkeypatch.setattr(AWQ, "best_scales", scales)


@pytest.fixture(autouse=True)
def few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tests below, calibration by the defaults of an option takes four short texts."""
    if "answering" in request.fixturenames:
        made = Calibration.__init__
        monkeypatch.setattr(
            Calibration, "__init__", lambda self, **words: made(self, **words | {"samples": 4, "length": 32})
        )


def words_of(quant: str, quantizer: str) -> list[str]:
    return [f"quant={quant}", f"quantizer={quantizer}"]


@pytest.mark.parametrize(
    ("trained", "answering"),
    [
        (("bf16", "rtn"), ("nvfp4", "gptq")),
        (("nvfp4", "rtn"), ("nvfp4", "mse")),
        (("nvfp4", "gptq"), ("bf16", "rtn")),
        (("mxfp4", "mse"), ("nvfp4", "rtn")),
    ],
)
def test_the_answers_are_those_of_a_run_on_that_base_with_this_adapter(
    trained: tuple[str, str],
    answering: tuple[str, str],
    make_experiment: Callable[..., Experiment],
    make_policy: Callable[..., Any],
    tmp_path: Path,
) -> None:
    evaluated = (f"eval.quant={answering[0]}", f"eval.quantizer={answering[1]}")
    experiment = make_experiment("model.hidden_size=32", *words_of(*trained), *evaluated)
    policy = make_policy(*words_of(*trained)[1:], quant=trained[0], sharp=True, adapted=True)
    policy.save(tmp_path)
    expected = make_policy(*words_of(*answering)[1:], quant=answering[0], sharp=True)
    expected.load(tmp_path)
    engine = experiment.engine.build(policy)
    with on_base_of(experiment.answering, "eval.quant", experiment, policy, engine) as (copy, _):
        assert torch.equal(logprobs(copy), logprobs(expected))
        assert not torch.equal(logprobs(copy), logprobs(policy))


@pytest.mark.parametrize(
    ("trained", "answering"),
    [(("int8", "awq"), ("bf16", "rtn")), (("bf16", "rtn"), ("int8", "awq")), (("int8", "awq"), ("int8", "mse"))],
)
def test_an_adapter_follows_what_awq_moved(
    trained: tuple[str, str],
    answering: tuple[str, str],
    moved: None,
    make_experiment: Callable[..., Experiment],
    make_policy: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """INT8 hardly rounds, so that the two bases compute the same, and with an adapter that fits both do so too."""
    evaluated = (f"eval.quant={answering[0]}", f"eval.quantizer={answering[1]}")
    experiment = make_experiment("model.hidden_size=32", *words_of(*trained), *evaluated)
    policy = make_policy(*words_of(*trained)[1:], quant=trained[0], sharp=True, adapted=True)
    engine = experiment.engine.build(policy)
    with on_base_of(experiment.answering, "eval.quant", experiment, policy, engine) as (copy, _):
        assert copy.rescaling.inputs.keys() != policy.rescaling.inputs.keys()
        apart = (logprobs(copy) - logprobs(policy)).abs().mean()
        with policy.without_adapter(), copy.without_adapter():
            bases_apart = (logprobs(copy) - logprobs(policy)).abs().mean()
            plain = logprobs(policy)
    effect = (plain - logprobs(policy)).abs().mean()
    policy.save(tmp_path)
    unfitted = make_policy(*words_of(*answering)[1:], quant=answering[0], sharp=True)
    unfitted.load(tmp_path)
    assert bases_apart < 0.2 and effect > 2  # nats
    assert apart < 0.2
    assert (logprobs(unfitted) - logprobs(policy)).abs().mean() > 5 * apart


def test_rollouts_and_trained_norms_cannot_follow_awq(make_experiment: Callable[..., Experiment]) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.quant=mxfp4 .*quantizer=awq.*rtn, mse or gptq"):
        make_experiment("quant=nvfp4", "quantizer=awq", "rollout.quant=mxfp4")
    with pytest.raises(ConfigError, match=r"eval\.quant=bf16 .*lora\.train_norms=false"):
        make_experiment("quant=nvfp4", "quantizer=awq", "eval.quant=bf16", "lora.train_norms=true")
    assert make_experiment("quant=nvfp4", "quantizer=awq", "eval.quant=bf16").answering.quantizer.name == "rtn"


def test_a_quantizer_needs_codes_to_choose(make_experiment: Callable[..., Experiment]) -> None:
    with pytest.raises(
        ConfigError, match=r"eval\.quantizer=gptq chooses codes, and quant=bf16 stores none.*eval\.quant=nvfp4"
    ):
        make_experiment("quant=bf16", "eval.quantizer=gptq")
    with pytest.raises(ConfigError, match=r"eval\.quantizer must be null or one of .*gptq.*'gtpq'"):
        make_experiment("quant=nvfp4", "eval.quantizer=gtpq")
    same = make_experiment("quant=nvfp4", "quantizer=mse", "eval.quantizer=mse")
    assert same.answering is same


def test_a_finished_awq_run_is_evaluated_in_16_bits_as_in_the_run(
    moved: None, make_config: Callable[..., Any], files: list[str], tmp_path: Path, no_figures: None
) -> None:
    from qerl_bench.commands.eval import main as evaluate_again

    words = (*files, "quant=int8", "quantizer=awq", "quantizer.calibration.samples=4", "task.max_completion_tokens=8")
    scored = {}
    for name, answered in {"own": [], "bf16": ["eval.quant=bf16"]}.items():
        cfg = make_config(
            *words, "eval=quick", "eval.questions=2", *answered, f"root={tmp_path}", f"name={name}", "steps=1"
        )
        run_experiment(check(cfg), cfg)
        scored[name] = json.loads((tmp_path / "runs" / name / "eval.json").read_text())
    assert {(e["settings"]["quant"], e["settings"]["quantizer"]) for e in scored["own"]} == {("int8", "awq")}
    assert {(e["settings"]["quant"], e["settings"]["quantizer"]) for e in scored["bf16"]} == {("bf16", "rtn")}
    evaluate_again([str(tmp_path / "runs" / "own"), "eval.quant=bf16", f"out={tmp_path / 'again'}"])
    again = json.loads((tmp_path / "again" / "eval.json").read_text())
    assert [(e["metric"], e["value"], e["step"]) for e in again] == [
        (e["metric"], e["value"], e["step"]) for e in scored["bf16"]
    ]
