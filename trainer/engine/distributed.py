"""How do ranks meet, wait for one another, and part?"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ..recipe.recipe import Launch
from .heartbeat import watched

# Ranks wait while the first one collects, evaluates, or sits an outage out; one that is lost is found by its signs of life.
PATIENCE = timedelta(days=7)


@contextmanager
def joined(launch: Launch) -> Iterator[None]:
    """In the company of the other ranks (the launcher's environment says where they meet), or alone without one."""
    os.environ.setdefault("LOCAL_RANK", str(launch.local_rank))
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "nccl"
        torch.cuda.set_device(launch.local_rank)
    try:
        with watched(launch.rank, launch.ranks):
            if launch.launched:
                distributed.init_process_group(backend, timeout=PATIENCE)
            else:
                distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=PATIENCE)
            yield
    finally:
        _leave()


def _leave() -> None:
    """Through DeepSpeed, where it was used: it remembers groups, and would use dead ones in the next company."""
    comm: Any = sys.modules.get("deepspeed.comm")
    if comm is not None and comm.is_initialized():
        comm.destroy_process_group()
    elif distributed.is_initialized():
        distributed.destroy_process_group()


def wait_for_all() -> None:
    """Return when every rank has come here."""
    distributed.barrier()
