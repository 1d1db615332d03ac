"""Renders prompts with a model's chat template, so that the same messages give the same text on any day.

What comes out is read back: every message's words have to be in it, and the token behind an answer ends a completion.
A text that no template wrote begins as the tokenizer begins one, with BOS where it writes that: so bases were trained.
Some templates write today's date into the prompt. Their only clock is transformers', which here always says TODAY.
Keywords of the template, such as enable_thinking, come from `model.template`. Left out: tools and documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

from qerl_bench.task.grader.extract import THINK
from qerl_core.checks import ConfigError, require
from qerl_core.records import RENDERED, Demonstration, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TODAY = datetime(2024, 7, 26)  # the date that Llama 3's template falls back to
GIVEN = {"messages", "add_generation_prompt", "tools", "documents"}  # variables that are not the user's
ANSWER = "QeRL"  # what the model says where a template is asked how it ends that
TESTS_FOR_MISSING = {"defined", "undefined", "default", "d"}
Keywords = Mapping[str, Any]


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: tuple[Message, ...], keywords: Keywords | None) -> str:
    """The prompt as text, including the opening of the model's turn; `keywords` is model.template.

    Raises ConfigError if there is no chat template, or if it refuses the messages. `prompt_ids` has its token ids.
    """
    if messages[0]["role"] == RENDERED:
        text = messages[0]["content"]
        opening = opening_of(tokenizer)
        return text if text.startswith(opening) else opening + text
    if keywords is None or tokenizer.chat_template is None:
        raise ConfigError(
            "this model has no chat template to ask with (model.template is null, or its tokenizer has none); use "
            "task.template=plain, as for base models, or an instruction-tuned model"
        )
    try:
        with _today():
            text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **keywords)
    except Exception as error:  # whatever a foreign template raises
        system = messages[0]["role"] == "system"
        remedy = "task.instruction=suffix asks without a system message" if system else "use task.template=plain"
        raise ConfigError(f"the chat template of this model refuses the prompt: {error}; {remedy}") from error
    return str(text)


def opening_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """The BOS that the tokenizer writes before a plain text, as text; empty if it writes none."""
    bos = tokenizer.bos_token
    if bos is None:
        return ""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    ids = tokenizer("")["input_ids"] if backend is None else backend.encode("").ids
    return str(bos) if ids[:1] == [tokenizer.bos_token_id] else ""


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, asked: Sequence[tuple[Message, ...]], texts: Sequence[str]
) -> list[list[int]]:
    """Token ids of prompts and their `texts`: of what a chat template wrote as it stands, of plain text as the
    tokenizer begins one.

    The two differ: SentencePiece puts a space before a text, but not between a BOS that is written out and the text.
    """
    opening = opening_of(tokenizer)
    plain = [messages[0]["role"] == RENDERED and opening != "" for messages in asked]
    rest = [text.removeprefix(opening) if cut else text for text, cut in zip(texts, plain, strict=True)]
    start: list[int] = [tokenizer.bos_token_id]  # type: ignore[list-item]
    return [[*start, *ids] if cut else ids for ids, cut in zip(token_ids(tokenizer, rest), plain, strict=True)]


def plain_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text that no template wrote, BOS first where the tokenizer writes it, and only once."""
    return prompt_ids(tokenizer, [({"role": RENDERED, "content": text},)], [text])[0]


def end_of_turn(tokenizer: PreTrainedTokenizerBase, keywords: Keywords | None) -> int | None:
    """The token that the chat template writes behind an answer; None if no token of its own ends one."""
    if keywords is None or tokenizer.chat_template is None:
        return None
    turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
    try:
        with _today():
            text = str(tokenizer.apply_chat_template(turn, tokenize=False, **keywords))
    except Exception:  # a template that knows no such turn ends none
        return None
    _, found, behind = text.rpartition(ANSWER)
    first = token_ids(tokenizer, [behind.lstrip()])[0][:1] if found else []
    return first[0] if first and first[0] in {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder} else None


def thinking_opened(prompt: str) -> str:
    """`<think>` if the rendered prompt ends with it: such a template has the model think without writing the tag."""
    return THINK if prompt.rstrip().endswith(THINK) else ""


def demonstration_ids(
    tokenizer: PreTrainedTokenizerBase, demonstrations: Sequence[Demonstration], keywords: Keywords | None
) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of the prompts, and of the completions: without a <think> that the prompt ends with, and with the token
    that ends a turn in the template, or a text without one.

    One call of the tokenizer for all of them, since each call costs as much as hundreds of texts. Transformers' own
    call takes three times as long, for masks and offsets that nobody reads.
    """
    asked = [demonstration.prompt.messages for demonstration in demonstrations]
    prompts = [render_prompt(tokenizer, messages, keywords) for messages in asked]
    completions = [
        demonstration.completion.removeprefix(thinking_opened(prompt))
        for demonstration, prompt in zip(demonstrations, prompts, strict=True)
    ]
    end, turn = tokenizer.eos_token_id, end_of_turn(tokenizer, keywords)
    ends = [end if turn is None or messages[0]["role"] == RENDERED else turn for messages in asked]
    require(
        all(isinstance(last, int) for last in ends),
        f"the tokenizer has eos_token={tokenizer.eos_token!r}, so that demonstrations have no end to learn; set "
        "eos_token in tokenizer_config.json",
    )
    ids = [[*one, last] for one, last in zip(token_ids(tokenizer, completions), ends, strict=True)]
    return prompt_ids(tokenizer, asked, prompts), ids


def token_ids(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """The ids of each text, without special tokens."""
    if not tokenizer.is_fast:
        return tokenizer(texts, add_special_tokens=False)["input_ids"]  # type: ignore[return-value]
    backend: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
    calls = [texts] if backend.padding is None else [[text] for text in texts]  # it pads to the longest of a call
    return [ids.ids for call in calls for ids in backend.encode_batch_fast(call, add_special_tokens=False)]


def texts_of(tokenizer: PreTrainedTokenizerBase, ids: Sequence[list[int]]) -> list[str]:
    """What `tokenizer.decode` makes of each of `ids`, in one call if that decodes and no more."""
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    own = [getattr(kind, name) is not getattr(PreTrainedTokenizerFast, name) for name in ("decode", "_decode")]
    if any(own) or tokenizer.clean_up_tokenization_spaces:
        return [str(tokenizer.decode(one)) for one in ids]
    backend: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
    return backend.decode_batch(ids, skip_special_tokens=False)


def check_template(
    tokenizer: PreTrainedTokenizerBase, messages: tuple[Message, ...], keywords: Keywords | None
) -> None:
    """Raise ConfigError unless `messages` can be rendered with these keywords, all their words included, and give the
    same text each time.

    Messages that are rendered already need no template.
    """
    if messages[0]["role"] == RENDERED:
        return
    known = template_variables(tokenizer) if keywords is not None and tokenizer.chat_template is not None else set()
    reads = f"it reads {', '.join(sorted(known)) or 'none'}"
    for key in keywords or {}:
        require(key in known, f"model.template.{key}: the chat template does not read {key}; {reads}. Leave it out")
    first = render_prompt(tokenizer, messages, keywords)
    for message in messages:
        require(
            message["content"].strip() in first,
            f"the chat template of this model leaves out the {message['role']} message, which says "
            f"{message['content'][:60]!r}, so that the model would never read it. "
            + ("task.instruction=suffix asks without one" if message["role"] == "system" else "task.template=plain"),
        )
    second = render_prompt(tokenizer, messages, keywords)
    require(
        first == second,
        f"the chat template writes something else each time ({_difference(first, second)}), so that no run could be "
        f"repeated. Fix it with a keyword, such as model.template={{date_string: 26 Jul 2024}} ({reads}), or use "
        "task.template=plain",
    )


def template_variables(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """The keywords that model.template can set: variables that the chat template reads and does not assign, or assigns
    only if they are not defined. Raises ConfigError if it cannot be read."""
    from jinja2 import TemplateSyntaxError
    from jinja2.meta import find_undeclared_variables
    from jinja2.nodes import Filter, Name, Test

    try:
        source = tokenizer.get_chat_template()  # one of several, if one is called default
        tree = chat_template_utils()._compile_jinja_template(source).environment.parse(source)
    except Exception as error:  # whatever a foreign template raises
        line = f", line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        reason = str(error).split("\n")[0].rstrip(".")
        raise ConfigError(
            f"the chat template cannot be read: {reason}{line}; correct it, or use task.template=plain"
        ) from error
    assigned = {name.name for name in tree.find_all(Name) if name.ctx == "store"}
    asked = [*tree.find_all(Test), *tree.find_all(Filter)]  # `x is defined`, `x | default(y)`
    optional = {one.node.name for one in asked if one.name in TESTS_FOR_MISSING and isinstance(one.node, Name)}
    read = find_undeclared_variables(tree)
    return (read - assigned | read & optional) - GIVEN - set(tokenizer.SPECIAL_TOKENS_ATTRIBUTES)


@contextmanager
def _today() -> Iterator[None]:
    """The clock of transformers' templates stands at TODAY.

    Replaced is what their `strftime_now` reads: a function of the same name among the keywords arrives as text from
    transformers 5.24 on, and a tokenizer with a rendering of its own need not pass it on.
    """

    class Today(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return TODAY

    module = chat_template_utils()
    real, module.datetime = module.datetime, Today
    try:
        yield
    finally:
        module.datetime = real


def chat_template_utils() -> Any:
    from transformers.utils import chat_template_utils

    return chat_template_utils


def _difference(first: str, second: str) -> str:
    """The first line in which two texts differ, both ways."""
    pairs = zip(first.splitlines(), second.splitlines(), strict=False)
    one, other = next(((one, other) for one, other in pairs if one != other), (first[-60:], second[-60:]))
    return f"{one[:80]!r} and {other[:80]!r}"
