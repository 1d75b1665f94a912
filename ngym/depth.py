"""Is JSON nested too deeply? orjson reads 1024 levels and writes 254: what comes in shall go out again, with something around it."""

from __future__ import annotations

from functools import reduce
from typing import Any

import orjson

MAX_DEPTH = 250
ORJSON_WRITES = 254


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
