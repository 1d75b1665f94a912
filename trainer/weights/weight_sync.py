"""Weight sync: counts the versions of the weights, and pushes each to the model servers that lack it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ngym.telemetry import tracing

from ..data.samples import Sample, Segment
from ..engine.engine import Engine
from ..engine.sanity_checks import check_finite
from ..model.packing import pack
from ..recipe.recipe import Recipe
from .colocated_phases import ColocatedPhases
from .push import Pusher
from .replica import AdapterShape, LogprobProof

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


PROMPT = "Tom has 37 coins and buys 58 more. How many coins does Tom have?"


class Membership(Protocol):
    """The replicas of the policy that join and wait for weights."""

    def waiting(self, has_trained: bool = False) -> list[str]:
        """The ready ones that have not been tried with the current version. has_trained: it is about to change."""

    def record_proof(
        self, version: int, urls: Sequence[str], joined: Sequence[str], problems: Mapping[str, str]
    ) -> None:
        """Tell the callers' map which replicas serve this version. problems: the reasons of those that do not."""

    async def watch(self, notice: Callable[[], None]) -> None:
        """Call `notice` while replicas wait, until cancelled."""


class WeightSync:
    """Counts the weight versions, and syncs the servers to the engine's. Every rank calls `publish`; rank 0 pushes.

    Args:
        pusher: on rank 0; None elsewhere.
        probe: the token ids of a fixed prompt, for the proof after each push.
        pushed: the tensors that the pusher's transport sends: engine.weights, or engine.adapter.
        membership: the replicas that join, on rank 0 of a run that has a head and GPUs of its own.
        colocated: for a trainer that shares its GPUs with the servers.

    Attributes:
        version: of the weights that were published last.
        pushed_bytes: what a server got with them; 0 if they were served already, and on the other ranks.
    """

    def __init__(
        self,
        engine: Engine,
        pusher: Pusher | None,
        probe: list[int],
        pushed: Callable[[], dict[str, Tensor]],
        colocated: ColocatedPhases | None = None,
        membership: Membership | None = None,
    ) -> None:
        self.version = 0
        self.pushed_bytes = 0
        self.membership = membership
        self._colocated = colocated
        self._engine = engine
        self._pusher = pusher
        self._probe = Sample((Segment(probe, [(1, len(probe))]),))
        self._pushed = pushed
        self._pushed_steps: int | None = None

    def publish(self, announce: Callable[[int], None]) -> None:
        """Make the services sample with the engine's weights. Servers that already serve them keep them. If a server
        restarted with others, they are pushed again, under a new version if another replica still serves this one.
        Replicas that join get them, too, and a proof, before they get calls.

        announce: called with the version before the push, because servers use it before the push has ended.

        Raises:
            PushFailed: the servers cannot serve them. NotFinite: they are not the weights of a policy.
        """
        has_trained = self._pushed_steps != self._engine.steps
        served, joining = self._engine.broadcast(self._look_up(has_trained))
        current = not has_trained and set(served) == {self.version}
        self.pushed_bytes = 0
        if current:
            joining = self._admissible(joining)
        elif has_trained or max(served) >= self.version:
            self.version = max(*served, *joining.values(), self.version) + 1
        if current and not joining:
            self._begin_sampling()
            return
        if not current:
            announce(self.version)
            if self._colocated:
                self._colocated.push()
        packed = pack([self._probe], self._engine.device)
        with torch.no_grad():
            logprobs_N = self._engine.logprobs(packed, temperature=1.0)
        check_finite(logprobs_N, self._engine)
        proof = LogprobProof(self._probe.segments[0].token_ids, logprobs_N.tolist(), self._engine.product_dtype)
        weights = self._pushed()
        if self._pusher and not current:
            with tracing.span("push weights", "client") as span:
                span.set("ngym.policy_version", self.version)
                before_proof = self._colocated.sample if self._colocated else None
                self.pushed_bytes = self._pusher.push(self.version, weights, proof, before_proof).bytes
        elif not current:
            self._begin_sampling()
        self._pushed_steps = self._engine.steps
        if self._pusher and self.membership:
            problems = self._pusher.admit(list(joining), self.version, weights, proof)
            self.membership.record_proof(self.version, self._pusher.urls, list(joining), problems)

    def _look_up(self, has_trained: bool) -> tuple[list[int], dict[str, int]]:
        """The versions of the replicas that get calls, and those of the ones that join."""
        if self._pusher is None:
            return [0], {}
        waiting = self.membership.waiting(has_trained) if self.membership else []
        return self._pusher.versions(), self._pusher.joining(waiting)

    def _admissible(self, joining: Mapping[str, int]) -> dict[str, int]:
        """Only the replicas that can take the current version; the others wait for one above theirs."""
        later = {
            url: f"it serves version {version} of other weights, and waits for a later one"
            for url, version in joining.items()
            if version > self.version
        }
        if later and self._pusher and self.membership:
            self.membership.record_proof(self.version, self._pusher.urls, [], later)
        return {url: version for url, version in joining.items() if url not in later}

    def train(self) -> None:
        """Prepare the engine for more than pushing; on shared GPUs, sampling stops here."""
        if self._colocated:
            self._colocated.train()

    def _begin_sampling(self) -> None:
        if self._colocated:
            self._colocated.sample()


def pusher_of(
    recipe: Recipe, urls: Callable[[], Sequence[str]], token: str, say: Callable[[str], None] = lambda line: None
) -> Pusher:
    """The pusher to the policy's servers, over the recipe's transport. say: called with what a push waits for."""
    options, lora = recipe.rollouts, recipe.model.lora
    assert options is not None
    return Pusher(
        urls,
        token,
        transport=options.transport,
        folder=options.push_folder,
        adapter=AdapterShape(lora.rank, lora.alpha) if lora is not None and options.transport == "lora" else None,
        mode=options.push_mode,
        say=say,
    )


def probe_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token ids of a fixed prompt, in the chat template."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], tokenize=False, add_generation_prompt=True
    )
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
