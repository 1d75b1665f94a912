"""The cost of JSON before it is parsed, and the memory that it may take.

orjson reads 1024 levels and writes 254: input must be serializable again inside another object. The weight bounds how
long a parser, a validator and a serializer hold the interpreter. Large JSON is handled in threads, so that the event
loop can answer other requests in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

import orjson

RESERVED_BYTES = 64 << 20  # bytes that always stay free
PAGE = resource.getpagesize()
# An empty list or dict, with its header and its slot in a container: the most that a few bytes of JSON become.
OBJECT_BYTES = 88
MAX_DEPTH = 250
ORJSON_WRITES = 254
RECURSION = "Recursion limit reached"  # orjson's message
CALL_BYTES = 16 << 20  # of a request body: a tool's arguments, and all that is not the next
ROW_BYTES = 32 << 20  # rows and conversations, images included; parsing one long text takes 0.12 s
BULK_WEIGHT = 4_000_000  # of a request with many rows
NODE_WEIGHT = 8  # of an object, a list, and a member of an object; other values have weight 1
BYTES_OF_WEIGHT = 16  # bytes that add a weight of 1, for long numbers
LOOP_BYTES = 256 << 10  # smaller JSON is handled on the event loop, within some milliseconds
_NOT_MARKS = bytes(set(range(256)) - set(b",[{:"))
_NOT_BEFORE_VALUES = bytes(set(range(256)) - set(b",[{"))
LONG_NUMBER = re.compile(rb"\d{19}")  # orjson reads an integer beyond 64 bits as a float
_threads = ThreadPoolExecutor(2, thread_name_prefix="json")
Result = TypeVar("Result")


def is_room_for(size: int) -> bool:
    """Whether this many more bytes fit, with RESERVED_BYTES left."""
    return size + RESERVED_BYTES < free_memory()


def free_memory() -> int:
    """The bytes that this process could still take: of its address space, its control group, and the machine."""
    return min(_of_the_limit(), _of_the_group(), _of_the_machine())


def own_group() -> Path:
    """The folder of this process in control groups v2, in a container that of the container. Raises OSError."""
    return Path("/sys/fs/cgroup", Path("/proc/self/cgroup").read_text().rpartition("0::/")[2].strip())


def parsed_bytes(raw: bytes) -> int:
    """An upper bound of the bytes that JSON takes once parsed."""
    return len(raw) + OBJECT_BYTES * len(raw.translate(None, _NOT_BEFORE_VALUES))


def trim(data: bytes | memoryview) -> bytes:
    """A copy of the bytes without spare capacity, for storage: orjson's output keeps its whole buffer, up to 13 times
    as large.
    """
    return bytes(memoryview(data))


def _of_the_limit() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return 1 << 62
    return limit - int(Path("/proc/self/statm").read_text().split()[0]) * PAGE


def _of_the_group() -> int:
    """From control groups v2; a group without a limit has no such files, or "max" in them."""
    with contextlib.suppress(OSError, ValueError):
        group = own_group()
        limit = int((group / "memory.max").read_text())
        cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())["inactive_file"]
        return limit - int((group / "memory.current").read_text()) + int(cached)
    return 1 << 62


def _of_the_machine() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


async def by_size(size: int, function: Callable[..., Result], *args: Any) -> Result:
    """Call the function and return its result; in a thread if size > LOOP_BYTES.

    Args:
        size: bytes of the JSON that the function handles.
    """
    if size <= LOOP_BYTES:
        return function(*args)
    return await asyncio.get_running_loop().run_in_executor(_threads, function, *args)


def serialize(value: Any) -> bytes:
    """The value as JSON, without spare memory."""
    return trim(orjson.dumps(value))


def json_weight(raw: bytes) -> int:
    """The weight of JSON, an upper bound: characters within strings are also counted."""
    marks = raw.translate(None, _NOT_MARKS)  # one pass, which is two to three times as fast as to count each mark
    commas = marks.count(b",")
    return len(raw) // BYTES_OF_WEIGHT + commas + NODE_WEIGHT * (len(marks) - commas)


def _has_more_brackets(raw: bytes, most: int) -> bool:
    """Whether there are more brackets than `most` that open."""
    if len(raw) <= LOOP_BYTES:
        return raw.count(b"[") + raw.count(b"{") > most
    for bracket in (b"[", b"{"):  # in long texts, `find` is ten times as fast as `count`
        place = raw.find(bracket)
        while place >= 0 and most >= 0:
            most -= 1
            place = raw.find(bracket, place + 1)
    return most < 0


def is_deep(raw: bytes, value: Any, depth: int = MAX_DEPTH) -> bool:
    """Whether parsed JSON is nested deeper than `depth`. Most `raw` JSON has fewer brackets than that."""
    if len(raw) <= 2 * depth or not _has_more_brackets(raw, depth):
        return False
    try:
        orjson.dumps(reduce(lambda inner, _: [inner], range(ORJSON_WRITES - depth), value))
    except TypeError as error:  # the other reason is an integer beyond 64 bits, as json.loads reads it
        return str(error) == RECURSION or _nests_deeper(value, depth)
    return False


def _nests_deeper(value: Any, depth: int) -> bool:
    """As `is_deep`, for any value, at 50 times the cost."""
    containers = [value] if isinstance(value, dict | list) else []
    for _ in range(depth):
        values = (one.values() if isinstance(one, dict) else one for one in containers)
        containers = [inner for one in values for inner in one if isinstance(inner, dict | list)]
    return bool(containers)
