"""The text that a model is asked with: which instruction, where it stands, and in whose template.

The instruction asks for exactly the answer format that the reward reads; the released QeRL code stopped doing so, and
its GSM8K runs earn nothing. The paper puts the instruction behind the question (suffix), its code before (system).
Left out: few-shot examples, and stop strings; a completion ends with the model's own stop tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.checks import require
from qerl_bench.records import RENDERED, Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLACES = ("system", "suffix", "none")
TEMPLATES = ("chat", "plain")

# By answer format. `tags` is the format of the QeRL paper (appendix E), in words of our own, with its skeleton.
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
INSTRUCTIONS["auto"] = INSTRUCTIONS["colon"]  # auto reads any format; this one is the easiest to keep to


@dataclass(frozen=True, kw_only=True)
class Wording:
    """How questions become prompts. `instruction` is where the instruction stands, `template` who frames the whole.

    chat: the model's own chat template, for instruction-tuned models. plain: no roles and no special tokens, for base
    models: the instruction before the question (system) or behind it (suffix), then "Answer:" on a line of its own.
    """

    answer_format: str
    instruction: str
    template: str

    def __post_init__(self) -> None:
        for key, known in (("answer_format", INSTRUCTIONS), ("instruction", PLACES), ("template", TEMPLATES)):
            value = getattr(self, key)
            require(value in known, f"task.{key} must be one of {', '.join(known)}, got {value!r}")

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


def worked(answer_format: str, reasoning: str, answer: str) -> str:
    """A completion in that format: the reasoning, then the answer."""
    if answer_format == "tags":
        return f"<think>{reasoning}</think><answer>{answer}</answer>"
    last = {"hash": f"#### {answer}", "boxed": f"\\boxed{{{answer}}}"}.get(answer_format, f"A: {answer}")
    return f"{reasoning}\n{last}" if reasoning else last


def rendered(tokenizer: PreTrainedTokenizerBase, messages: tuple[Message, ...]) -> str:
    """The prompt as text, the opening of the model's turn included. Raises ConfigError if the model has no chat template.

    Its token ids are those of this text with no special tokens added: a chat template writes its own.
    """
    if messages[0]["role"] == RENDERED:
        return messages[0]["content"]
    require(
        tokenizer.chat_template is not None,
        "this model has no chat template, as base models have none; use task.template=plain, or an instruction-tuned "
        "model",
    )
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))
