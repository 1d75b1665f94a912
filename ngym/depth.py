"""The cost of JSON before it is parsed: its nesting and its weight.

orjson reads 1024 levels and writes 254: what comes in must be able to go out again, with something around it. The weight
bounds how long a parser, a validator and a serializer hold the interpreter.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import orjson

MAX_DEPTH = 250
ORJSON_WRITES = 254
BULK_WEIGHT = 4_000_000  # of many rows in one request
NODE_WEIGHT = 8  # of an object, a list, and a member of an object; any other value has the weight 1
BYTES_OF_WEIGHT = 32  # outside of strings, as in long numbers, are one more


def json_weight(raw: bytes) -> int:
    """The weight of JSON, an upper bound: marks and bytes within strings are counted, too."""
    return len(raw) // BYTES_OF_WEIGHT + raw.count(b",") + NODE_WEIGHT * sum(map(raw.count, (b"[", b"{", b":")))


def is_deep(raw: bytes, value: Any) -> bool:
    """Whether JSON that was read, `raw`, is nested deeper than MAX_DEPTH. Most has not even that many brackets."""
    if raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH:
        return False
    try:
        orjson.dumps(reduce(_in_a_list, range(ORJSON_WRITES - MAX_DEPTH), value))
    except TypeError:
        return True
    return False


def _in_a_list(value: Any, _: int) -> Any:
    return [value]
