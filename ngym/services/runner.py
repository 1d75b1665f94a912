"""One service process: a spec and bound sockets in, a serving application until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import uvicorn

from ngym import process
from ngym.errors import ConfigError, NgymError, UsageError
from ngym.peers import Peers
from ngym.schema import Kind
from ngym.services.loader import load
from ngym.services.options import ServiceContext, ServiceOptions, parse_options

EXIT_CONFIG = 78  # EX_CONFIG: restarting would not help
KEEPALIVE_S = 75
BACKLOG = 4096
GRACE_S = 3.0
ACCEPTS = 16  # new connections in one turn of the loop: libuv takes one per listening descriptor, however many wait


@dataclass(frozen=True)
class ServiceSpec:
    """All that a service process is told. Plain data: it crosses a process boundary."""

    name: str
    kind: Kind
    app_file: str
    options: dict[str, Any]
    where: str
    key_where: dict[str, str]
    urls: dict[str, list[str]] = field(default_factory=dict)
    head_url: str | None = None
    root: str = "."
    replica: int = 0
    admin_token: str | None = field(default=None, repr=False)
    run_token: str | None = field(default=None, repr=False)


def run(spec: ServiceSpec, sockets: Sequence[socket.socket]) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code: 0; or, after one line on stderr, EXIT_CONFIG or 1."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr, force=True
    )
    try:
        module = load(Path(spec.app_file))
        options = check(spec, module)
    except UsageError as error:
        print(error, file=sys.stderr, flush=True)
        return EXIT_CONFIG
    try:
        process.run(_serve(spec, module, options, list(sockets)))
    except NgymError as error:
        print(error, file=sys.stderr, flush=True)
        return EXIT_CONFIG if isinstance(error, UsageError) else 1
    return 0


def check(spec: ServiceSpec, module: ModuleType) -> ServiceOptions:
    """The spec's options as the service's own record; ConfigError names the line."""
    model = module.Options if hasattr(module, "serve") else module.app.state.options_model
    options: ServiceOptions = parse_options(model, spec.options, spec.key_where, spec.where, spec.urls)
    kind = "model" if hasattr(module, "serve") else module.app.state.kind
    if kind != spec.kind:
        raise ConfigError(f"{spec.where}: service {spec.name!r} is of kind {spec.kind}, but its app is a {kind}")
    return options


async def _serve(spec: ServiceSpec, module: ModuleType, options: ServiceOptions, sockets: list[socket.socket]) -> None:
    peers = Peers(spec.urls, spec.head_url, spec.run_token, owner=spec.name)
    context = ServiceContext(spec.name, spec.kind, options, peers, sockets, Path(spec.root), spec.admin_token)
    if hasattr(module, "serve"):
        await module.serve(context)
        return
    app = module.app
    app.state.context = context
    async with app.router.lifespan_context(
        app
    ):  # here, so that what it raises is an error of ours and no traceback of uvicorn's
        await serve_app(app, sockets, lifespan="off")


class _Server(uvicorn.Server):
    """uvicorn's own signal handling re-raises SIGTERM after serving, so that nobody's `finally` runs."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        self.should_exit = True


async def serve_app(app: Any, sockets: list[socket.socket], lifespan: Literal["on", "off"] = "on") -> None:
    """An ASGI application on sockets that are already bound, until SIGTERM or SIGINT; answers in flight are finished first."""
    config = uvicorn.Config(
        app,
        loop="none",
        http="httptools",
        ws="none",
        lifespan=lifespan,
        log_config=None,
        access_log=False,
        timeout_keep_alive=KEEPALIVE_S,
        timeout_graceful_shutdown=int(GRACE_S),
        backlog=BACKLOG,
        server_header=False,
        proxy_headers=False,  # nobody stands between our services
        date_header=False,
    )
    server = _Server(config)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, server.stop)
    await server.serve(sockets=[*sockets, *(one.dup() for one in sockets for _ in range(ACCEPTS - 1))])
    if not server.started:
        raise ConfigError(f"{getattr(app, 'title', 'the service')} could not start; its log says why")


def spec_from(mapping: Mapping[str, Any]) -> ServiceSpec:
    """A spec that crossed a process boundary as JSON."""
    return ServiceSpec(**mapping)
