"""The memory that this process may still take: the least of what its limit, its control group and the machine have
left.
"""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

SPARE = 64 << 20  # bytes that always stay free
PAGE = resource.getpagesize()
OBJECT = (
    88  # an empty list or dict, with its header and its slot in a container: the most that a few bytes of JSON become
)


def is_room_for(size: int) -> bool:
    """Whether this many more bytes fit, with SPARE left."""
    return size + SPARE < free_bytes()


def parsed_bytes(raw: bytes) -> int:
    """An upper bound of the bytes that JSON takes once parsed."""
    return len(raw) + OBJECT * sum(map(raw.count, (b",", b"[", b"{")))


def fitted(data: bytes | memoryview) -> bytes:
    """A copy of the bytes without spare capacity, for storage: orjson's output keeps its whole buffer, up to 13 times
    as large.
    """
    return bytes(memoryview(data))


def free_bytes() -> int:
    """Bytes that this process could still take."""
    return min(_of_the_limit(), _of_the_group(), _of_the_machine())


def _of_the_limit() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return 1 << 62
    return limit - int(Path("/proc/self/statm").read_text().split()[0]) * PAGE


def _of_the_group() -> int:
    """From control groups v2; a group without a limit has no such files, or "max" in them."""
    with contextlib.suppress(OSError, ValueError):
        path = Path("/proc/self/cgroup").read_text().rpartition("0::/")[2].strip()
        group = Path("/sys/fs/cgroup", path)
        limit = int((group / "memory.max").read_text())
        cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())["inactive_file"]
        return limit - int((group / "memory.current").read_text()) + int(cached)
    return 1 << 62


def _of_the_machine() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
