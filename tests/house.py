"""A few services on real sockets in the test's own process: `async with house(gym=..., model=..., agent=...) as peers`."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI

from ngym.peers import Peers
from ngym.services.options import ServiceContext


def bound_socket() -> socket.socket:
    listener = socket.socket(proto=socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY only where it sees TCP
    listener.bind(("127.0.0.1", 0))
    listener.listen(512)
    return listener


class _Server(uvicorn.Server):
    def install_signal_handlers(self) -> None:
        return None


@asynccontextmanager
async def house(options: dict[str, dict[str, Any]] | None = None, **apps: FastAPI) -> AsyncIterator[Peers]:
    """Serve the apps by these names; each knows the others. Yields a client that knows them all."""
    listeners = {name: bound_socket() for name in apps}
    urls = {name: [f"http://127.0.0.1:{listener.getsockname()[1]}"] for name, listener in listeners.items()}
    servers, tasks = [], []
    for name, app in apps.items():
        model = app.state.options_model
        app.state.context = ServiceContext(
            name, app.state.kind, model(**(options or {}).get(name, {})), Peers(urls, owner=name), [listeners[name]]
        )
        config = uvicorn.Config(app, log_level="warning", lifespan="on", ws="none", timeout_graceful_shutdown=1)
        server = _Server(config)
        servers.append(server)
        tasks.append(asyncio.create_task(server.serve(sockets=[listeners[name]])))
    client = Peers(urls, owner="the test")
    try:
        while not all(server.started for server in servers):
            for task in tasks:
                assert not task.done(), f"a service did not start: {task}"
            await asyncio.sleep(0.01)
        yield client
    finally:
        await client.close()
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*tasks)
