"""What does a head's /servers say? A record of each service; anything else is no head's answer."""

from __future__ import annotations

from typing import Any

import orjson

from ngym.schema import Json


def servers_in(body: bytes) -> list[Json]:
    """The services, each with its `name`, its `kind` and its `url` or `urls`.

    Raises:
        ValueError: whoever answered so is no head.
    """
    told = orjson.loads(body)
    if not (isinstance(told, list) and all(map(_is_server, told))):
        raise ValueError("it says something else than which services there are")
    return told


def _is_server(told: Any) -> bool:
    match told:
        case {"name": str(), "kind": str(), "url": str()} | {"name": str(), "kind": str(), "urls": [str(), *_]}:
            return True
    return False
