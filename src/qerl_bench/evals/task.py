"""eval=task: the task's held-out questions, judged by its own reward; greedy once and sampled several times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qerl_bench.config import require_count, require_positive
from qerl_bench.engine.base import Sampling
from qerl_bench.evals.base import Evaluation, Score, score
from qerl_bench.evals.probe import adapter_probe
from qerl_bench.records import Prompt, Rollout
from qerl_bench.seeding import derive
from qerl_bench.task.base import Task

if TYPE_CHECKING:
    from qerl_bench.engine.base import RolloutEngine
    from qerl_bench.policy import Policy
    from qerl_bench.rundir import RunDir


@dataclass(frozen=True, kw_only=True)
class TaskEvaluation:
    """Accuracy on held-out questions. The sampling seeds are the same at every evaluation: differences are paired."""

    name: str
    questions: int | None
    samples: int
    temperature: float

    def __post_init__(self) -> None:
        if self.questions is not None:
            require_count("eval.questions", self.questions)
        require_count("eval.samples", self.samples)
        require_positive("eval.temperature", self.temperature)

    def check(self) -> None:
        """Needs nothing."""

    def evaluate(self, policy: Policy, engine: RolloutEngine, task: Task, run: RunDir, seed: int) -> Evaluation:
        prompts = task.eval_prompts(self.questions)
        scores, rows, probe = [], [], {}
        for mode, samples, temperature in (("greedy", 1, 0.0), ("sampled", self.samples, self.temperature)):
            sampling = Sampling(
                samples=samples,
                temperature=temperature,
                max_tokens=task.max_completion_tokens,
                seed=derive(seed, "eval", mode),
            )
            rollouts = engine.generate(prompts, sampling)
            found, judged = judge(task, prompts, rollouts, mode)
            scores.append(found)
            rows += judged
            if mode == "sampled":  # greedy tokens are near certain with and without the adapter
                probe = adapter_probe(policy, rollouts, temperature)
        settings = {"samples": self.samples, "temperature": self.temperature, "max_tokens": task.max_completion_tokens}
        return Evaluation(scores=scores, samples=rows, settings=settings | probe)


def judge(task: Task, prompts: list[Prompt], rollouts: list[Rollout], mode: str) -> tuple[Score, list[dict[str, Any]]]:
    """The accuracy of `rollouts`, the same number for each prompt and in prompt order, and one row for each of them."""
    rows = []
    for rollout in rollouts:
        reward = task.reward(rollout.prompt, rollout.text)
        rows.append(
            {
                "mode": mode,
                "question": rollout.prompt.id,
                "sample": rollout.sample,
                "correct": reward.correct,
                "reward": reward.total,
                "gold": rollout.prompt.answer,
                "completion": rollout.text,
                "tokens": len(rollout.token_ids),
                "finished": rollout.finished,
            }
        )
    each = len(rollouts) // len(prompts)
    per_question = [sum(row["correct"] for row in rows[i : i + each]) / each for i in range(0, len(rows), each)]
    return score(f"eval/accuracy_{mode}", per_question), rows
