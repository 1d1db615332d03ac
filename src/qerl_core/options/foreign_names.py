"""What TRL, verl, OpenRLHF, PEFT and Transformers call our options, for the message to who types such a name.

Nothing is translated silently: the two are not always the same, as batch_size counts completions in one place and
prompts in another.
"""

from __future__ import annotations

NAMES_ELSEWHERE = {  # config keys or axes of this project -> the last parts of keys elsewhere
    "optim.lr": "learning_rate actor_learning_rate",
    "optim.schedule": "lr_scheduler_type",
    "optim.warmup_steps": "warmup warmup_ratio",
    "optim.max_grad_norm": "max_norm clip_grad",
    "rollout.group_size": "num_generations n_samples_per_prompt samples_per_prompt completions_per_prompt n",
    "rollout.prompts_per_step train.micro_batch_tokens": (
        "batch_size train_batch_size rollout_batch_size per_device_train_batch_size micro_train_batch_size"
    ),
    "train.micro_batch_tokens": "gradient_accumulation_steps",
    "train.updates_per_batch": "num_iterations ppo_epochs",
    "kl.coef": "beta kl_coef kl_loss_coef init_kl_coef",
    "train.entropy_coef": "entropy_coeff",
    "algo.epsilon_low algo.epsilon_high": "clip clip_range clip_ratio eps_clip epsilon",
    "algo.epsilon_low": "clip_ratio_low",
    "algo.epsilon_high": "clip_ratio_high",
    "algo": "loss_type algorithm adv_estimator",
    "steps": "max_steps num_steps total_training_steps epochs num_train_epochs total_epochs",
    "seed": "seeds",
    "save_every": "save_steps",
    "eval.every": "eval_steps",
    "root name": "output_dir",
    "name": "run_name",
    "task.max_completion_tokens": "max_completion_length max_response_length max_new_tokens max_seq_length max_length",
    "task": "dataset dataset_name env",
    "reward.file": "reward_funcs reward_function reward_function_path custom_reward_function",
    "model": "model_name model_name_or_path",
    "lora.rank": "r lora_r lora_rank",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "lora.targets": "target_modules",
    "quant": "load_in_4bit quantization bits",
    "train.recompute": "gradient_checkpointing activation_checkpointing",
    "model.dtype": "bf16 fp16 dtype torch_dtype",
    "engine": "use_vllm vllm",
    "logger": "report_to wandb use_wandb",
    "task.train_file": "train_path train_files",
    "task.eval_file": "val_files",
    "device": "gpu",
    "aqn.level aqn.sigma_start": "sigma noise_scale",
}
OPTIONS_FOR = {theirs: tuple(ours.split()) for ours, names in NAMES_ELSEWHERE.items() for theirs in names.split()}

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
CHECKED = (
    "Every command checks all of its runs before the first one starts. --cfg job prints the config of one run and "
    "starts none; hydra/launcher=slurm hydra.launcher.dry_run=true prints the jobs of a sweep"
)
WITHOUT_KEY = {  # what is no option here -> how it is done
    **dict.fromkeys(("resume", "resume_from", "resume_from_checkpoint", "resume_mode"), CONTINUED),
    **dict.fromkeys(("gpus", "num_gpus", "n_gpus", "n_gpus_per_node", "devices", "num_processes"), SEVERAL),
    **dict.fromkeys(("top_p", "top_k", "min_p"), FULL),
    **dict.fromkeys(("push_to_hub", "hub_model_id"), SENT),
    **dict.fromkeys(("dry_run", "dryrun", "dry"), CHECKED),
    "gguf": "model=FILE.gguf trains a GGUF file",
    **dict.fromkeys(("logging_steps", "log_freq", "log_every"), EACH),
}
ON = ("on", "true", "yes")  # of an axis, whose options have names
