"""Extracts the answer from a completion, strictly; one function for each `task.answer_format`.

    tags    <think>...</think><answer>18</answer>    QeRL's format
    hash    #### 18                                  GSM8K's own
    boxed   \\boxed{18}                              common for LaTeX answers
    colon   A: 18                                    also Answer: and Final answer:, any case, with or without emphasis
    auto    the first of tags, boxed, hash, colon that the completion uses; for completions made elsewhere

A lenient reader rewards what the policy did not achieve, so an ambiguous completion has no answer: several answers that
are not identical, an answer only inside the thinking, or thinking that never ends. Neither has one that was cut off in
the line of its answer: `A: 1` may have become `A: 18`. Tags and boxes have an end of their own. No text makes these
functions raise, and they take time linear in its length.
"""

from __future__ import annotations

import re

THINK, END_THINK, ANSWER, END_ANSWER = "<think>", "</think>", "<answer>", "</answer>"
TAGS = (THINK, END_THINK, ANSWER, END_ANSWER)
CHANNEL, FINAL = "<|channel|>", "<|channel|>final<|message|>"  # gpt-oss writes its answer into the channel `final`
MARKER = "####"
BOXED = "\\boxed{"
ANSWER_FORMATS = ("tags", "hash", "boxed", "colon", "auto")

_TAG = re.compile("|".join(TAGS))
_COLON = re.compile(r"[*_ \t]*(?:final[ ]answer|answer|a)[*_]*:(?P<text>[^\n]*)", re.IGNORECASE)


def extract(completion: str, answer_format: str, finished: bool = True) -> str | None:
    """The answer without surrounding white space, or None if there is no unambiguous answer.

    `finished` is false for a completion that was cut off at the token limit.
    """
    return _EXTRACT[answer_format](_final_message(completion), finished)


def well_formed(completion: str, answer_format: str, finished: bool = True) -> bool:
    """Whether the completion follows its format exactly, whatever the answer says.

    tags: one think block, then one answer block, each tag once, and nothing else but white space. hash, colon: one
    answer, on the last line. boxed: one box. Each may start with a think block. auto: any of the four, if unambiguous.
    """
    completion = _final_message(completion)
    if answer_format == "auto":
        formed = any(well_formed(completion, name, finished) for name in ANSWER_FORMATS if name != "auto")
        return formed and extract(completion, "auto", finished) is not None
    if answer_format == "tags":
        return _tags_only(completion)
    text = _after_thinking(completion)
    if text is None or any(tag in text for tag in TAGS):
        return False
    if answer_format == "boxed":
        return text.count(BOXED) == 1 and len(_boxes(text)) == 1
    lines = text.strip().split("\n")
    answers = [line for line in lines if (MARKER in line if answer_format == "hash" else _COLON.match(line))]
    whole = finished or text.endswith("\n")
    return whole and len(answers) == 1 and answers[0] is lines[-1] and text.count(MARKER) == (answer_format == "hash")


def answer_block(completion: str) -> str | None:
    """The text of the only answer block without surrounding white space, or None.

    A completion has an answer if exactly one `<answer>...</answer>` pair is outside its think block, with only white
    space after it. Tags must match exactly. In particular:

    - two answer blocks give no answer, even if they agree; neither does a block that is never closed;
    - tags inside the think block are ignored;
    - thinking is optional; a think block must be closed, and there is at most one, before the answer;
    - `</think>` without `<think>` ends thinking that the chat template opened: everything before it is thinking.
    """
    before, _, rest = completion.rpartition(END_THINK)
    preamble, opened, thoughts = before.partition(THINK)
    if END_THINK in before or THINK in thoughts or THINK in rest:
        return None
    if opened and (ANSWER in preamble or END_ANSWER in preamble):
        return None
    lead, _, body = rest.partition(ANSWER)
    text, closed, after = body.partition(END_ANSWER)
    if not closed or after.strip() or ANSWER in text or END_ANSWER in lead:
        return None
    return text.strip()


def _final_message(completion: str) -> str:
    """Of a completion in channels, which begins with one, the last message, if it is in the channel `final` and the
    only one there; else nothing. Any other completion is its own."""
    if not completion.startswith(CHANNEL):
        return completion
    before, final, message = completion.rpartition(FINAL)
    return message if final and FINAL not in before and CHANNEL not in message else ""


def _tags_only(completion: str) -> bool:
    text = completion.strip()
    if tuple(_TAG.findall(text)) != TAGS or not text.startswith(THINK) or not text.endswith(END_ANSWER):
        return False
    between = text[text.index(END_THINK) + len(END_THINK) : text.index(ANSWER)]
    return not between.strip()


def _after_thinking(completion: str) -> str | None:
    """The text after the thinking: all of it if there is no thinking; None if the thinking never ends."""
    text = completion.rpartition(END_THINK)[2]
    return None if THINK in text else text


def _tags(completion: str, finished: bool) -> str | None:
    return answer_block(completion)


def _hash(completion: str, finished: bool) -> str | None:
    """The rest of the line after ####; None if the last such line was cut off."""
    text = _after_thinking(completion)
    parts = [] if text is None else text.split(MARKER)[1:]
    whole = finished or (parts != [] and "\n" in parts[-1])
    return _common_answer([part.split("\n")[0] for part in parts]) if whole else None


def _boxed(completion: str, finished: bool) -> str | None:
    """The content of \\boxed{}; None if a box is never closed."""
    text = _after_thinking(completion)
    if text is None:
        return None
    boxes = _boxes(text)
    return _common_answer(boxes) if len(boxes) == text.count(BOXED) else None


def _colon(completion: str, finished: bool) -> str | None:
    """The rest of the line after `A:`, which must start the line; None if the last such line was cut off."""
    text = _after_thinking(completion)
    matches = [] if text is None else [_COLON.match(line) for line in text.split("\n")]
    whole = finished or (matches != [] and matches[-1] is None)
    return _common_answer([match["text"] for match in matches if match]) if whole else None


def _auto(completion: str, finished: bool) -> str | None:
    """The answer in the first format that the completion uses; if it is used wrongly, no other format is tried.

    If the answer is a single box, its content is the answer.
    """
    text = completion.rpartition(END_THINK)[2]
    if ANSWER in text or END_ANSWER in text:
        answer = answer_block(completion)
    elif BOXED in text:
        answer = _boxed(completion, finished)
    elif MARKER in text:
        answer = _hash(completion, finished)
    else:
        answer = _colon(completion, finished)
    bare = (answer or "").strip("$. ")
    boxes = _boxes(bare)
    return boxes[0].strip() if len(boxes) == 1 and bare == f"{BOXED}{boxes[0]}}}" else answer


def _boxes(text: str) -> list[str]:
    """The contents of all closed \\boxed{...}, braces matched; a nested box is part of the outer one."""
    boxes, start, depth = [], -1, 0
    at = text.find(BOXED)
    while 0 <= at < len(text):
        if start < 0:
            start, depth = at + len(BOXED), 1
            at = start
        elif text[at] == "\\":
            at += 2  # skip \{ and \}
        else:
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if depth == 0:
                boxes.append(text[start:at])
                start, at = -1, text.find(BOXED, at)
            else:
                at += 1
    return boxes


def _common_answer(answers: list[str]) -> str | None:
    """The answer if all `answers` are the same, without Markdown emphasis around it."""
    distinct = {answer.strip().strip("*").strip() for answer in answers}
    return distinct.pop() if len(distinct) == 1 else None


_EXTRACT = {"tags": _tags, "hash": _hash, "boxed": _boxed, "colon": _colon, "auto": _auto}
