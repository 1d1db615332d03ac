"""Prompts and ends of turn, read back: BOS, the token that ends a turn, and the words of every message."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import processors
from transformers import LlamaConfig

from qerl_bench.config import compose
from qerl_bench.config import spec as build_spec
from qerl_bench.engine.base import Sampling, make_rollouts
from qerl_bench.model.byte_tokenizer import byte_tokenizer
from qerl_bench.model.policy import Policy
from qerl_bench.model.token_ids import stop_ids
from qerl_bench.quantizer.calibration import Calibration
from qerl_bench.task.chat_template import check_template, demonstration_ids, end_of_turn, plain_ids, prompt_ids
from qerl_core.checks import ConfigError
from qerl_core.records import RENDERED, Demonstration, Message, Prompt

END, BEGIN, TURN = 257, 262, 263  # ids of end of text, begin of text, and end of turn
SAY = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|eot|>{% endfor %}"
OPEN = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
PLAIN: tuple[Message, ...] = ({"role": RENDERED, "content": "Question: 2+2?\n\nAnswer:\n"},)
CHAT: tuple[Message, ...] = ({"role": "user", "content": "2+2?"},)


def tokenizer(template: str | None = SAY + OPEN, begins: bool = True) -> Any:
    """Bytes, with begin and end of text, an end of turn and roles; it `begins` a text by its post-processor."""
    made = byte_tokenizer()
    made.add_special_tokens(
        {"bos_token": "<|begin|>", "additional_special_tokens": ["<|eot|>", "<|user|>", "<|assistant|>"]}
    )
    assert made.convert_tokens_to_ids(["<|begin|>", "<|eot|>"]) == [BEGIN, TURN]
    if begins:
        bos = ("<|begin|>", BEGIN)
        made.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[bos]
        )
    made.chat_template = template
    return made


def demonstration(messages: tuple[Message, ...], completion: str = "4") -> Demonstration:
    return Demonstration(prompt=Prompt(id="q", messages=messages, answer="4"), completion=completion)


# --- base models are asked without BOS: https://github.com/huggingface/trl/issues/3520 -------------------------------


def test_a_text_that_no_template_wrote_has_the_ids_of_the_tokenizer() -> None:
    base, text = tokenizer(None), PLAIN[0]["content"]
    assert plain_ids(base, text) == base(text)["input_ids"] and plain_ids(base, text)[0] == BEGIN
    assert plain_ids(base, f"<|begin|>{text}") == base(text)["input_ids"]  # once
    assert demonstration_ids(base, [demonstration(PLAIN)], None)[0] == [base(text)["input_ids"]]
    without = tokenizer(None, begins=False)
    assert plain_ids(without, text) == without(text)["input_ids"] and BEGIN not in plain_ids(without, text)


def test_a_chat_prompt_stays_as_its_template_writes_it() -> None:
    for template, starts in ((SAY + OPEN, False), ("{{ bos_token }}" + SAY + OPEN, True)):
        model = tokenizer(template)
        text = "<|begin|>" * starts + "<|user|>2+2?<|eot|><|assistant|>"
        ids = model(text, add_special_tokens=False)["input_ids"]
        assert prompt_ids(model, [CHAT], [text]) == [ids]
        assert demonstration_ids(model, [demonstration(CHAT)], {})[0] == [ids]
        assert ids.count(BEGIN) == starts


def test_a_space_that_the_tokenizer_puts_before_a_text_is_there(tmp_path: Path) -> None:
    """As Llama 2 and Mistral: not between a BOS that is written out and the text."""
    from tests.models.test_gguf_tokenizer import read, sentencepiece_keys

    base = read(tmp_path, sentencepiece_keys(add_space_prefix=None), template=None)
    ids = base("ab")["input_ids"]
    assert base.convert_ids_to_tokens(ids) == ["<bos>", "▁ab"]
    assert plain_ids(base, "ab") == ids == plain_ids(base, "<bos>ab")


def test_a_policy_asks_its_base_with_bos(make_policy: Any) -> None:
    policy: Policy = make_policy()
    policy.tokenizer, policy.rows = tokenizer(None), BEGIN + 1
    task = build_spec(compose(["task=arithmetic", "task.template=plain"]), "task")
    prompt = task.train_prompts(1, 1, 0)[0]
    assert policy.ids_of(prompt) == policy.tokenizer(prompt.messages[0]["content"])["input_ids"]


@pytest.mark.parametrize("begins", [True, False])
def test_lm_eval_scores_texts_with_bos(begins: bool) -> None:
    pytest.importorskip("lm_eval")
    from qerl_bench.eval.lm_eval.model import EngineLM

    base = tokenizer(None, begins)
    lm = EngineLM(SimpleNamespace(tokenizer=base), SimpleNamespace())  # type: ignore[arg-type]
    context, continuation = lm._encode_pair("2+2=", "4")
    assert [*context, *continuation] == base("2+2=4")["input_ids"] and len(continuation) == 1
    assert lm.tok_encode("4", add_special_tokens=False) == base("4", add_special_tokens=False)["input_ids"]
    scored: list[Any] = []
    lm._loglikelihood_tokens = lambda requests, **_: scored.extend(requests) or [(0.0, True)] * len(requests)  # type: ignore[method-assign]
    lm.policy.model = SimpleNamespace(config=LlamaConfig(max_position_embeddings=99))  # type: ignore[assignment]
    lm.loglikelihood_rolling([SimpleNamespace(arguments=("2+2=4",))])  # type: ignore[list-item]
    ((_, prefix, rest),) = scored
    assert [*prefix, *rest] == [BEGIN, *base("2+2=4", add_special_tokens=False)["input_ids"]]  # once


def test_lm_eval_asks_our_questions_as_training_does(make_policy: Any) -> None:
    """Also where the tokenizer begins texts with BOS and the chat template does not."""
    pytest.importorskip("lm_eval")
    from qerl_bench.eval.lm_eval.model import EngineLM

    policy: Policy = make_policy()
    policy.tokenizer = tokenizer()
    policy.rows = len(policy.tokenizer)
    lm = EngineLM(policy, SimpleNamespace())  # type: ignore[arg-type]
    for messages in (CHAT, PLAIN):
        request: Any = SimpleNamespace(task_name="t", doc_id=0, doc={"messages": list(messages)})
        request.arguments = (policy.prompt_text(messages), {})
        assert policy.ids_of(lm._prompt(request)) == policy.prompt_ids(messages)
        assert (policy.prompt_ids(messages)[0] == BEGIN) == (messages is PLAIN)
    theirs: Any = SimpleNamespace(task_name="t", doc_id=0, doc={}, arguments=("2+2=", {}))
    assert policy.ids_of(lm._prompt(theirs)) == policy.tokenizer("2+2=")["input_ids"]


def test_calibration_text_begins_with_bos(tmp_path: Path) -> None:
    base = tokenizer(None)
    task: Any = SimpleNamespace()
    lines, text = tmp_path / "texts.jsonl", tmp_path / "text.txt"
    lines.write_text("".join(json.dumps({"text": f"text {i} \u2028"}, ensure_ascii=False) + "\n" for i in range(3)))
    text.write_text("a longer text")
    made = Calibration(file=str(lines), samples=3, length=6, seed=0).text(base, task, None).sequences
    assert made == [base(f"text {i} \u2028")["input_ids"][:6] for i in range(3)]
    made = Calibration(file=str(text), samples=2, length=6, seed=0).text(base, task, None).sequences
    assert [*made[0], *made[1]] == base("a longer text")["input_ids"][:12]


# --- end of text is not end of turn: https://github.com/axolotl-ai-cloud/axolotl/issues/3754, ------------------------
# https://github.com/huggingface/open-r1/issues/604 and https://github.com/huggingface/trl/issues/3299


@pytest.mark.parametrize(
    ("template", "keywords", "end"),
    [
        (SAY + OPEN, {}, TURN),
        (SAY.replace("<|eot|>", "\n<|eot|>\n") + OPEN, {}, TURN),
        (SAY.replace("<|eot|>", "{{ eos_token }}") + OPEN, {}, END),
        ("{{ strftime_now('%d %b %Y') }}" + SAY + OPEN, {}, TURN),  # a date, as Llama 3 writes it
        (SAY.replace("<|eot|>", "\n") + OPEN, {}, None),  # no token ends a turn
        (SAY.replace("<|eot|>", " [over]<|eot|>") + OPEN, {}, None),  # words do
        ("{% if messages[-1].role != 'user' %}{{ raise_exception('no') }}{% endif %}" + SAY + OPEN, {}, None),
        ("{{ messages[0].content }}", {}, None),  # shows no answer
        (SAY + OPEN, None, None),  # model.template=null
        (None, {}, None),
    ],
)
def test_the_token_that_ends_a_turn_is_read_from_the_template(
    template: str | None, keywords: dict[str, Any] | None, end: int | None
) -> None:
    assert end_of_turn(tokenizer(template), keywords) == end


def test_a_demonstration_ends_as_its_prompt_was_asked() -> None:
    chat, plain = demonstration_ids(tokenizer(), [demonstration(CHAT), demonstration(PLAIN)], {})[1]
    assert chat == [ord("4") - ord("!"), TURN] and plain == [ord("4") - ord("!"), END]
    assert demonstration_ids(tokenizer(), [demonstration(PLAIN)], None)[1][0][-1] == END


def test_the_end_of_a_turn_ends_a_completion(make_policy: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A base with ChatML: tokenizer and generation config know the end of text alone, and the model goes on with a
    user's turn."""
    policy: Policy = make_policy()
    chatml = tokenizer()
    with caplog.at_level(logging.WARNING):
        ends = stop_ids(policy.model, chatml, {})
    assert ends == {END, TURN} and "<|eot|>" in caplog.text
    caplog.clear()
    assert stop_ids(policy.model, chatml, None) == {END}
    assert stop_ids(policy.model, tokenizer(SAY.replace("<|eot|>", "{{ eos_token }}")), {}) == {END}
    assert not caplog.text
    policy.stop_ids, policy.tokenizer, policy.rows = ends, chatml, len(chatml)
    ids = chatml("A: 72<|eot|>", add_special_tokens=False)["input_ids"]
    prompt = Prompt(id="q", messages=CHAT, answer="72")
    sampling = Sampling(samples=1, temperature=1.0, max_tokens=20, seed=0)
    numbers = [0.0] * len(ids)
    (made,) = make_rollouts(policy, [(prompt, 0)], [policy.ids_of(prompt)], [(ids, numbers, numbers)], sampling)
    assert made.text == "A: 72" and made.finished


# --- a template that drops the system message: https://github.com/huggingface/transformers/issues/30545 --------------

PHI_3 = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') %}"
    "{{'<|user|>' + '\n' + message['content'] + '<|eot|>' + '\n' + '<|assistant|>' + '\n'}}"
    "{% elif (message['role'] == 'assistant') %}{{message['content'] + '<|eot|>' + '\n'}}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "role", "remedy"),
    [
        (PHI_3, "system", "task.instruction=suffix"),
        (SAY.replace("{{ message.content }}", "{{ message.content[:3] }}") + OPEN, "system", "task.instruction=suffix"),
        ("{{ messages[0].content }}", "user", "task.template=plain"),
    ],
)
def test_a_template_that_leaves_words_out_is_refused(template: str, role: str, remedy: str) -> None:
    asked: tuple[Message, ...] = ({"role": "system", "content": "Write the answer after A:"}, *CHAT)
    with pytest.raises(ConfigError, match=rf"leaves out the {role} message.*{remedy}"):
        check_template(tokenizer(template), asked, {})


def test_a_template_may_move_and_trim_what_it_shows() -> None:
    asked: tuple[Message, ...] = ({"role": "system", "content": " Be brief.\n"}, *CHAT)
    into_first = "<|user|>{{ messages[0].content | trim }}\n\n{{ messages[1].content }}<|eot|><|assistant|>"
    for template in (SAY + OPEN, into_first):
        check_template(tokenizer(template), asked, {})
    check_template(tokenizer(PHI_3), CHAT, {})
