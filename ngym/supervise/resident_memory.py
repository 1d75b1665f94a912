"""How much memory does each service take, with all the processes that it started? Linux's /proc knows; elsewhere nobody."""

from __future__ import annotations

import resource
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
PAGE_BYTES = resource.getpagesize()
SESSION, RESIDENT = 3, 21  # fields of /proc/PID/stat after the name


def resident_bytes(leaders: Collection[int]) -> dict[int, int]:
    """Resident bytes by session leader, which every service's process is; pages that its processes share count in each."""
    found = dict.fromkeys(leaders, 0)
    if not found:
        return {}
    for stat in PROC.glob("[0-9]*/stat"):
        with suppress(OSError, IndexError, ValueError):  # it has just ended
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            session = int(fields[SESSION])
            if session in found:
                found[session] += int(fields[RESIDENT]) * PAGE_BYTES
    return {leader: size for leader, size in found.items() if size}
