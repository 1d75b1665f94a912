"""How does a file of a push come here? In the body of its request; or by its name, from a disk that both see."""

from __future__ import annotations

import asyncio
from pathlib import Path

from starlette.requests import ClientDisconnect, Request

from ngym.errors import MOST_NAME, BadRequest, cut

from .staging import Stage


async def received(request: Request, stage: Stage, patience_s: float) -> Path:
    """The file that the request's body is.

    patience_s: for each part of it.
    """
    part, size, loop = stage.next_file(), 0, asyncio.get_running_loop()
    try:
        with part.open("wb") as file:
            async with asyncio.timeout(patience_s) as waiting:
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > stage.room:
                        raise stage.too_large()
                    file.write(chunk)
                    waiting.reschedule(loop.time() + patience_s)
    except (ClientDisconnect, TimeoutError):
        raise BadRequest(f"the file broke off after {size} bytes; push again", retryable=True) from None
    return part


def named(path: str, root: Path | None) -> Path:
    """The file that this path means: under weights_root, wherever its symbolic links lead."""
    if root is None:
        raise BadRequest("field 'path': this server reads no files; set weights_root in its stanza, or send bytes")
    if "\0" in path:
        raise BadRequest("field 'path': a path has no null character")
    try:
        file = (root / path).resolve()
        is_file = file.is_file()
    except (OSError, RuntimeError) as error:  # too long a name, or links in a ring
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadRequest(f"field 'path': {cut(path, MOST_NAME)} is no path of a file: {reason}") from None
    if not file.is_relative_to(root):
        raise BadRequest(f"field 'path': {cut(path, MOST_NAME)} is not under this server's weights_root {root}")
    if not is_file:
        raise BadRequest(f"field 'path': there is no file {cut(str(file), MOST_NAME)}")
    return file
