"""Where the answer of a completion is found, format by format, and what it takes to be well formed."""

from __future__ import annotations

import time

import pytest

from qerl_bench.task.grader.extract import ANSWER_FORMATS, answer_block, extract, well_formed


@pytest.mark.parametrize(
    ("completion", "block"),
    [
        ("<think>a</think><answer>18</answer>", "18"),
        ("<think>a</think>\n\n<answer>\n 18 \n</answer> \n", "18"),
        ("<answer>18</answer>", "18"),
        ("So it is <answer>18</answer>", "18"),
        ("Hm. <think>a</think> Thus <answer>18</answer>", "18"),
        ("<think>a</think><answer></answer>", ""),
        ("a</think><answer>18</answer>", "18"),  # the chat template opened the thinking
        ("<answer>5</answer></think><answer>18</answer>", "18"),
        ("<think><answer>5</answer></think><answer>18</answer>", "18"),
        ("<think>write <answer> later</think><answer>18</answer>", "18"),
        ("", None),
        ("18", None),
        ("<think>18</think>", None),
        ("<think>a</think>18", None),
        ("<think>a <answer>18</answer></think>", None),
        ("<think>a <answer>18</answer>", None),
        ("<think>a</think><answer>18", None),
        ("<think>a</think>18</answer>", None),
        ("<think>a</think></answer>18<answer>", None),
        ("<think>a</think><answer>18</answer>.", None),
        ("<think>a</think><answer>18</answer><think>b</think>", None),
        ("<think>a</think><answer>18</answer><answer>18</answer>", None),
        ("<answer>15</answer><think>a</think><answer>18</answer>", None),
        ("<think>a</think><answer>15<answer>18</answer>", None),
        ("<think>a</think><answer>18</answer></answer>", None),
        ("<think>a</think></answer><answer>18</answer>", None),
        ("<think>a</think><think>b</think><answer>18</answer>", None),
        ("<think>a<think>b</think></think><answer>18</answer>", None),
        ("<think>a<think>b</think><answer>18</answer>", None),
        ("<answer>15 <think>a</think><answer>18</answer>", None),
        ("15</answer> <think>a</think><answer>18</answer>", None),
        ("<think>a</think>b</think><answer>18</answer>", None),
        ("<answer><think>a</think>18</answer>", None),
        ("<answer>1<think>a</think>8</answer>", None),
        ("<think>a</think><Answer>18</Answer>", None),
        ("<think>a</think>< answer >18</ answer >", None),
    ],
)
def test_answer_block(completion: str, block: str | None) -> None:
    assert answer_block(completion) == block


@pytest.mark.parametrize(
    ("completion", "formed"),
    [
        ("<think>a</think><answer>18</answer>", True),
        (" \n<think>a\nb</think>\n\n<answer> 18 </answer>\n", True),
        ("<think></think><answer></answer>", True),
        ("<think>1 < 2</think><answer>no number</answer>", True),
        ("", False),
        ("<answer>18</answer>", False),
        ("<think>a</think>", False),
        ("a</think><answer>18</answer>", False),
        ("<answer>18</answer><think>a</think>", False),
        ("x<think>a</think><answer>18</answer>", False),
        ("<think>a</think>x<answer>18</answer>", False),
        ("<think>a</think><answer>18</answer>x", False),
        ("<think>a</think><answer>18</answer><answer>18</answer>", False),
        ("<think>a</think><think>b</think><answer>18</answer>", False),
        ("<think>a <answer>5</answer></think><answer>18</answer>", False),
        ("<think>a<answer>18</think></answer>", False),
        ("<think>a</think><answer>18", False),
    ],
)
def test_well_formed(completion: str, formed: bool) -> None:
    assert well_formed(completion, "tags") is formed


# (format, completion, what is extracted, is it well formed?)
FOUND = [
    ("hash", "3 * 6 = 18\n#### 18", "18", True),
    ("hash", "####18", "18", True),
    ("hash", "#### $1,000 \n", "$1,000", True),
    ("hash", "#### **18**", "18", True),
    ("hash", "so #### 18", "18", True),
    ("hash", "#### 18\nThat is all.", "18", False),
    ("hash", "#### 18\n#### 18", "18", False),
    ("hash", "#### 15\n#### 18", None, False),
    ("hash", "#### 15 #### 18", None, False),
    ("hash", "####", "", True),
    ("hash", "### 18", None, False),
    ("hash", "18", None, False),
    ("hash", "<think>#### 15</think>\n#### 18", "18", True),
    ("hash", "<think>#### 18</think>", None, False),
    ("hash", "<think>#### 18", None, False),
    ("hash", "#### 18<think>", None, False),
    ("boxed", "So \\boxed{18}.", "18", True),
    ("boxed", "$\\boxed{\\frac{1}{2}}$", "\\frac{1}{2}", True),
    ("boxed", "\\boxed{\\left\\{1, 2\\right\\}}", "\\left\\{1, 2\\right\\}", True),
    ("boxed", "\\boxed{\\{1}", "\\{1", True),
    ("boxed", "\\boxed{}", "", True),
    ("boxed", "\\boxed{18} or \\boxed{ 18 }", "18", False),
    ("boxed", "\\boxed{15} or \\boxed{18}", None, False),
    ("boxed", "\\boxed{15} \\boxed{18", None, False),
    ("boxed", "\\boxed{18", None, False),
    ("boxed", "\\boxed 18", None, False),
    ("boxed", "\\fbox{18}", None, False),
    ("boxed", "<think>\\boxed{15}</think> \\boxed{18}", "18", True),
    ("boxed", "<think>\\boxed{15}</think> 18", None, False),
    ("colon", "A: 18", "18", True),
    ("colon", "Work.\nA: 18 eggs\n", "18 eggs", True),
    ("colon", "**Answer:** 18", "18", True),
    ("colon", "**Final Answer: 18**", "18", True),
    ("colon", "answer:18", "18", True),
    ("colon", "A: 18\nQ: Next?", "18", False),
    ("colon", "A: 18\nA: 18", "18", False),
    ("colon", "A: 15\nA: 18", None, False),
    ("colon", "The answer: 18", None, False),
    ("colon", "Answer 18", None, False),
    ("colon", "Q: why?\nBA: 18", None, False),
    ("auto", "<think>a</think><answer>18</answer>", "18", True),
    ("auto", "<answer>18</answer>", "18", False),
    ("auto", "<think>a</think><answer>\\boxed{18}</answer>", "18", True),
    ("auto", "<think>a</think><answer>$\\boxed{18}$</answer>", "18", True),
    ("auto", "#### 18", "18", True),
    ("auto", "#### \\boxed{18}", "18", True),
    ("auto", "A: 18", "18", True),
    ("auto", "A: \\boxed{18}.", "18", True),
    ("auto", "So it is $\\boxed{18}$.", "18", True),
    ("auto", "#### Step 1\nI add.\n\\boxed{18}", "18", True),
    ("auto", "<answer>15</answer> #### 18", None, False),  # two formats: the first one used is used wrongly
    ("auto", "\\boxed{18} or \\boxed{19}\nA: 18", None, False),
    ("auto", "\\boxed{18", None, False),
    ("auto", "18", None, False),
    ("auto", "", None, False),
    ("tags", "#### 18", None, False),
]


@pytest.mark.parametrize(("answer_format", "completion", "found", "formed"), FOUND)
def test_what_each_format_finds(answer_format: str, completion: str, found: str | None, formed: bool) -> None:
    assert extract(completion, answer_format) == found
    assert well_formed(completion, answer_format) is formed


@pytest.mark.parametrize("answer_format", ANSWER_FORMATS)
@pytest.mark.parametrize(
    "text", ["\\boxed{" * 30_000, "####" * 50_000, "A:" * 100_000, "*" * 200_000, "<think>" * 30_000, "{\\" * 100_000]
)
def test_hostile_completions_are_read_at_once(answer_format: str, text: str) -> None:
    start = time.process_time()
    extract(text, answer_format)
    well_formed(text, answer_format)
    assert time.process_time() - start < 0.5


# --- completions in channels -----------------------------------------------------------------------------------------

ANALYSIS = "<|channel|>analysis<|message|>2+2=4, not <answer>5</answer> or \\boxed{5}<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
TAGGED = "<think>2+2</think><answer>4</answer>"


@pytest.mark.parametrize(
    ("completion", "answer_format", "answer"),
    [
        (ANALYSIS + FINAL + TAGGED, "tags", "4"),
        (FINAL + TAGGED, "auto", "4"),
        (ANALYSIS + FINAL + "\\boxed{4}", "boxed", "4"),
        (ANALYSIS + FINAL + "Two and two.\n#### 4", "hash", "4"),
        (ANALYSIS, "boxed", None),  # it never comes to its final message
        (ANALYSIS + FINAL + TAGGED + "<|end|><|start|>assistant" + FINAL + TAGGED, "tags", None),  # two of them
        (ANALYSIS + FINAL + TAGGED + "<|end|><|start|>assistant<|channel|>analysis<|message|>no", "tags", None),
        ("so: " + FINAL + "\\boxed{4} or \\boxed{5}", "boxed", None),  # not in channels: the whole text counts
    ],
)
def test_of_a_completion_in_channels_only_the_final_message_counts(
    completion: str, answer_format: str, answer: str | None
) -> None:
    assert extract(completion, answer_format) == answer
    assert well_formed(completion, answer_format) == (answer is not None)
