"""How a question becomes messages: the instruction, and where it is placed. chat_template.py renders them.

The instruction asks for exactly the answer format that the reward reads. The released QeRL code no longer does, so its
GSM8K runs earn no reward. The paper places the instruction after the question (suffix), its code before it (system).
Left out: few-shot examples and stop strings; a completion ends with the model's own stop tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from qerl_core.checks import check_fields, one_of
from qerl_core.records import RENDERED, Message, Prompt

PLACES = ("system", "suffix", "none")
TEMPLATES = ("chat", "plain")

# By answer format. `tags` has the format of the QeRL paper (appendix E); the wording is ours.
INSTRUCTIONS = {
    "tags": (
        "Solve the problem step by step. Write your reasoning between <think> and </think>, "
        "then only the final answer between <answer> and </answer>:\n"
        "<think>\nreasoning\n</think>\n<answer>\nfinal answer\n</answer>"
    ),
    "hash": "Solve the problem step by step. Then write the final answer alone on the last line, after ####.",
    "boxed": "Solve the problem step by step, and put the final answer into \\boxed{}.",
    "colon": 'Solve the problem step by step. Then write the final answer alone on the last line, after "A:".',
}
INSTRUCTIONS["auto"] = INSTRUCTIONS["colon"]  # auto reads every format; this one is the easiest to follow


@dataclass(frozen=True, kw_only=True)
class PromptTemplate:
    """Turns questions into prompts. `instruction` is where the instruction goes, `template` the frame around the text.

    chat: the model's own chat template, for instruction-tuned models. plain: no roles and no special tokens, for base
    models: the instruction before (system) or after (suffix) the question, then "Answer:" on a line of its own.
    """

    answer_format: str
    instruction: str
    template: str

    def __post_init__(self) -> None:
        choices = {"answer_format": INSTRUCTIONS, "instruction": PLACES, "template": TEMPLATES}
        check_fields(self, "task", **{key: one_of(*values) for key, values in choices.items()})

    def prompt(self, id: str, question: str, answer: str) -> Prompt:
        return Prompt(id=id, messages=self.messages(question), answer=answer, question=question)

    def messages(self, question: str) -> tuple[Message, ...]:
        before = INSTRUCTIONS[self.answer_format] if self.instruction == "system" else ""
        after = INSTRUCTIONS[self.answer_format] if self.instruction == "suffix" else ""
        if self.template == "plain":
            text = "\n\n".join(part for part in (before, f"Question: {question}", after, "Answer:\n") if part)
            return ({"role": RENDERED, "content": text},)
        user = {"role": "user", "content": "\n\n".join(part for part in (question, after) if part)}
        return ({"role": "system", "content": before}, user) if before else (user,)


def format_demonstration(answer_format: str, reasoning: str, answer: str) -> str:
    """A completion in `answer_format`: the reasoning, then the answer."""
    if answer_format == "tags":
        return f"<think>{reasoning}</think><answer>{answer}</answer>"
    last = {"hash": f"#### {answer}", "boxed": f"\\boxed{{{answer}}}"}.get(answer_format, f"A: {answer}")
    return f"{reasoning}\n{last}" if reasoning else last
