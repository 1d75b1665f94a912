"""TRL's side of benchmarks/toy.py, run by the Python of another virtual environment: one JSON line a step."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback


class Steps(TrainerCallback):  # type: ignore[misc]
    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "reward" in logs:
            print(json.dumps({"step": state.global_step, "reward/mean": logs["reward"]}), flush=True)


def main() -> None:
    spec = json.loads(sys.argv[1])
    with open(spec["tasks"], encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    prompts = [[{"role": "user", "content": row["responses_create_params"]["input"]}] for row in rows]
    data = Dataset.from_dict({"prompt": prompts, "letter": [row["letter"] for row in rows]})

    def share(completions: list[list[dict[str, str]]], letter: list[str], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [text.count(one) / len(text) if text else 0.0 for text, one in zip(texts, letter, strict=True)]

    options = trl.GRPOConfig(
        output_dir=spec["folder"],
        per_device_train_batch_size=spec["rollouts"],
        num_generations=spec["group_size"],
        max_completion_length=spec["tokens"],
        max_steps=spec["steps"],
        learning_rate=spec["lr"],
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",
        scale_rewards="group",
        temperature=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,
        disable_tqdm=True,
        seed=spec["seed"],
    )
    trainer = trl.GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32),
        reward_funcs=share,
        args=options,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(spec["model"]),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Steps())
    trainer.train()


if __name__ == "__main__":
    main()
