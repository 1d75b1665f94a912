"""Which weights do the services serve? Those of the trainer, under a version that counts the pushes of the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .engine import Engine
from .packing import pack
from .push import Proof, Pusher
from .samples import Sample, Segment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPT = "Tom has 37 coins and buys 58 more. How many coins does Tom have?"


class Publisher:
    """Every rank calls `publish`; rank 0 pushes.

    Args:
        pusher: on rank 0; None elsewhere.
        probe: the ids of a fixed prompt, for the proof after each push.
    """

    def __init__(self, engine: Engine, pusher: Pusher | None, probe: list[int]) -> None:
        self.version = 0
        self._engine = engine
        self._pusher = pusher
        self._probe = Sample((Segment(probe, [(1, len(probe))]),))
        self._pushed_steps: int | None = None

    def publish(self) -> None:
        """Nothing, if the services serve these weights already; a server that came back with others gets them again.

        Raises:
            PushFailed: they cannot be served.
        """
        served = self._engine.share(self._pusher.prepare() if self._pusher else 0)
        if served == self.version and self._pushed_steps == self._engine.steps:
            return
        if self._pushed_steps != self._engine.steps or served > self.version:
            self.version = max(served, self.version) + 1
        packed = pack([self._probe], self._engine.device)
        with torch.no_grad():
            logprobs = self._engine.logprobs(packed, temperature=1.0).tolist()
        weights = self._engine.weights()
        if self._pusher:
            self._pusher.push(self.version, weights, Proof(self._probe.segments[0].token_ids, logprobs))
        self._pushed_steps = self._engine.steps


def probe_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """A prompt as any, with its chat template."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], tokenize=False, add_generation_prompt=True
    )
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
