"""The bytes and the number of writes of an HTTP answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from local_services import bound_socket
from waiting import PATIENCE_S

from ngym.net.addresses import interface_of
from ngym.net.connection_limits import Connection, Server

WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"
PARTS = (b"HTTP/1.1 ", b"HTTP/1.1 ", b"end")  # of a body: each begins as an answer does


class Counted:
    """A transport. writes: how many times something was given to it. more: set when the next part of a body may follow."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.writes = 0
        self.more = asyncio.Event()

    def write(self, data: bytes) -> None:
        self.writes += 1
        self._transport.write(data)

    def writelines(self, lines: tuple[bytes, ...]) -> None:
        self.writes += 1
        self._transport.writelines(lines)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Listening(Connection):
    last: Counted

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        Listening.last = self.transport = Counted(transport)  # type: ignore[assignment]


async def shop(scope: Any, receive: Any, send: Any) -> None:
    parts = PARTS if scope["path"] == "/parts" else (b"hello",)
    headers = [] if scope["path"] == "/chunks" else [(b"content-length", str(sum(map(len, parts))).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if scope["path"] == "/breaks":
        raise RuntimeError("a bug of the author's")
    for number, part in enumerate(parts, 1):
        if number > 1:
            await Listening.last.more.wait()
            Listening.last.more.clear()
        await send({"type": "http.response.body", "body": part, "more_body": number < len(parts)})


@asynccontextmanager
async def open_connection() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    listener = bound_socket()
    options: dict[str, Any] = {"ws": "none", "lifespan": "off", "server_header": False, "date_header": False}
    server = Server(uvicorn.Config(shop, http=Listening, log_level="critical", **options))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield reader, writer
    finally:
        writer.close()
        server.should_exit = True
        await serving


def asking(path: str, method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nhost: shop\r\n\r\n".encode()


async def test_an_answer_is_one_write() -> None:
    async with open_connection() as (reader, writer):
        for number in (1, 2):
            writer.write(asking("/"))
            assert await reader.readexactly(len(WHOLE) + 5) == WHOLE + b"hello"
            assert Listening.last.writes == number
        writer.write(asking("/") * 3)
        assert await reader.readexactly(3 * (len(WHOLE) + 5)) == 3 * (WHOLE + b"hello")


async def test_a_head_without_a_body_is_not_held_back() -> None:
    async with open_connection() as (reader, writer):
        writer.write(asking("/", "HEAD"))
        assert await reader.readexactly(len(WHOLE)) == WHOLE
        writer.write(asking("/"))
        assert await reader.readexactly(len(WHOLE) + 5) == WHOLE + b"hello"


@pytest.mark.parametrize("path", ["/chunks", "/parts"])
async def test_a_body_in_parts_comes_as_it_is_sent(path: str) -> None:
    async with open_connection() as (reader, writer):
        writer.write(asking(path))
        head = await reader.readuntil(b"\r\n\r\n")
        if path == "/chunks":
            assert b"transfer-encoding: chunked" in head
            assert await reader.readexactly(15) == b"5\r\nhello\r\n0\r\n\r\n"
        else:
            for part in PARTS:
                assert await reader.readexactly(len(part)) == part
                Listening.last.more.set()


async def test_what_breaks_after_its_head_has_still_said_that() -> None:
    async with open_connection() as (reader, writer):
        writer.write(asking("/breaks"))
        assert await reader.read() == WHOLE


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None  # of no machine (RFC 5737)
