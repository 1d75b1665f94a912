"""May a rollout be started now? A gate that several reasons can hold shut."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


@dataclass
class Gate:
    """Open as long as nobody holds it shut. `reasons`: who holds it -> one line for the screen."""

    reasons: dict[str, str] = field(default_factory=dict)
    _open: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._open.set()

    def hold(self, who: str, reason: str | None) -> None:
        """Shut the gate for this reason; None takes it back."""
        if reason is None:
            self.reasons.pop(who, None)
        else:
            self.reasons[who] = reason
        if self.reasons:
            self._open.clear()
        else:
            self._open.set()

    async def opened(self) -> None:
        if self.reasons:
            await self._open.wait()
