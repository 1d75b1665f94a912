"""Sleep and wake of a trainer and servers that share GPUs.

        sampling   the servers hold weights and KV cache; the trainer's states are in host memory
        training   the servers sleep; the trainer's states are back on the GPU
        pushing    only the weights of the trainer and of the servers are on the GPU

All ranks change phase together; rank 0 calls the servers. A server that restarted meanwhile is always awake, and waking
it again changes nothing.
"""

from __future__ import annotations

from ..engine.distributed import barrier
from ..engine.engine import Engine
from .push import Pusher


class ColocatedPhases:
    """Switches between the phases of trainer and servers on shared GPUs.

    Args:
        pusher: for the servers, on rank 0; None elsewhere.
    """

    def __init__(self, engine: Engine, pusher: Pusher | None) -> None:
        self._engine = engine
        self._pusher = pusher

    def train(self) -> None:
        """Put the servers to sleep and load all states of the trainer."""
        if self._pusher:
            self._pusher.sleep()
        barrier()
        self._engine.reload()

    def push(self) -> None:
        """Make the weights available on both sides, so that they can be gathered here and loaded there."""
        if self._pusher:
            self._pusher.sleep()
        barrier()
        self._engine.offload(weights=False)
        barrier()
        if self._pusher:
            self._pusher.wake("weights")

    def sample(self) -> None:
        """Offload the trainer and let the servers generate."""
        self._engine.offload(weights=True)
        barrier()
        if self._pusher:
            self._pusher.wake("weights", "kv_cache")
