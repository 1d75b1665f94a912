"""A proxy with faults between two services: `async with proxy(url, "slices") as between:`; the client uses
`between.url`.

Eight kinds, as Toxiproxy has them. Those that break something do so on a share of the connections, after some bytes: which,
and after how many, a seed decides.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Literal, get_args

Kind = Literal["latency", "bandwidth", "reset", "black hole", "slices", "cut", "slow close", "down"]
KINDS: tuple[Kind, ...] = get_args(Kind)
BREAKING: tuple[Kind, ...] = ("reset", "black hole", "cut", "down")
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, and for no time: close sends RST
MOST = 1 << 16


class Proxy:
    """Passes on what comes, badly.

    latency_s: of each part, and up to as much again. bytes_per_s: "bandwidth". share: of the connections that break.
    """

    def __init__(
        self, target: str, kind: Kind, *, latency_s: float = 0.02, bytes_per_s: int = 200_000, share: float = 0.3
    ) -> None:
        host, _, port = target.removeprefix("http://").partition(":")
        self._target = host, int(port)
        self._kind = kind
        self._latency_s = latency_s
        self._bytes_per_s = bytes_per_s
        self._share = share
        self._draw = random.Random(0)
        self._writers: set[asyncio.StreamWriter] = set()
        self.url = ""
        self.connections = 0
        self.broken = 0

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client's connection, until either side closes it."""
        self.connections += 1
        if self._kind == "down" and self._draw.random() < self._share:
            self.broken += 1
            _reset(writer)
            return
        try:
            server_reader, server_writer = await asyncio.open_connection(*self._target)
        except OSError:
            _reset(writer)
            return
        ends = (writer, server_writer)
        self._writers.update(ends)
        # of both directions together, so that it is now a request that is hit, now an answer
        limit = self._draw.randrange(1, 6000) if self._draw.random() < self._share else None
        left = [limit if self._kind in ("reset", "cut", "black hole") else None]
        there = asyncio.create_task(self._pass_on(reader, server_writer, left, ends))
        back = asyncio.create_task(self._pass_on(server_reader, writer, left, ends))
        try:
            await asyncio.wait((there, back), return_when=asyncio.FIRST_COMPLETED)
            if self._kind == "slow close":
                await asyncio.sleep(self._latency_s * 10)
        finally:
            there.cancel()
            back.cancel()
            for end in ends:
                end.close()
                self._writers.discard(end)

    async def _pass_on(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        left: list[int | None],
        ends: tuple[asyncio.StreamWriter, ...],
    ) -> None:
        with suppress(OSError):
            while part := await reader.read(MOST):
                if left[0] is not None and len(part) >= left[0]:
                    part = part[: left[0]]
                    left[0] = 0
                else:
                    left[0] = None if left[0] is None else left[0] - len(part)
                await self._write(part, writer)
                if left[0] == 0:
                    self.broken += 1
                    await self._break(ends)
                    return

    async def _write(self, part: bytes, writer: asyncio.StreamWriter) -> None:
        match self._kind:
            case "latency":
                await asyncio.sleep(self._latency_s * self._draw.uniform(1, 2))
            case "bandwidth":
                for begin in range(0, len(part), 1000):
                    writer.write(part[begin : begin + 1000])
                    await asyncio.sleep(1000 / self._bytes_per_s)
                return
            case "slices":
                for byte in part:
                    writer.write(bytes((byte,)))
                    await asyncio.sleep(0)
                return
        writer.write(part)
        await writer.drain()

    async def _break(self, ends: tuple[asyncio.StreamWriter, ...]) -> None:
        if self._kind == "black hole":
            await asyncio.Event().wait()  # until the client gives up
        if self._kind == "reset":
            for end in ends:
                _reset(end)

    def close(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()


@asynccontextmanager
async def proxy(target: str, kind: Kind, **how: float) -> AsyncIterator[Proxy]:
    """In front of the server at this URL. how: as Proxy takes it."""
    between = Proxy(target, kind, **how)  # type: ignore[arg-type]
    serving = await asyncio.start_server(between.connected, "127.0.0.1", 0)
    between.url = f"http://127.0.0.1:{serving.sockets[0].getsockname()[1]}"
    try:
        yield between
    finally:
        serving.close()
        between.close()


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None:
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()
