"""Work that depends on something else: its result, unless that fails first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


async def unless(failure: Awaitable[None], work: Coroutine[Any, Any, Result]) -> Result:
    """What the work returns; both are over then.

    Args:
        failure: raises when the work has become hopeless; as long as that is not known, it waits.
    """
    working, failing = asyncio.create_task(work), asyncio.ensure_future(failure)
    try:
        await asyncio.wait([working, failing], return_when=asyncio.FIRST_COMPLETED)
        if failing.done() and not working.done():
            failing.result()
        return await working
    finally:
        for task in (working, failing):
            task.cancel()
        await asyncio.gather(working, failing, return_exceptions=True)


async def never() -> None:
    """A failure that does not come."""
    await asyncio.Event().wait()
