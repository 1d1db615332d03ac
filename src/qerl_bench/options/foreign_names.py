"""What TRL, verl, OpenRLHF, PEFT and Transformers call our options, for the message to who types such a name.

Nothing is translated silently: the two are not always the same, as batch_size counts completions in one place and
prompts in another.
"""

from __future__ import annotations

LEARNING_RATE = ("optim.lr",)
GROUP = ("rollout.group_size",)
PROMPTS = ("rollout.prompts_per_step", "train.micro_batch_tokens")
CLIP = ("algo.epsilon_low", "algo.epsilon_high")
STEPS = ("steps",)
COMPLETION = ("task.max_completion_tokens",)
FORMAT = ("quant",)

OPTIONS_FOR = {  # the last part of a key elsewhere -> config keys or axes of this project
    "learning_rate": LEARNING_RATE,
    "actor_learning_rate": LEARNING_RATE,
    "lr_scheduler_type": ("optim.schedule",),
    "warmup": ("optim.warmup_steps",),
    "warmup_ratio": ("optim.warmup_steps",),
    "max_norm": ("optim.max_grad_norm",),
    "clip_grad": ("optim.max_grad_norm",),
    "num_generations": GROUP,
    "n_samples_per_prompt": GROUP,
    "samples_per_prompt": GROUP,
    "completions_per_prompt": GROUP,
    "n": GROUP,
    "batch_size": PROMPTS,
    "train_batch_size": PROMPTS,
    "rollout_batch_size": PROMPTS,
    "per_device_train_batch_size": PROMPTS,
    "micro_train_batch_size": PROMPTS,
    "gradient_accumulation_steps": ("train.micro_batch_tokens",),
    "num_iterations": ("train.updates_per_batch",),
    "ppo_epochs": ("train.updates_per_batch",),
    "beta": ("kl.coef",),
    "kl_coef": ("kl.coef",),
    "kl_loss_coef": ("kl.coef",),
    "init_kl_coef": ("kl.coef",),
    "entropy_coeff": ("train.entropy_coef",),
    "clip": CLIP,
    "clip_range": CLIP,
    "clip_ratio": CLIP,
    "eps_clip": CLIP,
    "epsilon": CLIP,
    "clip_ratio_low": ("algo.epsilon_low",),
    "clip_ratio_high": ("algo.epsilon_high",),
    "loss_type": ("algo",),
    "algorithm": ("algo",),
    "adv_estimator": ("algo",),
    "max_steps": STEPS,
    "num_steps": STEPS,
    "total_training_steps": STEPS,
    "epochs": STEPS,
    "num_train_epochs": STEPS,
    "total_epochs": STEPS,
    "seeds": ("seed",),
    "save_steps": ("save_every",),
    "eval_steps": ("eval.every",),
    "output_dir": ("root", "name"),
    "run_name": ("name",),
    "max_completion_length": COMPLETION,
    "max_response_length": COMPLETION,
    "max_new_tokens": COMPLETION,
    "max_seq_length": COMPLETION,
    "max_length": COMPLETION,
    "dataset": ("task",),
    "dataset_name": ("task",),
    "env": ("task",),
    "reward_funcs": ("reward.file",),
    "reward_function": ("reward.file",),
    "reward_function_path": ("reward.file",),
    "custom_reward_function": ("reward.file",),
    "model_name": ("model",),
    "model_name_or_path": ("model",),
    "r": ("lora.rank",),
    "lora_r": ("lora.rank",),
    "lora_rank": ("lora.rank",),
    "lora_alpha": ("lora.alpha",),
    "lora_dropout": ("lora.dropout",),
    "target_modules": ("lora.targets",),
    "load_in_4bit": FORMAT,
    "quantization": FORMAT,
    "bits": FORMAT,
    "gradient_checkpointing": ("train.recompute",),
    "activation_checkpointing": ("train.recompute",),
    "bf16": ("model.dtype",),
    "fp16": ("model.dtype",),
    "dtype": ("model.dtype",),
    "torch_dtype": ("model.dtype",),
    "use_vllm": ("engine",),
    "vllm": ("engine",),
    "report_to": ("logger",),
    "wandb": ("logger",),
    "use_wandb": ("logger",),
    "train_path": ("task.train_file",),
    "train_files": ("task.train_file",),
    "val_files": ("task.eval_file",),
    "gpu": ("device",),
    "sigma": ("aqn.level", "aqn.sigma_start"),
    "noise_scale": ("aqn.level", "aqn.sigma_start"),
}

CONTINUED = "The same command continues a run from its last checkpoint; a finished run is not repeated"
SEVERAL = (
    "torchrun --standalone --nproc-per-node N src/run.py ... makes one run on N GPUs, and a sweep, -m, uses all that "
    "CUDA_VISIBLE_DEVICES shows"
)
FULL = (
    "Rollouts sample from the whole distribution, at rollout.temperature, since the trainer's log-probabilities are of "
    "it; evaluations take eval.top_p"
)
EACH = "Every step is logged: metrics.jsonl, run.log, and the loggers that logger=... adds"
SENT = "qerl-bench publish runs/NAME to=hub repo=OWNER/NAME sends a finished run"
WITHOUT_KEY = {  # what is no option here -> how it is done
    **dict.fromkeys(("resume", "resume_from", "resume_from_checkpoint", "resume_mode"), CONTINUED),
    **dict.fromkeys(("gpus", "num_gpus", "n_gpus", "n_gpus_per_node", "devices", "num_processes"), SEVERAL),
    **dict.fromkeys(("top_p", "top_k", "min_p"), FULL),
    **dict.fromkeys(("push_to_hub", "hub_model_id"), SENT),
    "gguf": "model=FILE.gguf trains a GGUF file",
    **dict.fromkeys(("logging_steps", "log_freq", "log_every"), EACH),
}
ON = ("on", "true", "yes")  # of an axis, whose options have names
