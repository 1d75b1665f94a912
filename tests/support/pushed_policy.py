"""The trainer's side of a weight push: a network whose weights change, and the proof of its log-probabilities."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ngym.trainer.weights import replica

PROMPT = [1, 40, 41, 42, 2, 1, 77, 90, 50, 60, 61, 62, 63]
Weights = dict[str, Tensor]


def write_experts(folder: Path, checkpoint: Path) -> Path:
    """A mixture of experts with a head of its own, which a CPU packs differently, beside this checkpoint's tokenizer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    shape = json.loads((checkpoint / "config.json").read_text())
    same = ("vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "eos_token_id")
    config = Qwen3MoeConfig(
        **{name: shape[name] for name in same},
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=shape["max_position_embeddings"],
        tie_word_embeddings=False,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


class Policy:
    """The network in transformers, with the weights that the server should have."""

    def __init__(self, checkpoint: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.network = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    def change(self, seed: int) -> Weights:
        """Other random weights, as a trainer would hand them over: the tied head under both its names."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.network.parameters():
                scale = 0.2 if parameter.ndim > 1 else 0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        return dict(self.network.state_dict())

    @torch.no_grad()
    def logprobs(self, ids: list[int], first: int = 1) -> list[float]:
        logits_TV = self.network(torch.tensor([ids])).logits[0, first - 1 : -1]
        return logits_TV.log_softmax(-1).gather(1, torch.tensor(ids[first:])[:, None])[:, 0].tolist()

    def proof(self) -> Any:
        return replica.LogprobProof(PROMPT, self.logprobs(PROMPT))


class Experts(Policy):
    def change(self, seed: int) -> Weights:
        from transformers.core_model_loading import revert_weight_conversion

        weights = revert_weight_conversion(self.network, super().change(seed))  # transformers fuses the experts
        return {name: tensor.clone() for name, tensor in weights.items()}
