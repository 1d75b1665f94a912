"""The cost of JSON before it is parsed: its nesting and its weight.

orjson reads 1024 levels and writes 254: input must be serializable again inside another object. The weight bounds how
long a parser, a validator and a serializer hold the interpreter. Large JSON is handled in threads, so that the event
loop can answer other requests in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from typing import Any, TypeVar

import orjson

from ngym.process_memory import fitted

MAX_DEPTH = 250
ORJSON_WRITES = 254
BULK_WEIGHT = 4_000_000  # of a request with many rows
NODE_WEIGHT = 8  # of an object, a list, and a member of an object; other values have weight 1
BYTES_OF_WEIGHT = 16  # bytes that add a weight of 1, for long numbers
LOOP_BYTES = 256 << 10  # smaller JSON is handled on the event loop, within some milliseconds

_threads = ThreadPoolExecutor(2, thread_name_prefix="json")
Result = TypeVar("Result")


async def by_size(size: int, function: Callable[..., Result], *args: Any) -> Result:
    """Call the function and return its result; in a thread if size > LOOP_BYTES.

    Args:
        size: bytes of the JSON that the function handles.
    """
    if size <= LOOP_BYTES:
        return function(*args)
    return await asyncio.get_running_loop().run_in_executor(_threads, function, *args)


def serialized(value: Any) -> bytes:
    """The value as JSON, without spare memory."""
    return fitted(orjson.dumps(value))


def json_weight(raw: bytes) -> int:
    """The weight of JSON, an upper bound: characters within strings are also counted."""
    return len(raw) // BYTES_OF_WEIGHT + raw.count(b",") + NODE_WEIGHT * sum(map(raw.count, (b"[", b"{", b":")))


def is_deep(raw: bytes, value: Any) -> bool:
    """Whether parsed JSON is nested deeper than MAX_DEPTH. Most `raw` JSON has fewer brackets than that."""
    if raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH:
        return False
    try:
        orjson.dumps(reduce(lambda inner, _: [inner], range(ORJSON_WRITES - MAX_DEPTH), value))
    except TypeError:
        return True
    return False
