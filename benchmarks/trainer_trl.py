"""One side of benchmarks/trainer.py, run by the Python of another virtual environment: TRL's trainer, one step at a turn."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TRL_EXPERIMENTAL_SILENCE="1")

import torch
import transformers
import trl
from datasets import Dataset, load_dataset
from lockstep import Turns
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback


class InTurn(TrainerCallback):  # type: ignore[misc]
    """Hands over when a step has been logged; making its batch is a part of the next turn."""

    def __init__(self, turns: Turns, parameters: int) -> None:
        self._turns = turns
        self._parameters = parameters

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._turns.ready(
            parameters=self._parameters, device=str(args.device), versions=[trl.__version__, transformers.__version__]
        )

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "loss" in logs:  # the last log is one of the whole run
            self._turns.done(loss=logs["loss"], grad_norm=logs["grad_norm"])


def main() -> None:
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(spec["threads"])
    torch.set_float32_matmul_precision(spec["engine"]["float32_matmul_precision"])
    transformers.set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    way = spec["way"]
    how = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    model = AutoModelForCausalLM.from_pretrained(spec["model"], **how)
    trainer = TRAINERS[spec["algorithm"]](spec, way, model, tokenizer)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(InTurn(Turns(), sum(parameter.numel() for parameter in model.parameters())))
    trainer.train()


def common(spec: dict[str, Any], way: dict[str, Any]) -> dict[str, Any]:
    """The settings that all three trainers share."""
    micro = way["micro_batch"]
    return {
        "output_dir": spec["folder"],
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": spec["batch"] // micro,
        "num_train_epochs": 1,
        "learning_rate": spec["lr"],
        "lr_scheduler_type": "constant",
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "bf16": spec["bf16"],
        "use_cpu": not torch.cuda.is_available(),
        "gradient_checkpointing": False,
        "torch_compile": way.get("compile", False),
        "disable_tqdm": True,
        "seed": 0,
    }


def sft(spec: dict[str, Any], way: dict[str, Any], model: Any, tokenizer: Any) -> Any:
    padding_free = way.get("padding_free", False)
    options = trl.SFTConfig(
        **common(spec, way),
        assistant_only_loss=True,
        padding_free=padding_free,
        max_length=None if padding_free else 1024,
        train_sampling_strategy="sequential",
    )
    data = load_dataset("json", data_files=spec["data"], split="train", cache_dir=spec["folder"] + "/cache")
    return trl.SFTTrainer(model, args=options, train_dataset=data, processing_class=tokenizer)


def dpo(spec: dict[str, Any], way: dict[str, Any], model: Any, tokenizer: Any) -> Any:
    options = trl.DPOConfig(
        **common(spec, way), beta=0.1, precompute_ref_log_probs=True, train_sampling_strategy="sequential"
    )
    data = load_dataset("json", data_files=spec["data"], split="train", cache_dir=spec["folder"] + "/cache")
    return trl.DPOTrainer(model, args=options, train_dataset=data, processing_class=tokenizer)


def grpo(spec: dict[str, Any], way: dict[str, Any], model: Any, tokenizer: Any) -> Any:
    """Trains on finished rollouts: `rollout_func`, TRL's own way to bring completions, answers from the file."""
    groups: dict[str, list[dict[str, Any]]] = {}
    with open(spec["data"], encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            groups.setdefault(str(row["_ng_task_index"]), []).append(row)
    size = len(next(iter(groups.values())))

    def rollouts(prompts: list[str], _: Any) -> dict[str, Any]:
        """prompts: each group's name, `size` times."""
        rows = [row for name in prompts[::size] for row in groups[name]]
        found: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": []}
        for row in rows:
            (segment,) = row["ng"]["segments"]
            ids, spans, logprobs = segment["token_ids"], segment["mask"], iter(segment["logprobs"])
            first = spans[0][0]
            mask = [any(start <= place < end for start, end in spans) for place in range(first, len(ids))]
            found["prompt_ids"].append(ids[:first])
            found["completion_ids"].append(ids[first:])
            found["env_mask"].append([int(each) for each in mask])
            found["logprobs"].append([next(logprobs) if each else 0.0 for each in mask])
        return {**found, "reward": [row["reward"] for row in rows]}

    def rewards(completions: list[str], reward: list[float], **_: Any) -> list[float]:
        return reward

    settings = common(spec, way)
    options = trl.GRPOConfig(
        **settings,
        num_generations=size,
        steps_per_generation=settings["gradient_accumulation_steps"],
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",
        scale_rewards="group",
        shuffle_dataset=False,
    )
    return trl.GRPOTrainer(
        model,
        reward_funcs=rewards,
        args=options,
        train_dataset=Dataset.from_dict({"prompt": list(groups)}),
        processing_class=tokenizer,
        rollout_func=rollouts,
    )


TRAINERS: dict[str, Callable[[dict[str, Any], dict[str, Any], Any, Any], Any]] = {"sft": sft, "dpo": dpo, "grpo": grpo}

if __name__ == "__main__":
    main()
