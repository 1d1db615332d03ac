"""What a model is asked, to the letter and to the token: every format, place and template, the opening of the model's
turn and the stop tokens included. The texts are written out here once more, so that none changes by accident."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qerl_bench.config import compose
from qerl_bench.config import spec as build_spec
from qerl_bench.model.byte_tokenizer import END_ID, TAGS, byte_tokenizer
from qerl_bench.model.word_tokenizer import word_tokenizer
from qerl_bench.task.chat_template import render_prompt
from qerl_bench.task.chat_template import token_ids as ids_of_texts
from qerl_bench.task.grader.extract import ANSWER_FORMATS, extract, well_formed
from qerl_bench.task.prompts import INSTRUCTIONS, PLACES, TEMPLATES, PromptTemplate, format_demonstration
from qerl_core.checks import ConfigError
from qerl_core.records import Demonstration, Prompt

QUESTION = "What is 2+3?"

GOLDEN = {
    "tags": (
        "Solve the problem step by step. Write your reasoning between <think> and </think>, then only the final answer "
        "between <answer> and </answer>:\n<think>\nreasoning\n</think>\n<answer>\nfinal answer\n</answer>"
    ),
    "hash": "Solve the problem step by step. Then write the final answer alone on the last line, after ####.",
    "boxed": r"Solve the problem step by step, and put the final answer into \boxed{}.",
    "colon": 'Solve the problem step by step. Then write the final answer alone on the last line, after "A:".',
    "auto": 'Solve the problem step by step. Then write the final answer alone on the last line, after "A:".',
}
FORMATS = pytest.mark.parametrize("answer_format", GOLDEN)

# ChatML as the Qwen2.5-Instruct models have it: a message a block, a default system message, the assistant's turn open.
CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe helpful.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def template_of(answer_format: str, instruction: str = "system", template: str = "chat") -> PromptTemplate:
    return PromptTemplate(answer_format=answer_format, instruction=instruction, template=template)


def asked(tokenizer: Any, *options: str) -> str:
    return render_prompt(tokenizer, template_of(*options).messages(QUESTION), {})


@pytest.fixture(scope="module")
def tiny() -> Any:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def chatml() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = CHATML
    return tokenizer


def token_ids(text: str, tokens: dict[str, int]) -> list[int]:
    """One token a byte but for `tokens`: worked out without the tokenizer. Bytes are numbered by GPT-2's alphabet."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shown = {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in printable)
    }
    rank = {byte: i for i, byte in enumerate(sorted(range(256), key=lambda byte: shown[byte]))}
    ids, at = [], 0
    while at < len(text):
        token = next((token for token in tokens if text.startswith(token, at)), None)
        ids += [rank[byte] for byte in text[at].encode()] if token is None else [tokens[token]]
        at += len(token or text[at])
    return ids


TAG_IDS = {tag: 258 + i for i, tag in enumerate(TAGS)}


# --- the texts ---


def test_the_instructions_are_these() -> None:
    assert INSTRUCTIONS == GOLDEN
    assert set(INSTRUCTIONS) == set(ANSWER_FORMATS)


@FORMATS
def test_the_places_of_the_instruction(answer_format: str) -> None:
    golden = GOLDEN[answer_format]
    question = {"role": "user", "content": QUESTION}
    assert template_of(answer_format, "system").messages(QUESTION) == ({"role": "system", "content": golden}, question)
    suffixed = {"role": "user", "content": f"{QUESTION}\n\n{golden}"}
    assert template_of(answer_format, "suffix").messages(QUESTION) == (suffixed,)
    assert template_of(answer_format, "none").messages(QUESTION) == (question,)


@FORMATS
def test_plain_prompts_are_the_whole_text(tiny: Any, chatml: Any, answer_format: str) -> None:
    golden = GOLDEN[answer_format]
    for tokenizer in (tiny, chatml):
        assert asked(tokenizer, answer_format, "system", "plain") == f"{golden}\n\nQuestion: {QUESTION}\n\nAnswer:\n"
        assert asked(tokenizer, answer_format, "suffix", "plain") == f"Question: {QUESTION}\n\n{golden}\n\nAnswer:\n"
        assert asked(tokenizer, answer_format, "none", "plain") == f"Question: {QUESTION}\n\nAnswer:\n"


@FORMATS
def test_the_tiny_model_is_told_the_users_words_alone(tiny: Any, answer_format: str) -> None:
    assert asked(tiny, answer_format, "system") == asked(tiny, answer_format, "none") == f"{QUESTION}\n"
    assert asked(tiny, answer_format, "suffix") == f"{QUESTION}\n\n{GOLDEN[answer_format]}\n"


@FORMATS
def test_a_chat_template_opens_the_models_turn(chatml: Any, answer_format: str) -> None:
    golden = GOLDEN[answer_format]
    assert asked(chatml, answer_format, "system") == (
        f"<|im_start|>system\n{golden}<|im_end|>\n<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert asked(chatml, answer_format, "suffix") == (
        f"<|im_start|>system\nBe helpful.<|im_end|>\n<|im_start|>user\n{QUESTION}\n\n{golden}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_model_without_chat_template_needs_a_plain_prompt() -> None:
    base = byte_tokenizer()
    base.chat_template = None
    with pytest.raises(ConfigError, match=r"no chat template.*use task.template=plain"):
        asked(base, "tags")
    assert asked(base, "hash", "none", "plain") == f"Question: {QUESTION}\n\nAnswer:\n"


# --- token ids and stop tokens ---


@FORMATS
@pytest.mark.parametrize("instruction", PLACES)
@pytest.mark.parametrize("template", TEMPLATES)
def test_token_ids_of_the_tiny_model(tiny_policy: Any, answer_format: str, instruction: str, template: str) -> None:
    messages = template_of(answer_format, instruction, template).messages(QUESTION)
    text = render_prompt(tiny_policy.tokenizer, messages, {})
    assert tiny_policy.prompt_ids(messages) == token_ids(text, TAG_IDS)
    assert END_ID not in tiny_policy.prompt_ids(messages)


@pytest.fixture(scope="module")
def tiny_policy(make_policy: Any) -> Any:
    return make_policy()


def test_some_token_ids_by_hand(tiny_policy: Any) -> None:
    """ASCII is numbered from "!" = 0; space and line feed stand for themselves in GPT-2's alphabet far behind."""
    messages = template_of("tags", "suffix").messages("2+3?")
    ids = tiny_policy.prompt_ids(messages)
    assert ids[:4] == [17, 10, 18, 30]
    newline = ids[4]
    assert ids[4:6] == [newline, newline] and ids[-1] == newline and newline > 93
    assert [i for i in ids if i >= 256] == [258, 259, 260, 261, 258, 259, 260, 261]


def test_a_completion_ends_with_the_stop_token(tiny_policy: Any) -> None:
    completion = format_demonstration("tags", "2+3=5", "5")
    prompt = Prompt(id="q", messages=template_of("tags").messages("2+3?"), answer="5")
    _, (ids,) = tiny_policy.demonstration_ids([Demonstration(prompt=prompt, completion=completion)])
    assert ids == [258, 17, 10, 18, 28, 20, 259, 260, 20, 261, END_ID]
    assert tiny_policy.stop_ids == {END_ID}


@pytest.mark.parametrize("make", [byte_tokenizer, word_tokenizer])
def test_many_texts_have_the_ids_that_transformers_gives_each(make: Any) -> None:
    tokenizer = make()
    texts = ["3 7 11 -> 40 :", "", "<think>\n 2+3 </think>", "3 + 7 = 10 ;", "not a word"]
    assert ids_of_texts(tokenizer, texts) == [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


@pytest.mark.parametrize("instruction", ["system", "suffix"])
def test_token_ids_in_chatml(chatml: Any, instruction: str) -> None:
    names = {"<|im_start|>": chatml.convert_tokens_to_ids("<|im_start|>"), "<|im_end|>": chatml.eos_token_id}
    text = asked(chatml, "boxed", instruction)
    ids = chatml(text, add_special_tokens=False)["input_ids"]
    assert ids == token_ids(text, TAG_IDS | names)
    roles = 3
    assert ids.count(names["<|im_start|>"]) == roles and ids.count(names["<|im_end|>"]) == roles - 1


def test_the_stop_tokens_are_the_tokenizers_and_the_models(make_policy: Any, chatml: Any) -> None:
    """As with Qwen2.5: the turn ends with <|im_end|>, and the generation config adds the end of text."""
    from qerl_bench.model.token_ids import stop_ids

    model = make_policy().model
    model.generation_config.eos_token_id = [END_ID, chatml.eos_token_id]
    assert stop_ids(model, chatml) == {END_ID, chatml.eos_token_id}


# --- answers in the format that was asked for ---


@FORMATS
def test_a_worked_completion_is_what_its_instruction_asks_for(answer_format: str) -> None:
    golden = {
        "tags": "<think>2+3=5</think><answer>5</answer>",
        "hash": "2+3=5\n#### 5",
        "boxed": "2+3=5\n\\boxed{5}",
        "colon": "2+3=5\nA: 5",
        "auto": "2+3=5\nA: 5",
    }
    assert format_demonstration(answer_format, "2+3=5", "5") == golden[answer_format]
    for reasoning in ("2+3=5", ""):
        completion = format_demonstration(answer_format, reasoning, "5")
        assert extract(completion, answer_format) == "5"
        assert well_formed(completion, answer_format)


@FORMATS
def test_no_instruction_is_an_answer_itself(answer_format: str) -> None:
    """A model that only repeats what it was told earns nothing for the answer."""
    assert extract(GOLDEN[answer_format], answer_format) in (None, "", ".", "final answer")


FILES = (Path(__file__).parents[2] / "conf" / "task").glob("*.yaml")
ASKING = sorted(path.stem for path in FILES if "answer_format" in path.read_text())  # others write their own


@pytest.mark.parametrize("name", ASKING)
def test_every_task_can_be_asked_in_every_way(name: str) -> None:
    task = build_spec(compose([f"task={name}", "task.answer_format=hash", "task.instruction=suffix"]), "task")
    expected = Prompt(
        id="x/test/1",
        messages=({"role": "user", "content": f"{QUESTION}\n\n{GOLDEN['hash']}"},),
        answer="5",
        question=QUESTION,
    )
    assert task.prompt_template.prompt("x/test/1", QUESTION, "5") == expected
    plain = build_spec(compose([f"task={name}", "task.template=plain", "task.instruction=none"]), "task")
    assert (
        plain.prompt_template.prompt("y", QUESTION, "5").messages[0]["content"] == f"Question: {QUESTION}\n\nAnswer:\n"
    )


def test_the_text_of_a_prompt_has_its_special_tokens(make_policy: Any, chatml: Any) -> None:
    policy = make_policy()
    policy.tokenizer = chatml
    text = policy.text_of(Prompt(id="a", messages=template_of("hash").messages(QUESTION), answer="5"))
    assert text == asked(chatml, "hash") and text.startswith("<|im_start|>system\n" + GOLDEN["hash"] + "<|im_end|>")
    ids = (*chatml.encode("<|im_start|>a"), chatml.eos_token_id)
    assert policy.text_of(Prompt(id="b", messages=(), answer="", token_ids=ids)) == "<|im_start|>a<|im_end|>"
