"""A GRPOTrainer run for tests/trainer/test_trl.py: ROWS CONFIG NAME... -> TRL's log as a line of JSON."""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import torch
from datasets import Dataset
from paths import ROOT
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM, set_seed
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

from ngym.trl import TrlGym

TOKENIZER = ROOT / "data" / "tiny_policy" / "tokenizer"
STEPS = 2


def main(rows: str, config: str, *names: str) -> None:
    set_seed(0)
    gyms = [TrlGym(name, config) for name in names]
    tasks = [task for gym in gyms for task in gym.tasks(rows)]
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.response_template = qwen3_template
    tools = [gyms[0].environment().add]  # type: ignore[attr-defined]
    model = fit_model(tokenizer, [demonstration(tokenizer, task, tools) for task in tasks])
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            folder, max_steps=STEPS, per_device_train_batch_size=8, num_generations=4, max_completion_length=64,
            max_tool_calling_iterations=2, logging_steps=1, report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=model,
            args=args,
            processing_class=tokenizer,
            train_dataset=Dataset.from_list(tasks),
            environment_factory={gym.name: gym.environment for gym in gyms},
            reward_funcs=[gym.verify for gym in gyms],
        )
        trainer.train()
    print(json.dumps([step for step in trainer.state.log_history if "reward" in step]))


def demonstration(tokenizer: PreTrainedTokenizerBase, task: dict[str, Any], tools: list[Any]) -> list[int]:
    call = {"type": "function", "function": {"name": "add", "arguments": {"amount": json.loads(task["row"])["target"]}}}
    messages = [
        *task["prompt"],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": json.dumps({"total": 5}, separators=(",", ":"))},
        {"role": "assistant", "content": "The answer is 5."},
    ]
    return tokenizer.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=False)


def fit_model(tokenizer: PreTrainedTokenizerBase, sequences: list[list[int]]) -> Qwen3ForCausalLM:
    """A tiny model that says these sequences."""
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=512,
            initializer_range=0.05,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(100):
        for ids in sequences:
            batch = torch.tensor([ids])
            model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


if __name__ == "__main__":
    main(*sys.argv[1:])
