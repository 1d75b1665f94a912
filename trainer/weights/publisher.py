"""Publishes weights to the model servers, apart or on shared GPUs.

    sampling   the servers hold weights and KV cache; the trainer's states are in the host's memory
    training   the servers sleep; the states are back
    pushing    the trainer's weights and those of the servers are there, and nothing else of either

Every rank goes through the turns together; rank 0 tells the servers. A server that was started again meanwhile is awake
all the time: telling it to wake changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ngym.telemetry import tracing

from ..data.samples import Sample, Segment
from ..engine.distributed import wait_for_all
from ..engine.engine import Engine
from ..model.packing import pack
from ..recipe.recipe import Recipe
from .push import AdapterShape, Proof, Pusher

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


PROMPT = "Tom has 37 coins and buys 58 more. How many coins does Tom have?"


class Colocated:
    """The turns.

    Args:
        pusher: to the servers, on rank 0; None elsewhere.
    """

    def __init__(self, engine: Engine, pusher: Pusher | None) -> None:
        self._engine = engine
        self._pusher = pusher

    def train(self) -> None:
        """Nothing is sampled from here on, and everything of the trainer is in its place."""
        if self._pusher:
            self._pusher.sleep()
        wait_for_all()
        self._engine.reload()

    def push(self) -> None:
        """New weights can be computed with and gathered here, and loaded there."""
        if self._pusher:
            self._pusher.sleep()
        wait_for_all()
        self._engine.offload(weights=False)
        wait_for_all()
        if self._pusher:
            self._pusher.wake("weights")

    def sample(self) -> None:
        """The servers generate."""
        self._engine.offload(weights=True)
        wait_for_all()
        if self._pusher:
            self._pusher.wake("weights", "kv_cache")


class Publisher:
    """Every rank calls `publish`; rank 0 pushes.

    Args:
        pusher: on rank 0; None elsewhere.
        probe: the ids of a fixed prompt, for the proof after each push.
        pushed: what the pusher's transport sends: engine.weights, or engine.adapter.
        colocated: of a trainer that shares its GPUs with the servers.
    """

    def __init__(
        self,
        engine: Engine,
        pusher: Pusher | None,
        probe: list[int],
        pushed: Callable[[], dict[str, Tensor]],
        colocated: Colocated | None = None,
    ) -> None:
        self.version = 0
        self._colocated = colocated
        self._engine = engine
        self._pusher = pusher
        self._probe = Sample((Segment(probe, [(1, len(probe))]),))
        self._pushed = pushed
        self._pushed_steps: int | None = None

    def publish(self, announce: Callable[[int], None]) -> None:
        """Have the services sample with the engine's weights. Servers that serve them already keep them; when one came back
        with others, they are pushed again, under a new version if a replica of it still has this one.

        announce: told the version before anything is pushed, for it is served before the push has ended.

        Raises:
            PushFailed: they cannot be served.
        """
        served = self._engine.share(self._pusher.versions() if self._pusher else [0])
        learned = self._pushed_steps != self._engine.steps
        if not learned and set(served) == {self.version}:
            self._have_them_sample()
            return
        if learned or max(served) >= self.version:
            self.version = max(*served, self.version) + 1
        announce(self.version)
        if self._colocated:
            self._colocated.push()
        packed = pack([self._probe], self._engine.device)
        with torch.no_grad():
            logprobs = self._engine.logprobs(packed, temperature=1.0).tolist()
        proof = Proof(self._probe.segments[0].token_ids, logprobs, self._engine.dtype)
        weights = self._pushed()
        if self._pusher:
            with tracing.span("push weights", "client") as span:
                span.set("ngym.policy_version", self.version)
                self._pusher.push(self.version, weights, proof, self._colocated.sample if self._colocated else None)
        else:
            self._have_them_sample()
        self._pushed_steps = self._engine.steps

    def train(self) -> None:
        """The engine is about to be used for more than pushing; on shared GPUs, nothing is sampled from here on."""
        if self._colocated:
            self._colocated.train()

    def _have_them_sample(self) -> None:
        if self._colocated:
            self._colocated.sample()


def pusher_of(recipe: Recipe, urls: Sequence[str], token: str) -> Pusher:
    """To the policy's servers, over the transport of the recipe."""
    options, lora = recipe.rollouts, recipe.model.lora
    assert options is not None
    return Pusher(
        urls,
        token,
        transport=options.transport,
        folder=options.push_folder,
        adapter=AdapterShape(lora.rank, lora.alpha) if lora is not None and options.transport == "lora" else None,
        mode=options.push_mode,
    )


def probe_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """A prompt as any, with its chat template."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], tokenize=False, add_generation_prompt=True
    )
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
