"""Where in a completion its answer stands, read strictly; one reader for each `task.answer_format`.

    tags    <think>...</think><answer>18</answer>    QeRL's format
    hash    #### 18                                  GSM8K's own
    boxed   \\boxed{18}                              the usual one for LaTeX answers
    colon   A: 18                                    also Answer: and Final answer:, in any case, emphasised or not
    auto    the first that the completion uses of tags, boxed, hash, colon; for completions made elsewhere

A lenient reader turns into reward that the policy did not earn, so whatever is ambiguous is no answer: several answers,
unless all say the same to the letter; an answer that only stands in the thoughts; thinking that never ends. Nothing
here raises on any text, and the work is linear in its length.
"""

from __future__ import annotations

import re

THINK, END_THINK, ANSWER, END_ANSWER = "<think>", "</think>", "<answer>", "</answer>"
TAGS = (THINK, END_THINK, ANSWER, END_ANSWER)
MARKER = "####"
BOXED = "\\boxed{"
ANSWER_FORMATS = ("tags", "hash", "boxed", "colon", "auto")

_TAG = re.compile("|".join(TAGS))
_COLON = re.compile(r"[*_ \t]*(?:final[ ]answer|answer|a)[*_]*:(?P<text>[^\n]*)", re.IGNORECASE)


def extract(completion: str, answer_format: str) -> str | None:
    """The text of the one answer, white space around it removed, or None if there is no unambiguous one."""
    return _EXTRACT[answer_format](completion)


def well_formed(completion: str, answer_format: str) -> bool:
    """The format reward: the completion is what its format asks for, to the letter. What the answer says is not judged.

    tags: one think block, then one answer block, each tag once, and nothing else but white space. hash, colon: one
    answer, on the last line. boxed: one box. A think block may come first. auto: any of the four, if it is clear which.
    """
    if answer_format == "auto":
        formed = any(well_formed(completion, one) for one in ANSWER_FORMATS if one != "auto")
        return formed and extract(completion, "auto") is not None
    if answer_format == "tags":
        return _tags_only(completion)
    said = _said(completion)
    if said is None or any(tag in said for tag in TAGS):
        return False
    if answer_format == "boxed":
        return said.count(BOXED) == 1 and len(_boxes(said)) == 1
    lines = said.strip().split("\n")
    answering = [line for line in lines if (MARKER in line if answer_format == "hash" else _COLON.match(line))]
    return len(answering) == 1 and answering[0] is lines[-1] and said.count(MARKER) == (answer_format == "hash")


def answer_block(completion: str) -> str | None:
    """The text of the completion's one answer block, white space around it removed, or None if it has no such block.

    A completion answers if it holds exactly one `<answer>...</answer>` pair outside its think block and only white
    space after it. Tags are matched to the letter. In particular:

    - two answer blocks are no answer, whether or not they agree; so is a block that is never closed;
    - tags inside the think block are thoughts: they neither answer nor spoil the answer that follows;
    - thinking is optional, but a think block must be closed, and comes at most once, before the answer;
    - `</think>` without `<think>` ends thinking that the chat template opened: everything before it is thought.
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


def _tags_only(completion: str) -> bool:
    text = completion.strip()
    if tuple(_TAG.findall(text)) != TAGS or not text.startswith(THINK) or not text.endswith(END_ANSWER):
        return False
    between = text[text.index(END_THINK) + len(END_THINK) : text.index(ANSWER)]
    return not between.strip()


def _said(completion: str) -> str | None:
    """What is said after the thinking: all of it if there was none; None if the thinking never ends."""
    said = completion.rpartition(END_THINK)[2]
    return None if THINK in said else said


def _hash(completion: str) -> str | None:
    """The rest of the line behind ####."""
    said = _said(completion)
    return None if said is None else _agreed([rest.split("\n")[0] for rest in said.split(MARKER)[1:]])


def _boxed(completion: str) -> str | None:
    """What stands in \\boxed{}; None too if a box is never closed."""
    said = _said(completion)
    if said is None:
        return None
    found = _boxes(said)
    return _agreed(found) if len(found) == said.count(BOXED) else None


def _colon(completion: str) -> str | None:
    """The rest of the line behind `A:`, which must stand first on its line."""
    said = _said(completion)
    matches = [] if said is None else [_COLON.match(line) for line in said.split("\n")]
    return _agreed([match["text"] for match in matches if match])


def _auto(completion: str) -> str | None:
    """By the first format that is used at all: one that is used wrongly is not saved by another.

    An answer that is nothing but a box is what stands in the box.
    """
    said = completion.rpartition(END_THINK)[2]
    if ANSWER in said or END_ANSWER in said:
        found = answer_block(completion)
    elif BOXED in said:
        found = _boxed(completion)
    elif MARKER in said:
        found = _hash(completion)
    else:
        found = _colon(completion)
    bare = (found or "").strip("$. ")
    boxes = _boxes(bare)
    return boxes[0].strip() if len(boxes) == 1 and bare == f"{BOXED}{boxes[0]}}}" else found


def _boxes(text: str) -> list[str]:
    """The contents of each closed \\boxed{...}, braces matched; a box within a box belongs to the outer one."""
    found, start, depth = [], -1, 0
    at = text.find(BOXED)
    while 0 <= at < len(text):
        if start < 0:
            start, depth = at + len(BOXED), 1
            at = start
        elif text[at] == "\\":
            at += 2  # \{ and \} are no braces
        else:
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if depth == 0:
                found.append(text[start:at])
                start, at = -1, text.find(BOXED, at)
            else:
                at += 1
    return found


def _agreed(answers: list[str]) -> str | None:
    """The one answer, or the one that all of several repeat, without Markdown emphasis around it."""
    said = {answer.strip().strip("*").strip() for answer in answers}
    return said.pop() if len(said) == 1 else None


_EXTRACT = {"tags": answer_block, "hash": _hash, "boxed": _boxed, "colon": _colon, "auto": _auto}
