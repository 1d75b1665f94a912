"""What is a call to a model? What its back end is given beside the request, and what it may be written as."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers

from ngym.schema import Json
from ngym.services.models.client_token_ids import SeenCall


@dataclass(frozen=True, slots=True)
class ModelCall:
    """What belongs to one call beside the request: whose rollout it is, and what the service has.

    state: what the service's lifespan yielded.
    seen: the earlier call that this one continues; a back end that owns the tokens goes on from exactly its ids.
    size: bytes of the client's request (`ngym.net.json_limits.by_size`).
    """

    options: Any
    state: Any
    rollout_id: str | None
    headers: Headers
    seen: SeenCall | None = None
    size: int = 0


Respond = Callable[[Json, ModelCall], Awaitable[Json]]
Stream = Callable[[Json, ModelCall], AsyncIterator[Json]]
