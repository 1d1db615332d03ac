"""Chat templates: the same prompt on any day, keywords that the template reads, and thinking that the prompt opens."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from qerl_bench.config import compose
from qerl_bench.engine.base import Sampling, make_rollouts
from qerl_bench.model.byte_tokenizer import byte_tokenizer
from qerl_bench.model.policy import Policy
from qerl_bench.task.chat_template import check_template, render_prompt, template_variables
from qerl_core.checks import ConfigError
from qerl_core.options.fingerprint import fingerprint
from qerl_core.records import Demonstration, Message, Prompt

SYSTEM: Message = {"role": "system", "content": "Be brief."}
USER: Message = {"role": "user", "content": "2+2?"}
ASKED = (SYSTEM, USER)

SAY = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
DATED = "{{ strftime_now('%d %B %Y') }}\n" + SAY
DATE_STRING = (  # as Llama 3 has it
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}{{ date_string }}\n"
) + SAY
SWITCH = (  # as SmolLM3 has it
    "{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}"
    "{% set mode = '/think' if enable_thinking else '/no_think' %}{{ mode }}\n"
) + SAY
OPENED = SAY + "{% if add_generation_prompt %}assistant: <think>\n{% endif %}"  # as DeepSeek-R1's distills have it
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + SAY
)


def tokenizer_with(template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


# --- the same text on any day ----------------------------------------------------------------------------------------


class OwnRendering(PreTrainedTokenizerFast):
    """As tokenizers that come with a call of their own: it passes no keywords on."""

    def apply_chat_template(self, conversation: Any, **_: Any) -> str:
        return str(super().apply_chat_template(conversation, tokenize=False))


@pytest.mark.parametrize("own", [False, True], ids=["", "own rendering"])
@pytest.mark.parametrize(("template", "date"), [(DATED, "26 July 2024"), (DATE_STRING, "26 Jul 2024")])
def test_the_date_in_a_prompt_is_fixed(template: str, date: str, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer: Any = tokenizer_with(template)
    tokenizer.__class__ = OwnRendering if own else type(tokenizer)
    check_template(tokenizer, ASKED, {})
    today = render_prompt(tokenizer, ASKED, {})

    class Later(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime(2031, 1, 2)

    monkeypatch.setattr(chat_template_utils, "datetime", Later)
    assert "2031" in tokenizer.apply_chat_template(list(ASKED), tokenize=False)  # transformers itself
    assert render_prompt(tokenizer, ASKED, {}) == today
    assert today == f"{date}\nsystem: Be brief.\nuser: 2+2?\n"


def test_a_keyword_sets_the_date() -> None:
    text = render_prompt(tokenizer_with(DATE_STRING), ASKED, {"date_string": "1 May 2020"})
    assert text == "1 May 2020\nsystem: Be brief.\nuser: 2+2?\n"


def test_a_template_that_does_not_repeat_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.template=\{date_string.*task.template=plain"):
        check_template(tokenizer_with("{{ range(99999) | random }}" + SAY), ASKED, {})


# --- keywords --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "read"),
    [
        (SAY, set()),
        (DATE_STRING, {"date_string"}),
        (SWITCH, {"enable_thinking"}),
        (
            SAY + "{{ eos_token }}{% set content = messages[0].content %}{{ content }}{{ effort | default('low') }}",
            {"effort"},
        ),
    ],
)
def test_the_keywords_that_a_template_reads(template: str, read: set[str]) -> None:
    assert template_variables(tokenizer_with(template)) == read


@pytest.mark.parametrize("keyword", ["enable_thinkin", "messages", "tokenize", "mode", "tools"])
def test_a_keyword_that_the_template_does_not_read_is_refused(keyword: str) -> None:
    with pytest.raises(ConfigError, match=rf"model.template.{keyword}: .* it reads enable_thinking"):
        check_template(tokenizer_with(SWITCH), ASKED, {keyword: False})


def test_keywords_reach_the_prompt_and_the_fingerprint() -> None:
    tokenizer = tokenizer_with(SWITCH)
    check_template(tokenizer, ASKED, {"enable_thinking": False})
    assert render_prompt(tokenizer, ASKED, {"enable_thinking": False}).startswith("/no_think\n")
    assert render_prompt(tokenizer, ASKED, {}).startswith("/think\n")
    plain, thinking = (compose(["model=qwen3-4b", f"model.template.enable_thinking={on}"]) for on in ("false", "true"))
    assert fingerprint(plain) == fingerprint(compose(["model=qwen3-4b"])) != fingerprint(thinking)


@pytest.mark.peers  # the templates that TRL keeps of published models
@pytest.mark.parametrize(
    ("name", "read", "end"),
    [
        ("qwen3", {"enable_thinking"}, "assistant\n"),
        ("qwen3_instruct_2507", set(), "assistant\n"),
        ("llama3_2", {"custom_tools", "date_string", "tools_in_user_message"}, "<|end_header_id|>\n\n"),
        ("deepseek_r1_distill", set(), "<think>\n"),
        ("gemma3", set(), "<start_of_turn>model\n"),
        ("gptoss", {"builtin_tools", "model_identity", "reasoning_effort"}, "<|start|>assistant"),
    ],
)
def test_templates_of_published_models(name: str, read: set[str], end: str) -> None:
    folder = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
    tokenizer = tokenizer_with((folder / f"{name}.jinja").read_text())
    check_template(tokenizer, ASKED, {})
    assert template_variables(tokenizer) == read
    assert render_prompt(tokenizer, ASKED, {}).endswith(end)


# --- prompts that a template refuses ---------------------------------------------------------------------------------


def test_a_template_that_fails_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match=r"chat template of this model refuses the prompt: division by zero"):
        check_template(tokenizer_with(SAY + "{{ 1 / 0 }}"), (USER,), {})


def test_a_template_without_system_messages() -> None:
    tokenizer = tokenizer_with(NO_SYSTEM)
    with pytest.raises(ConfigError, match=r"System role not supported; task.instruction=suffix"):
        check_template(tokenizer, ASKED, {})
    check_template(tokenizer, (USER,), {})


@pytest.mark.parametrize(("template", "keywords"), [(None, {}), (SAY, None)], ids=["missing", "null"])
def test_without_a_template_prompts_are_plain(template: str | None, keywords: dict[str, Any] | None) -> None:
    tokenizer = tokenizer_with(template)
    with pytest.raises(ConfigError, match=r"no chat template.*task.template=plain"):
        check_template(tokenizer, ASKED, keywords)
    check_template(tokenizer, ({"role": "rendered", "content": "2+2="},), keywords)


# --- thinking --------------------------------------------------------------------------------------------------------

PROMPT = Prompt(id="q", messages=(USER,), answer="4")


@pytest.fixture(scope="module")
def thinker(make_policy: Callable[..., Policy]) -> Policy:
    """A policy whose chat template opens <think>."""
    policy = make_policy()
    policy.tokenizer.chat_template = OPENED
    return policy


def test_thinking_that_the_prompt_opened_is_scored(thinker: Policy, make_experiment: Callable[..., Any]) -> None:
    task = make_experiment("task.answer_format=tags").task
    prompt_ids = thinker.prompt_ids(PROMPT.messages)
    written = "2 and 2</think><answer>4</answer>"
    ids = [*thinker.tokenizer(written, add_special_tokens=False)["input_ids"], thinker.tokenizer.eos_token_id]
    numbers = [0.0] * len(ids)
    sampling = Sampling(samples=1, temperature=1.0, max_tokens=99, seed=0)
    (rollout,) = make_rollouts(thinker, [(PROMPT, 0)], [prompt_ids], [(ids, numbers, numbers)], sampling)
    assert rollout.text == f"<think>{written}" and rollout.token_ids == ids
    reward = task.reward(PROMPT, rollout.text)
    assert reward.correct and reward.parts == {"correct": 1.0, "format": 1.0}
    assert task.reward(PROMPT, written).parts["format"] == 0.0  # of a prompt that does not open it


def test_demonstrations_continue_the_thinking_that_the_prompt_opened(thinker: Policy) -> None:
    shown = Demonstration(prompt=PROMPT, completion="<think>2 and 2</think><answer>4</answer>")
    (prompt_ids,), (ids,) = thinker.demonstration_ids([shown])
    text = str(thinker.tokenizer.decode([*prompt_ids, *ids[:-1]]))
    assert text.endswith("<think>\n2 and 2</think><answer>4</answer>")
