"""Which GPUs the processes of a config get on this machine, and whether their `resources` fit it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from ngym.config.service_config import Config, Resources, Stanza
from ngym.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
QUERY = ("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
QUERY_S = 30.0


class Machine(NamedTuple):
    """What this machine has. gpus: as CUDA_VISIBLE_DEVICES names them."""

    gpus: tuple[str, ...]
    cpus: int
    memory_gb: float


def this_machine(environ: Mapping[str, str] = os.environ) -> Machine:
    """The GPUs of CUDA_VISIBLE_DEVICES if that is set, else those that nvidia-smi lists; usable cores; memory."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # the limit of a container
        size = min(size, int(CGROUP_LIMIT.read_text()))
    return Machine(visible_gpus(environ), cpus, size / 2**30)


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    if VISIBLE in environ:
        names = (name.strip() for name in environ[VISIBLE].split(","))
        return tuple(takewhile(lambda name: name not in ("", "-1"), names))  # CUDA, too, stops at the first invalid one
    with suppress(OSError, subprocess.SubprocessError):
        return tuple(subprocess.run(QUERY, capture_output=True, text=True, check=True, timeout=QUERY_S).stdout.split())
    return ()


def processes(config: Config) -> Iterator[tuple[Stanza, int, Resources]]:
    """Every process that asks for resources: its stanza, its replica's number, and what it asks for."""
    for stanza in config.services.values():
        if stanza.resources is not None and not stanza.external:
            for replica in range(stanza.first_replicas):
                yield stanza, replica, stanza.resources


def gpu_slices(config: Config, machine: Machine | None = None) -> dict[tuple[str, int], tuple[str, ...]]:
    """(service, replica) -> its GPUs, for every process whose stanza has `resources.gpus`.

    Services get the last GPUs of the machine, in the config's order, because a trainer without a launcher uses the
    first one.

    Raises:
        ConfigError: the resources do not fit this machine, or a service needs several machines.
    """
    asking = list(processes(config))
    if not asking:
        return {}
    machine = machine or this_machine()
    _check_fits(asking, machine)
    slices: dict[tuple[str, int], tuple[str, ...]] = {}
    begin = len(machine.gpus) - sum(asked.gpus or 0 for _, _, asked in asking)
    for stanza, replica, asked in asking:
        if asked.gpus is not None:
            slices[stanza.name, replica] = machine.gpus[begin : begin + asked.gpus]
            begin += asked.gpus
    return slices


def spare_gpus(
    asked: Resources, reserved: Collection[tuple[Resources, Sequence[str]]], machine: Machine
) -> tuple[str, ...] | None:
    """The GPUs of one more process: the last free ones. None: the machine has no room for it.

    reserved: what the other processes asked for, and their GPUs.
    """
    taken = {gpu for _, gpus in reserved for gpu in gpus}
    free = [gpu for gpu in machine.gpus if gpu not in taken]
    for key, there in (("cpus", machine.cpus), ("memory_gb", machine.memory_gb)):
        if sum(getattr(one, key) or 0 for one in (asked, *(one for one, _ in reserved))) > there:
            return None
    count = asked.gpus or 0
    return tuple(free[len(free) - count :]) if count <= len(free) else None


def _check_fits(asking: list[tuple[Stanza, int, Resources]], machine: Machine) -> None:
    for key, there in (("gpus", len(machine.gpus)), ("cpus", machine.cpus), ("memory_gb", machine.memory_gb)):
        parts: dict[str, float] = {}
        for stanza, _, asked in asking:
            parts[stanza.name] = parts.get(stanza.name, 0) + (getattr(asked, key) or 0)
        if (wanted := sum(parts.values())) > there:
            each = ", ".join(f"{name} {part:g}" for name, part in parts.items() if part)
            largest = max((stanza for stanza, _, _ in asking), key=lambda stanza: parts[stanza.name])
            where = largest.key_where.get(f"resources.{key}", largest.where)
            raise ConfigError(
                f"{where}: resources.{key}: this machine has {there:.4g}, the services ask for {wanted:g} ({each}); "
                "ask for less, or run on several machines (docs/scale.md)"
            )
