"""eval=lm_eval: the numbers of eval=task through lm-eval, from the adapted policy; nothing outside the run folder."""

import json
import socket
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import version
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hydra.utils import instantiate

from qerl_bench.engine.hf import HFEngine
from qerl_bench.eval.base import metrics_of
from qerl_bench.eval.lm_eval.spec import LMEval, config_node
from qerl_bench.eval.task import TaskEvaluation
from qerl_core.checks import ConfigError
from qerl_core.records import RENDERED

QUESTIONS = 6
LIMIT = 12  # new tokens


@pytest.fixture(scope="module")
def policy(make_policy):
    """A policy whose adapter moves log-probabilities by several nats and whose answers differ between questions."""
    policy = make_policy(quant="mxfp4", sharp=True, adapted=True)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(5)
    return policy


@pytest.fixture(scope="module")
def engine(policy):
    return HFEngine(policy, max_num_seqs=4)


@pytest.fixture(scope="module")
def task(make_experiment):
    return make_experiment("quant=mxfp4", f"task.max_completion_tokens={LIMIT}").task


@pytest.fixture
def lm(policy, engine):
    pytest.importorskip("lm_eval")
    from qerl_bench.eval.lm_eval.model import EngineLM

    return EngineLM(policy, engine)


@pytest.fixture
def eight_tokens(policy, monkeypatch):
    """eight_tokens(): from here on the model reads this many."""
    return lambda: monkeypatch.setattr(policy.model.config, "max_position_embeddings", 8)


class OtherEngine:
    """The answers of `engine`, changed by `change(rollout)`, inside the context `around()`."""

    def __init__(self, engine, change=lambda rollout: rollout, around=nullcontext):
        self.engine, self.change, self.around = engine, change, around
        self.calls = []  # (prompt ids, Sampling)

    def generate(self, prompts, sampling):
        self.calls.append(([prompt.id for prompt in prompts], sampling))
        with self.around():
            return [self.change(rollout) for rollout in self.engine.generate(prompts, sampling)]


def through_lm_eval(policy, engine, task, folder):
    pytest.importorskip("lm_eval")
    spec = LMEval(name="lm_eval", protocol="held_out", questions=QUESTIONS, quant=None, quantizer=None, kv=None)
    return spec.evaluate(policy, engine, task, SimpleNamespace(path=folder), seed=0)


def through_task(policy, engine, task, folder):
    spec = TaskEvaluation(
        name="task",
        questions=QUESTIONS,
        samples=1,
        k=None,
        temperature=1.0,
        top_p=1.0,
        max_tokens=None,
        every=0,
        every_questions=1,
        at=(),
        at_greedy=True,
        quant=None,
        quantizer=None,
        kv=None,
        also=(),
    )
    return spec.evaluate(policy, engine, task, SimpleNamespace(path=folder), seed=0)


# --- the evaluation


def test_it_repeats_the_greedy_part_of_eval_task_row_by_row(policy, engine, task, tmp_path):
    ours, theirs = (measure(policy, engine, task, tmp_path) for measure in (through_task, through_lm_eval))
    assert theirs.samples == [row for row in ours.samples if row["mode"] == "greedy"]
    assert theirs.scores == [score for score in ours.scores if score.metric.endswith("_greedy")]
    assert len({row["completion"] for row in theirs.samples}) > QUESTIONS // 2
    for settings in (theirs.settings, ours.settings):  # probed on greedy and on sampled completions
        assert settings["adapter_effect"] > 1
        assert settings["engine_gap"] < 1e-4


def test_right_answers_count_and_belong_to_their_questions(policy, engine, task, tmp_path):
    """The engine reads the question from the tokens it was given, and answers every other one of them rightly."""

    def solve(rollout):
        question = policy.tokenizer.decode(rollout.prompt_ids).strip().removesuffix("=?")
        right = question in right_ones
        return replace(rollout, text=f"<think></think><answer>{eval(question) + (not right)}.0</answer>")

    questions = [prompt.id.removeprefix("arithmetic/").removesuffix("=?") for prompt in task.eval_prompts(QUESTIONS)]
    right_ones = questions[::2]
    canned = OtherEngine(engine, solve)
    found = through_lm_eval(policy, canned, task, tmp_path)
    assert [row["correct"] for row in found.samples] == [True, False] * (QUESTIONS // 2)
    assert [row["reward"] for row in found.samples] == pytest.approx([1.2, 0.2] * (QUESTIONS // 2))
    error = (0.3 / 6) ** 0.5  # variance of three zeros and three ones: 6 * 0.25 / 5
    assert metrics_of(found.scores) == pytest.approx(
        {
            "eval/accuracy_greedy": 0.5,
            "eval/accuracy_greedy_stderr": error,
            "eval/accuracy_greedy_truncated": sum(not row["finished"] for row in found.samples) / QUESTIONS,
            "eval/accuracy_greedy_format_failed": 0.0,
            "eval/lenient_greedy": sum(row["correct"] and row["finished"] for row in found.samples) / QUESTIONS,
            "eval/lenient_greedy_stderr": np.std([row["lenient"] for row in found.samples], ddof=1) / QUESTIONS**0.5,
        }
    )
    assert found.samples == [
        row for row in through_task(policy, canned, task, tmp_path).samples if row["mode"] == "greedy"
    ]


def test_one_greedy_call_with_the_limit_of_the_task(policy, engine, task, tmp_path):
    watched = OtherEngine(engine)
    found = through_lm_eval(policy, watched, task, tmp_path)
    ((ids, sampling),) = watched.calls
    assert ids == [f"arithmetic/{i}" for i in range(QUESTIONS)]
    assert (sampling.samples, sampling.temperature, sampling.max_tokens) == (1, 0.0, LIMIT)
    assert found.settings["lm_eval"] == version("lm_eval")
    assert (found.settings["task_version"], found.settings["shots"], found.settings["max_tokens"]) == (2, 0, LIMIT)


def test_an_engine_that_forgets_the_adapter_is_caught(policy, engine, task, tmp_path):
    base_only = OtherEngine(engine, around=policy.without_adapter)
    with pytest.raises(AssertionError, match="answers with the base model"):
        through_lm_eval(policy, base_only, task, tmp_path)


def test_an_adapter_that_nobody_applies_is_caught(policy, engine, task, tmp_path, monkeypatch):
    """Engine and trainer agree perfectly, on the base model."""
    with policy.without_adapter():
        monkeypatch.setattr(policy, "without_adapter", nullcontext)
        with pytest.raises(AssertionError, match="changes no log-probability: it is not applied"):
            through_lm_eval(policy, engine, task, tmp_path)


def test_an_engine_with_other_weights_is_caught(policy, engine, task, tmp_path):
    """Nearer to the adapted policy than to the base, but further away than any rounding."""
    shifted = OtherEngine(engine, lambda rollout: replace(rollout, logprobs=[x - 0.01 for x in rollout.logprobs]))
    with pytest.raises(AssertionError, match=r"engine and trainer are 0\.01 nats apart"):
        through_lm_eval(policy, shifted, task, tmp_path)


def test_no_network_no_cache_no_reseeding(policy, engine, task, tmp_path, stand_in):
    datasets_config = pytest.importorskip("datasets").config
    stand_in(datasets_config, HF_DATASETS_CACHE=tmp_path / "cache", HF_HUB_OFFLINE=False)
    reached_for = []
    stand_in(socket.socket, connect=lambda self, address: reached_for.append(address))
    stand_in(socket, getaddrinfo=lambda *address, **options: reached_for.append(address) or [])
    run = tmp_path / "run"
    run.mkdir()
    before = str(np.random.get_state()), torch.get_rng_state().tolist()
    through_lm_eval(policy, engine, task, run)
    through_lm_eval(policy, engine, task, run)
    assert (str(np.random.get_state()), torch.get_rng_state().tolist()) == before
    assert reached_for == []
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert sorted(str(path.relative_to(run)) for path in run.rglob("*")) == [
        "lm_eval",
        "lm_eval/arithmetic.jsonl",
        "lm_eval/arithmetic.yaml",
    ]


def test_what_it_leaves_behind_is_a_complete_task_of_lm_eval(policy, engine, task, tmp_path):
    through_lm_eval(policy, engine, task, tmp_path)
    first = json.loads((tmp_path / "lm_eval" / "arithmetic.jsonl").read_text().splitlines()[0])
    prompt = task.eval_prompts(1)[0]
    assert (first["id"], first["gold"], first["messages"]) == (prompt.id, prompt.answer, list(prompt.messages))
    assert first["text"] == prompt.id.removeprefix("arithmetic/") + "\n"  # the template of the tiny model

    from lm_eval.tasks import TaskManager

    moved = (tmp_path / "lm_eval").rename(tmp_path / "elsewhere")
    manager = TaskManager(include_path=moved, include_defaults=False)
    loaded = manager.load(["arithmetic"])["tasks"]["arithmetic"]
    doc = loaded.eval_docs[0]
    right = f"<think>thought</think> <answer>{prompt.answer}</answer>"
    assert loaded.doc_to_text(doc) == first["text"]
    assert loaded.process_results(doc, [right]) == {"correct": 1.0, "reward": pytest.approx(1.2)}
    assert loaded.process_results(doc, [prompt.answer]) == {"correct": 0.0, "reward": 0.0}


@pytest.mark.parametrize("name", ["arithmetic", "gsm8k", "aime24", "word_problems"])
def test_the_task_written_down_is_the_task(make_experiment, name):
    spec = make_experiment(f"task={name}").task
    assert instantiate(json.loads(json.dumps(config_node(spec))), _convert_="all") == spec


@pytest.mark.parametrize("questions", [0, -1, 2.5, True, "all"])
def test_questions_is_a_count_or_null(questions):
    with pytest.raises(ConfigError, match=r"eval\.questions must be .*whole number of at least 1"):
        LMEval(name="lm_eval", protocol="held_out", questions=questions, quant=None, quantizer=None, kv=None)


@pytest.mark.usefixtures("no_packages")
def test_without_lm_eval_the_option_says_what_to_install():
    with pytest.raises(ConfigError, match=r"eval=lm_eval needs the package lm_eval.*pip install -e '\.\[eval\]'"):
        LMEval(name="lm_eval", protocol="held_out", questions=None, quant=None, quantizer=None, kv=None).check(None)


def test_the_option_is_light_to_import():
    code = (
        "import sys, qerl_bench.eval.lm_eval.spec; sys.exit(bool({'torch', 'lm_eval', 'datasets'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


@pytest.mark.parametrize("choice", ["quick", "task", "lm_eval", "none"])
def test_every_evaluation_composes_with_the_smoke_experiment(choice):
    from qerl_bench.config import build, compose

    experiment = build(compose(["experiment=smoke", f"eval={choice}"]))
    assert (experiment.eval.name, experiment.steps) == (choice, 6)


# --- generation


def generation(text, i=0, **options):
    from lm_eval.api.instance import Instance

    return Instance(request_type="generate_until", doc={}, arguments=(text, options), idx=0, metadata=("demo", i, 1))


def test_a_context_reaches_the_model_as_it_stands(policy):
    messages = ({"role": "system", "content": "s"}, {"role": "user", "content": "1+2=?"})
    assert policy.prompt_text(messages) == "1+2=?\n"
    same = ({"role": RENDERED, "content": "1+2=?\n"},)
    assert policy.prompt_ids(same) == policy.prompt_ids(messages)
    assert policy.tokenizer.decode(policy.prompt_ids(same)) == "1+2=?\n"


def test_texts_end_at_the_first_stop_string_and_limits_are_kept(policy, engine, lm):
    lm.engine = OtherEngine(engine, lambda rollout: replace(rollout, text="one. two; three\n\nfour"))
    asked = [
        generation("a", 0, until=["\n\n", "; "], max_gen_toks=3),
        generation("b", 1, until=[".", "one"], max_gen_toks=5),
        generation("c", 2, until="\n", max_gen_toks=3),
        generation("d", 3, until=["", "five"], max_tokens=5),
    ]
    assert lm.generate_until(asked) == ["one. two", "", "one. two; three", "one. two; three\n\nfour"]
    calls = [(ids, sampling.max_tokens) for ids, sampling in lm.engine.calls]
    assert calls == [(["demo/0", "demo/2"], 3), (["demo/1", "demo/3"], 5)]
    assert [rollout.prompt.id for rollout in lm.rollouts] == [f"demo/{i}" for i in range(4)]
    assert [policy.tokenizer.decode(rollout.prompt_ids) for rollout in lm.rollouts] == list("abcd")
    assert [len(rollout.token_ids) for rollout in lm.rollouts] == [3, 5, 3, 5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"do_sample": True, "temperature": 0.7}, r"ask for sampling \(.* temperature 0\.7\); set do_sample: false"),
        ({"temperature": 0.7}, "ask for sampling"),
        ({"num_beams": 4}, "num_beams are not supported"),
    ],
)
def test_what_is_not_greedy_is_refused(lm, options, message):
    with pytest.raises(ConfigError, match=f"lm-eval task demo.*{message}"):
        lm.generate_until([generation("a", 0, until=[], **options)])


# --- log-likelihoods


def scoring(*arguments):
    from lm_eval.api.instance import Instance

    return Instance(request_type="loglikelihood", doc={}, arguments=arguments, idx=0, metadata=("demo", 0, 1))


def by_hand(policy, context, continuation):
    """Sum of log-probabilities, and whether each token is the argmax, one token and one forward pass at a time."""
    total, greedy, ids = 0.0, True, list(context)
    for token in continuation:
        with torch.no_grad():
            logits = policy.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        total += torch.log_softmax(logits.double(), -1)[token].item()
        greedy = greedy and int(logits.argmax()) == token
        ids.append(token)
    return total, greedy


def test_loglikelihood_against_one_token_at_a_time(policy, lm):
    pairs = {  # context and continuation as asked, and as scored: lm-eval moves white space to the continuation
        ("17+2=?", "<think>19</think>"): ("17+2=?", "<think>19</think>"),
        ("x", "y"): ("x", "y"),
        ("", "21"): ("<|end|>", "21"),
        ("two \n", "words\u00e9"): ("two", " \nwords\u00e9"),
        ("a longer context than the others", "!"): ("a longer context than the others", "!"),
    }
    expected = [by_hand(policy, lm.tok_encode(context), lm.tok_encode(text)) for context, text in pairs.values()]
    found = lm.loglikelihood([scoring(*pair) for pair in pairs], disable_tqdm=True)
    assert [logprob for logprob, _ in found] == pytest.approx([logprob for logprob, _ in expected], rel=1e-5)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_greedy_means_what_greedy_decoding_writes(policy, engine, lm):
    lm.generate_until([generation(text, i, until=[], max_gen_toks=8) for i, text in enumerate(("17+2=?\n", "5"))])
    requests, off_by_one = [], []
    for rollout in lm.rollouts:
        *kept, last = rollout.token_ids
        requests.append((("", ""), rollout.prompt_ids, rollout.token_ids))
        off_by_one.append((("", ""), rollout.prompt_ids, [*kept, (last + 1) % 256]))
    found = lm._loglikelihood_tokens(requests)
    assert [logprob for logprob, _ in found] == pytest.approx([sum(r.logprobs) for r in lm.rollouts], abs=1e-4)
    assert [greedy for _, greedy in found] == [True, True]
    assert [greedy for _, greedy in lm._loglikelihood_tokens(off_by_one)] == [False, False]


def test_a_batch_of_every_size_scores_each_text_alone(policy, lm):
    pairs = [("1+" * (i % 5 + 1), str(i)) for i in range(35)]
    together = lm.loglikelihood([scoring(*pair) for pair in pairs], disable_tqdm=True)
    alone = [lm.loglikelihood([scoring(*pair)], disable_tqdm=True)[0] for pair in pairs]
    assert [logprob for logprob, _ in together] == pytest.approx([logprob for logprob, _ in alone], rel=1e-5)
    assert [greedy for _, greedy in together] == [greedy for _, greedy in alone]


def test_rolling_loglikelihood_of_short_and_long_texts(policy, lm, eight_tokens):
    end = policy.tokenizer.eos_token_id
    ids = lm.tok_encode("0123456789")
    (whole,) = lm.loglikelihood_rolling([scoring("0123456789")])
    assert whole == pytest.approx(by_hand(policy, [end], ids)[0], rel=1e-5)

    eight_tokens()
    # The first window predicts seven tokens from the end-of-text token on; the last one reads eight tokens, 2..9.
    expected = by_hand(policy, [end], ids[:7])[0] + by_hand(policy, ids[2:7], ids[7:])[0]
    (windowed,) = lm.loglikelihood_rolling([scoring("0123456789")])
    assert windowed == pytest.approx(expected, rel=1e-5)
    assert windowed != pytest.approx(whole, rel=1e-5)


def test_a_context_too_long_loses_its_beginning_and_a_text_too_long_is_refused(policy, lm, eight_tokens):
    eight_tokens()
    (found,) = lm.loglikelihood([scoring("abcdefghij", "xyz")], disable_tqdm=True)
    assert found[0] == pytest.approx(by_hand(policy, lm.tok_encode("fghij"), lm.tok_encode("xyz"))[0], rel=1e-5)
    with pytest.raises(ConfigError, match="8 tokens cannot be scored: the model reads 8"):
        lm.loglikelihood([scoring("a", "stuvwxyz")], disable_tqdm=True)
