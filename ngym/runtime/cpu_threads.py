"""Threads and memory of a model on a CPU: the number of threads, how they wait for each other, and the KV cache."""

from __future__ import annotations

import math
import os
import sys
from contextlib import suppress

from ngym.net.json_limits import free_memory, own_group

SLEEPING = {"OMP_WAIT_POLICY": "PASSIVE"}
SPINNING_BRIEFLY = {**SLEEPING, "GOMP_SPINCOUNT": "2000"}  # up to 0.1 ms, and then they sleep
CPUS = "NGYM_CPUS"
"""The variable with the cores of a service's process: `resources.cpus`, or its share of the machine among replicas."""
PROCESSES = "NGYM_PROCESSES"
"""The variable with the most processes of a service on this machine, its own included."""
PARAMETERS_PER_THREAD = 10_000_000
"""Parameters. On two cores, two threads sample from 5 million as fast as one does, and from 12 million in 0.7 of the time."""


def limit_spinning(*, alone: bool) -> None:
    """Limit how long torch's threads spin while they wait for each other. Called before OpenMP is loaded.

    OpenMP's default, some milliseconds, makes a step take many times as long when other processes need the cores. Without
    any, each operation wakes a thread, and a step of a tiny model takes up to 1.5 times as long. With up to 0.1 ms it does
    not, but beside another busy process it takes 1.7 times as long as with threads that sleep at once.

    alone: nothing else of the run computes during a step. Otherwise threads sleep at once.
    """
    for name, value in (SPINNING_BRIEFLY if alone else SLEEPING).items():
        os.environ.setdefault(name, value)


def usable_cores() -> int:
    """The cores that this process may use, at least 1: its affinity, the limit of its control group, which containers
    have, and the variable CPUS.
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # a group without a limit has no such file, or "max" in it
        quota, period = map(int, (own_group() / "cpu.max").read_text().split())
        cores = min(cores, math.ceil(quota / period))
    with suppress(ValueError, OverflowError):
        cores = min(cores, max(1, math.ceil(float(os.environ.get(CPUS, "")))))
    return cores


def serving_threads(requested: int | None, parameters: int | None, processes: int = 1) -> int:
    """The threads of each process that computes a model for a server.

    Args:
        requested: by its options; None: one, and another for every 10 million parameters, up to the usable cores. The threads
            of a small model would wait for each other longer than they compute.
        parameters: of the model; None: not known, and taken for large.
        processes: that share the cores.
    """
    if requested is not None:
        return requested
    cores = max(1, usable_cores() // processes)
    return cores if parameters is None else min(cores, 1 + parameters // PARAMETERS_PER_THREAD)


def cache_memory() -> int:
    """The bytes that the KV cache of a server may take by default: a quarter of the free memory, or its share of half of
    it among more than two processes.
    """
    processes = 1
    with suppress(ValueError):
        processes = int(os.environ.get(PROCESSES, ""))
    return free_memory() // max(4, 2 * processes)
