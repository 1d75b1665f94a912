"""What does a push say, step by step, and what is known of one that is under way?"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..engine import PauseMode
from .adapter import AdapterShape
from .staging import Announced, Stage


class Begin(BaseModel):
    model_config = ConfigDict(extra="forbid")

    version: int = Field(ge=1)
    tensors: list[Announced]
    adapter: AdapterShape | None = None
    transfer: bool = False


class NamedFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    path: str


class Commit(BaseModel):
    """keep: generations in flight go on with the new weights; wait: they end first; abort: they end now."""

    model_config = ConfigDict(extra="forbid")

    mode: PauseMode = "keep"


class Received(BaseModel):
    """What vLLM's own weight transfer wants to know: its record for the backend."""

    model_config = ConfigDict(extra="forbid")

    info: dict[str, Any]


class Rest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    level: Literal[1, 2] = 1


class Wake(BaseModel):
    model_config = ConfigDict(extra="forbid")

    parts: tuple[Literal["weights", "kv_cache"], ...] = ("weights", "kv_cache")


class Prove(BaseModel):
    model_config = ConfigDict(extra="forbid")

    prompt_token_ids: list[Annotated[int, Field(ge=0)]] = Field(min_length=2)


@dataclass
class Push:
    """One push that is under way.

    stage: None when no files come, but a transfer. started: that has been, and there is no way back.
    """

    version: int
    stage: Stage | None
    adapter: AdapterShape | None
    started: bool = False
    id: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    at_work: asyncio.Lock = field(default_factory=asyncio.Lock)
    lease: asyncio.TimerHandle | None = None
