"""A replica that joins a run on another machine (`ng_serve --join`) and announces itself to the head.

It does so again and again: a head forgets a replica that it cannot reach for a while, and one that has started again
knows none. The head's answer says what it thinks of the replica, which is printed here when it changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, NamedTuple

from ngym.errors import UsageError
from ngym.net.auth import ADMIN_TOKEN
from ngym.peer_answers import words
from ngym.peers import Peers
from ngym.runtime.event_loop import run_endlessly

log = logging.getLogger("ngym.services")
ANNOUNCE_S = 10.0
TIMEOUT_S = 5.0


class Joining(NamedTuple):
    """The head to join, and the announced replica: the service, its stanza in this machine's config, its address.

    options: those in which replicas have to agree (`common_options`). differs: except these.
    """

    head_url: str
    admin_token: str
    name: str
    kind: str
    app: str
    options: dict[str, str]
    differs: tuple[str, ...]
    url: str


async def announce(joining: Joining) -> dict[str, Any]:
    """Announce the replica; the head's record of it.

    Raises:
        OSError: no head answers there.
        UsageError: it does not accept the replica.
    """
    stanza = ("name", "url", "kind", "app", "options", "differs")
    body = json.dumps({key: getattr(joining, key) for key in stanza}).encode()
    async with Peers({}, joining.head_url, joining.admin_token) as peers:
        opener = peers.authorization(None)
        reply = await peers.send("POST", f"{joining.head_url}/servers", body, opener, TIMEOUT_S)
    try:
        answer = json.loads(reply.body)
    except ValueError:
        answer = None
    if reply.status == 202 and isinstance(answer, dict):
        return answer
    if reply.status in (401, 403):
        raise UsageError(f"--join {joining.head_url}: {ADMIN_TOKEN} is not the admin token of the run there")
    raise UsageError(f"--join {joining.head_url}: the answer is {reply.status}: {words(answer).message}")


@contextlib.asynccontextmanager
async def announced(joining: Joining | None) -> AsyncIterator[None]:
    """Announce the replica every ANNOUNCE_S in this block."""
    if joining is None:
        yield
        return
    task = asyncio.create_task(run_endlessly(partial(_keep_announcing, joining), "the announcement of this replica"))
    try:
        yield
    finally:
        task.cancel()


async def _keep_announcing(joining: Joining) -> None:
    known = ""
    while True:
        try:
            text, level = _opinion(joining, await announce(joining))
        except (OSError, UsageError) as error:
            why = str(error) or f"no answer within {TIMEOUT_S:.0f} s"
            text, level = f"the head at {joining.head_url} cannot be joined now: {why}", logging.WARNING
        if text != known and text:
            log.log(level, text)
        known = text or known
        await asyncio.sleep(ANNOUNCE_S)


def _opinion(joining: Joining, record: dict[str, Any]) -> tuple[str, int]:
    """A line about the head's record, and its log level; "" while the head has not been able to look."""
    status, detail = record.get("status"), record.get("detail")
    if status == "ready":
        return f"takes calls of the run at {joining.head_url}", logging.INFO
    if not detail:
        return "", logging.INFO
    return f"takes no calls of the run at {joining.head_url}, which sees at {joining.url}: {detail}", logging.WARNING
