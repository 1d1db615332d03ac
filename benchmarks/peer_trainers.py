"""TRL 1.16 and verl 0.9.1 on the answers of `equal_data.py`: their own functions, from tokens and rewards to gradients.

TRL: its trainer on a CPU is given the answers as if it had sampled them. It grades, computes advantages and losses.
verl: its trainer needs Ray and GPUs, so what it calls is called here, in its order: reward manager, advantages,
log-probabilities and entropy of logits, and the loss of its actor. The logits are those of transformers.

    pip install trl==1.16.0 ray codetiming "tensordict>=0.8,<=0.10,!=0.9.0"; pip install --no-deps verl==0.9.1
"""

from __future__ import annotations

import contextlib
import io
import math
import tempfile
import warnings
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from equal_data import LIMIT, Answers, Numbers, Ours, gradient_of
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from timing import LINEAR


class Adapted:
    """The base of ours as transformers builds it, with PEFT's adapter of given folders."""

    def __init__(self, ours: Ours) -> None:
        self.ours = ours
        base, self.tokenizer = ours.model.load(None, "cpu")
        config = LoraConfig(
            r=ours.lora.rank, lora_alpha=ours.lora.alpha, target_modules=LINEAR, task_type="CAUSAL_LM", lora_dropout=0.0
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model: Any = get_peft_model(base, config)
        self.model.train()
        self.load(ours.first)

    def load(self, folder: Path) -> None:
        set_peft_model_state_dict(self.model, load_file(folder / "adapter" / "adapter_model.safetensors"))
        self.model.zero_grad(set_to_none=True)


# --- TRL -------------------------------------------------------------------------------------------------------------


def trl(ours: Ours, answers: Answers, fields: dict[str, Any], parts: int = 1, continued: bool = False) -> Numbers:
    """TRL's with `fields` of its GRPOConfig, the loss in `parts` micro-batches of equal rows.

    `soft_overlong`, which is no field, adds the reward function of that name with so many tokens. If `continued`, the
    first adapter is in the model that TRL is given, and not loaded into the one that it makes.
    """
    adapted = Adapted(ours)
    module, config = import_module("trl.trainer.grpo_trainer"), import_module("trl.trainer.grpo_config")
    fields = dict(fields)
    overlong = fields.pop("soft_overlong", 0)

    def graded(completions: Any, reward: list[float], **_: Any) -> list[float]:
        return reward

    functions = [graded]
    if overlong:
        functions.append(import_module("trl.rewards").get_soft_overlong_punishment(LIMIT, overlong))

    def given(prompts: Any, trainer: Any) -> dict[str, Any]:
        return {"prompt_ids": answers.prompts, "completion_ids": answers.completions, "logprobs": None}

    count = len(answers.rewards)
    rows = [{"prompt": "as given", "reward": reward} for reward in answers.rewards]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = config.GRPOConfig(**{
            "output_dir": folder, "per_device_train_batch_size": count, "num_generations": answers.group,
            "max_completion_length": LIMIT, "num_iterations": 2, "bf16": False, "use_cpu": True, "report_to": [],
            "gradient_checkpointing": False, "max_steps": 1, "disable_tqdm": True, "save_strategy": "no",
        } | fields)  # fmt: skip
        model, more = adapted.model, {}
        if not continued:
            model, more = model.unload(), {"peft_config": model.peft_config["default"]}
        trainer = module.GRPOTrainer(
            model=model, reward_funcs=functions, args=arguments, processing_class=adapted.tokenizer,
            train_dataset=import_module("datasets").Dataset.from_list(rows), rollout_func=given, **more,
        )  # fmt: skip
        adapted.model = trainer.model
        adapted.load(ours.first)
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = parts
        inputs = trainer._generate_and_score_completions(rows)
    size, losses, gradients, logged = count // parts, [], [], []
    for folder in (ours.first, ours.moved):
        adapted.load(folder)
        trainer._metrics["train"] = defaultdict(list, trainer._metrics["train"] if not losses else {})
        loss = 0.0
        for start in range(0, count, size):
            cut = {k: v[start : start + size] if torch.is_tensor(v) and v.ndim else v for k, v in inputs.items()}
            part = trainer._compute_loss(trainer.model, cut)
            part.backward()
            loss += float(part.detach())
        losses.append(loss)
        gradients.append(gradient_of(trainer.model))
        logged.append({name: sum(values) / len(values) for name, values in trainer._metrics["train"].items() if values})
    clipped = sum(logged[1].get(f"clip_ratio/{side}_mean", 0.0) for side in ("low", "high"))
    return Numbers(
        inputs["advantages"].tolist(), logged[0]["frac_reward_zero_std"], int(inputs["completion_mask"].sum()),
        logged[0]["entropy"], logged[0].get("kl", math.nan), (losses[0], losses[1]), (gradients[0], gradients[1]),
        clipped, logged[0] | {name: value for name, value in logged[1].items() if name.startswith("clip_ratio")},
    )  # fmt: skip


# --- verl ------------------------------------------------------------------------------------------------------------


def verl(ours: Ours, answers: Answers, fields: dict[str, Any], parts: int = 1) -> Numbers:
    """verl's with `fields` of its actor's config, the loss in `parts` micro-batches of equal rows.

    `normalized` (norm_adv_by_std_in_grpo), `buffer` (tokens of the overlong buffer) and `filtered` (groups without
    signal, told by its replay buffer's rule, an np.std of 0) are options of other parts of verl.
    """
    fields = dict(fields)
    normalized, buffer = fields.pop("normalized", True), fields.pop("buffer", 0)
    if fields.pop("filtered", False):
        answers = answers.without_dead_groups()
    adapted = Adapted(ours)
    protocol = import_module("verl.protocol").DataProto
    batch = verl_batch(answers)
    with contextlib.redirect_stdout(io.StringIO()):
        manager = import_module("verl.workers.reward_manager.dapo").DAPORewardManager(
            adapted.tokenizer, 0, lambda ground_truth, **_: ground_truth, max_resp_len=LIMIT,
            overlong_buffer_cfg=SimpleNamespace(enable=buffer > 0, len=buffer, penalty_factor=1.0, log=False),
        )  # fmt: skip
        names = {"reward_model": [{"ground_truth": reward} for reward in answers.rewards],
                 "data_source": ["none"] * len(answers.rewards)}  # fmt: skip
        scores = manager(protocol.from_dict(batch, non_tensors={k: _objects(v) for k, v in names.items()}))
    algorithms, losses = import_module("verl.trainer.ppo.core_algos"), import_module("verl.workers.utils.losses")
    groups = _objects([i // answers.group for i in range(len(answers.rewards))])
    batch["advantages"], _ = algorithms.compute_grpo_outcome_advantage(
        scores, batch["response_mask"], groups, norm_adv_by_std_in_grpo=normalized
    )
    actor = import_module("verl.workers.config").ActorConfig(
        strategy="fsdp", rollout_n=answers.group, ppo_micro_batch_size_per_gpu=1, **fields
    )
    with torch.no_grad():
        batch["old_log_probs"], entropy = verl_tokens(adapted, batch)
        with adapted.model.disable_adapter():
            batch["ref_log_prob"], _ = verl_tokens(adapted, batch)
    logged = algorithms.agg_loss(
        entropy, batch["response_mask"], actor.loss_agg_mode, loss_scale_factor=actor.loss_scale_factor
    )
    totals, gradients, metrics = [], [], []
    for folder in (ours.first, ours.moved):
        adapted.load(folder)
        total, found = 0.0, defaultdict(float)
        for rows in torch.arange(len(answers.rewards)).chunk(parts):
            loss, numbers = verl_loss(adapted, losses, actor, batch, rows)
            loss.backward()
            total += float(loss.detach())
            share = int(batch["response_mask"][rows].sum()) / sum(answers.lengths)
            for name in ("actor/pg_clipfrac", "actor/pg_clipfrac_lower"):
                found[name] += share * numbers[name].values[0]
            found["kl"] += float(numbers["kl_loss"].values[0]) if "kl_loss" in numbers else math.nan
        totals.append(total)
        metrics.append(found)
        gradients.append(gradient_of(adapted.model))
    return Numbers(
        batch["advantages"][:, 0].tolist(), math.nan, int(batch["response_mask"].sum()), float(logged),
        metrics[0]["kl"], (totals[0], totals[1]), (gradients[0], gradients[1]), metrics[1]["actor/pg_clipfrac"],
    )  # fmt: skip


def _objects(values: list[Any]) -> Any:
    numpy = import_module("numpy")
    found = numpy.empty(len(values), dtype=object)
    found[:] = values
    return found


def verl_batch(answers: Answers) -> dict[str, torch.Tensor]:
    """Prompts padded on the left, responses on the right, as verl's rollouts come."""
    width, length = max(map(len, answers.prompts)), max(answers.lengths)
    rows = [*zip(answers.prompts, answers.completions, strict=True)]
    prompts = torch.tensor([[answers.pad] * (width - len(p)) + p for p, _ in rows])
    responses = torch.tensor([c + [answers.pad] * (length - len(c)) for _, c in rows])
    before = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in rows])
    mask = torch.tensor([[1] * len(c) + [0] * (length - len(c)) for _, c in rows])
    attention = torch.cat([before, mask], 1)
    return {
        "prompts": prompts, "responses": responses, "response_mask": mask, "attention_mask": attention,
        "input_ids": torch.cat([prompts, responses], 1),
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
    }  # fmt: skip


def verl_tokens(adapted: Adapted, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies (B, T) of the responses, by verl from logits of transformers."""
    functional = import_module("verl.utils.torch_functional")
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    width = batch["responses"].shape[1]
    logits = adapted.model(**inputs).logits[:, -width - 1 : -1]
    labels = batch["responses"]
    return functional.logprobs_from_logits_v2(logits, labels), functional.entropy_from_logits(logits)


def verl_loss(adapted: Adapted, losses: Any, actor: Any, batch: dict[str, torch.Tensor], rows: torch.Tensor) -> Any:
    """The actor's loss of some rows and its metrics; padded to the longest of them, as verl does."""
    nested, mask = torch.nested.as_nested_tensor, batch["response_mask"][rows].bool()

    def cut(name: str) -> torch.Tensor:
        return nested([row[kept] for row, kept in zip(batch[name][rows], mask, strict=True)], layout=torch.jagged)

    before = batch["attention_mask"][rows, : batch["prompts"].shape[1]].bool()
    prompts = nested([row[kept] for row, kept in zip(batch["prompts"][rows], before, strict=True)], layout=torch.jagged)
    found = {name: tensor[rows] for name, tensor in batch.items()}
    log_probs, entropy = verl_tokens(adapted, found)

    def with_prompts(values: torch.Tensor) -> torch.Tensor:
        """(all tokens,): what a model computes for each token of the next, 0 where nobody reads it."""
        each = [torch.cat([values.new_zeros(int(p.sum()) - 1), v[m], values.new_zeros(1)])
                for p, v, m in zip(before, values, mask, strict=True)]  # fmt: skip
        return torch.cat(each)

    fields = {name: cut(name) for name in ("old_log_probs", "advantages", "ref_log_prob", "responses", "response_mask")}
    count = len(batch["prompts"])
    data = import_module("verl.utils.tensordict_utils").get_tensordict(
        {**fields, "prompts": prompts},
        {"dp_size": 1, "batch_num_tokens": int(batch["response_mask"].sum()), "global_batch_size": count},
    )
    return losses.ppo_loss(actor, {"log_probs": with_prompts(log_probs), "entropy": with_prompts(entropy)}, data)
