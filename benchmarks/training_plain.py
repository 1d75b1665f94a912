"""One side of training.py: transformers, padded micro-batches and torch's AdamW, one optimiser step at a turn."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lockstep import Turns
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from ngym.trainer.algorithms.sft import Sft


def main() -> None:
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(spec["threads"])
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    network = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32)
    optimizer = torch.optim.AdamW(network.parameters(), lr=spec["lr"], betas=(0.9, 0.95), weight_decay=0.0)
    samples = Sft().samples(Path(spec["data"]), tokenizer)
    turns = Turns()
    turns.ready()
    for start in range(0, len(samples), spec["batch"]):
        batch = [segment for sample in samples[start : start + spec["batch"]] for segment in sample.segments]
        trained = sum(segment.trained for segment in batch)
        total = 0.0
        for first in range(0, len(batch), spec["micro_batch"]):
            ids_BT, labels_BT = pad_batch(batch[first : first + spec["micro_batch"]])
            logits_BTV = network(ids_BT).logits
            loss = (
                cross_entropy(logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten(), reduction="sum") / trained
            )
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        turns.done(loss=total, grad_norm=norm.item())


def pad_batch(segments: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [B, T] and labels [B, T], -100 where nothing is trained. Padding is at the end, and no token attends to it."""
    longest = max(len(segment.token_ids) for segment in segments)
    ids_BT = torch.zeros(len(segments), longest, dtype=torch.long)
    labels_BT = torch.full_like(ids_BT, -100)
    for row, segment in enumerate(segments):
        ids = torch.tensor(segment.token_ids)
        ids_BT[row, : len(ids)] = ids
        for start, end in segment.spans:
            labels_BT[row, start:end] = ids[start:end]
    return ids_BT, labels_BT


if __name__ == "__main__":
    main()
