"""Services on real sockets in the test's own process: `async with local_services(gym=..., model=..., agent=...) as peers`."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from ngym.net.connection_limits import Connection, Server, max_connections
from ngym.peers import Peers
from ngym.services.base.options import ServiceContext
from ngym.services.base.runner import Watchdog

BLOCKED_S = 1.0  # computed without a break: while it does, a service answers no one
USUAL_WORK_S = 0.045  # what `_slowness` computes, on the machine for which that second was chosen


def bound_socket() -> socket.socket:
    listener = socket.socket(proto=socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY only where it sees TCP
    listener.bind(("127.0.0.1", 0))
    listener.listen(512)
    return listener


@asynccontextmanager
async def local_services(
    options: dict[str, dict[str, Any]] | None = None, *, crowd: bool = False, **apps: FastAPI
) -> AsyncIterator[Peers]:
    """Serve the apps by these names; each knows the others. Yields a client that knows them all.

    Fails where the event loop was blocked. crowd: the test itself gives this one loop, callers and services together, more
    to do at once than a second is enough for.
    """
    listeners = {name: bound_socket() for name in apps}
    urls = {name: [f"http://127.0.0.1:{listener.getsockname()[1]}"] for name, listener in listeners.items()}
    servers, tasks = [], []
    for name, app in apps.items():
        model = app.state.options_model
        peers, own = Peers(urls, owner=name), model(**(options or {}).get(name, {}))
        app.state.context = ServiceContext(
            name, app.state.kind, own, peers, [listeners[name]], at_new_address=True
        )  # else a rollout that begins within milliseconds has to run again where an answer is late
        config = uvicorn.Config(
            app,
            http=Connection,
            limit_concurrency=max_connections(),
            log_level="warning",
            lifespan="on",
            ws="none",
            timeout_graceful_shutdown=1,
        )
        server = Server(config)
        servers.append(server)
        tasks.append(asyncio.create_task(server.serve(sockets=[listeners[name]])))
    client = Peers(urls, owner="the test")
    try:
        while not all(server.started for server in servers):
            for task in tasks:
                assert not task.done(), f"a service did not start: {task}"
            await asyncio.sleep(0.01)
        gc.freeze()  # a collection of all that a test run has imported takes longer than any handler
        try:
            with Watchdog(CollectorRegistry()) as watchdog:
                yield client
        finally:
            gc.unfreeze()
        if not crowd and watchdog.longest.cpu_s >= BLOCKED_S:
            limit_s = BLOCKED_S * _slowness()
            assert watchdog.longest.cpu_s < limit_s, f"the event loop was blocked:\n{watchdog.longest.where}"
    finally:
        await client.close()
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*tasks)
        for app in apps.values():
            app.state.context = None  # the app of a shipped service is the same in every test of this process


def _slowness() -> float:
    """The factor by which this machine computes more slowly than usual now, at least 1."""
    began = time.thread_time()
    sum(number * number for number in range(1_000_000))
    return max(1.0, (time.thread_time() - began) / USUAL_WORK_S)
