"""Trainer and policy servers on the same GPUs: whose turn is it to use their memory?

    sampling   the servers hold weights and KV cache; the trainer's states are in the host's memory
    training   the servers sleep; the states are back
    pushing    the trainer's weights and those of the servers are there, and nothing else of either

Every rank goes through the turns together; rank 0 tells the servers. A server that was started again meanwhile is awake
all the time: telling it to wake changes nothing.
"""

from __future__ import annotations

from ..engine.distributed import wait_for_all
from ..engine.engine import Engine
from .push import Pusher


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
