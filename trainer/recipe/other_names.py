"""The names that TRL, NeMo RL, verl, OpenRLHF and others have for a recipe's keys; `unknown key` suggests ours.

A name may also be dotted, for one section only. Of several keys, those count that the recipe's algorithm has.
"""

from __future__ import annotations

OTHER_NAMES: dict[str, tuple[str, ...]] = {
    # length of the run
    **dict.fromkeys(("steps", "num_steps", "max_num_steps", "total_steps", "num_train_steps"), ("max_steps",)),
    **dict.fromkeys(("total_training_steps", "num_batches", "iterations", "max_iterations"), ("max_steps",)),
    **dict.fromkeys(("num_epochs", "num_train_epochs", "total_epochs", "max_epochs", "n_epochs"), ("epochs",)),
    # batches
    **dict.fromkeys(("train_batch_size", "global_batch_size"), ("batch_size", "rollouts.tasks_per_step")),
    **dict.fromkeys(("train_global_batch_size", "rollout_batch_size"), ("batch_size", "rollouts.tasks_per_step")),
    **dict.fromkeys(("num_prompts_per_step", "groups_per_batch"), ("rollouts.tasks_per_step",)),
    **dict.fromkeys(("num_generations", "num_generations_per_prompt", "n_samples"), ("rollouts.group_size",)),
    **dict.fromkeys(("n_samples_per_prompt", "rollouts_per_example", "repeats"), ("rollouts.group_size",)),
    **dict.fromkeys(("micro_batch_size", "per_device_train_batch_size"), ("micro_batch_tokens",)),
    **dict.fromkeys(("train_micro_batch_size", "gradient_accumulation_steps"), ("micro_batch_tokens",)),
    **dict.fromkeys(("ppo_micro_batch_size_per_gpu", "max_tokens_per_mb"), ("micro_batch_tokens",)),
    **dict.fromkeys(("ppo_mini_batch_size", "ppo_n_minibatches", "num_iterations"), ("rollouts.updates_per_step",)),
    # optimizer
    **dict.fromkeys(("optim", "optimizer_type", "optimizer_name"), ("optimizer.name",)),
    **dict.fromkeys(("learning_rate", "actor_learning_rate"), ("optimizer.lr",)),
    **dict.fromkeys(("adam_betas", "beta1", "beta2"), ("optimizer.betas",)),
    **dict.fromkeys(("grad_clip", "clip_grad", "max_norm", "gradient_clipping"), ("optimizer.max_grad_norm",)),
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_type", "scheduler", "lr_schedule"), ("schedule.name",)),
    **dict.fromkeys(("num_warmup_steps", "lr_warmup_steps"), ("schedule.warmup_steps",)),
    **dict.fromkeys(("min_lr", "min_lr_ratio"), ("schedule.final",)),
    # model
    **dict.fromkeys(("model_name", "model_name_or_path", "pretrain", "model.name"), ("model.path",)),
    **dict.fromkeys(("lora_rank", "lora_r"), ("model.lora.rank",)),
    **dict.fromkeys(("lora_alpha",), ("model.lora.alpha",)),
    **dict.fromkeys(("lora_target_modules", "target_modules"), ("model.lora.targets",)),
    **dict.fromkeys(("load_in_4bit", "bnb_4bit_quant_type", "quant_type", "qlora"), ("model.lora.base_4bit",)),
    **dict.fromkeys(("quantization", "quantization_config", "quantize", "quantization_bit"), ("model.lora.base_4bit",)),
    **dict.fromkeys(("bf16", "fp16", "dtype", "torch_dtype", "bnb_4bit_compute_dtype"), ("engine.precision",)),
    **dict.fromkeys(("tf32", "allow_tf32", "matmul_precision"), ("engine.float32_matmul_precision",)),
    **dict.fromkeys(("gradient_checkpointing",), ("engine.activation_checkpointing",)),
    **dict.fromkeys(("zero", "stage"), ("engine.zero_stage",)),
    # objective
    **dict.fromkeys(("kl_coef", "init_kl_coef", "kl_loss_coef", "kl_beta"), ("algorithm.kl.coef",)),
    "beta": ("algorithm.beta", "algorithm.kl.coef"),
    **dict.fromkeys(("epsilon", "eps_clip", "clip_ratio", "clip_range"), ("algorithm.loss.clip_low",)),
    **dict.fromkeys(("epsilon_high", "eps_clip_high", "clip_ratio_high"), ("algorithm.loss.clip_high",)),
    **dict.fromkeys(("adv_estimator", "advantage_estimator"), ("algorithm.advantage.estimator",)),
    **dict.fromkeys(("router_replay", "use_rollout_routing_replay"), ("algorithm.routing_replay",)),
    # rollouts
    **dict.fromkeys(("max_tokens", "max_new_tokens", "max_completion_length"), ("rollouts.max_output_tokens",)),
    **dict.fromkeys(("max_response_length", "max_generation_steps"), ("rollouts.max_output_tokens",)),
    **dict.fromkeys(("environment", "env"), ("rollouts.agent", "rollouts.environments")),
    **dict.fromkeys(("train_data", "train_files"), ("data.path", "rollouts.tasks")),
    # evaluation, checkpoints, logging
    **dict.fromkeys(("eval_steps", "eval_interval", "val_period", "test_freq"), ("evaluation.every",)),
    **dict.fromkeys(
        ("save_steps", "save_interval", "save_period", "save_freq", "ckpt_interval"), ("checkpoint.every",)
    ),
    **dict.fromkeys(("save_total_limit", "keep_top_k", "max_ckpts_to_keep"), ("checkpoint.keep",)),
    **dict.fromkeys(("output_dir", "save_path", "ckpt_path", "log_dir"), ("output",)),
    **dict.fromkeys(("wandb_project", "project_name"), ("logging.wandb.project",)),
    **dict.fromkeys(("random_seed",), ("seed",)),
}
