"""The HTTP client, against servers that say byte for byte what they are told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from ngym.client import Client
from ngym.client.pool import MAX_CONNECTING

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
DEADLINE_S = 60.0

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(talk: Talk) -> AsyncIterator[tuple[Client, str, list[asyncio.StreamWriter]]]:
    """A client, the URL of a server that talks like this on each connection, and the connections that it was given."""
    writers: list[asyncio.StreamWriter] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        try:
            await talk(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client left
        finally:
            writer.close()

    serving = await asyncio.start_server(connected, "127.0.0.1", 0)
    client = Client({"user-agent": "test"})
    try:
        yield client, f"http://127.0.0.1:{serving.sockets[0].getsockname()[1]}", writers
    finally:
        await client.close()
        serving.close()
        for writer in writers:
            writer.transport.abort()


async def request_head(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


def says(*answers: bytes) -> Talk:
    """One answer to each request; the connection ends after the last."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            await request_head(reader)
            writer.write(answer)
            await writer.drain()

    return talk


async def always_ok(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        await request_head(reader)
        writer.write(OK)


async def get(client: Client, url: str, timeout_s: float = DEADLINE_S) -> bytes:
    return (await client.request("GET", url, None, {}, timeout_s)).body


@pytest.mark.parametrize(
    "answer",
    [
        OK,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nok",  # ends where the connection ends
        b"HTTP/1.0 200 OK\r\n\r\nok",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok",
    ],
)
async def test_an_answer_is_whole_whatever_its_framing(answer: bytes):
    async with server(says(answer)) as (client, url, _):
        assert await get(client, url) == b"ok"


async def test_what_is_sent_is_one_request_with_its_headers_and_body():
    seen: list[bytes] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await request_head(reader))
        seen.append(await reader.readexactly(3))
        writer.write(OK)

    async with server(talk) as (client, url, _):
        await client.request("POST", url + "/a b", b"{ }", {"x-one": "1"}, DEADLINE_S)
    host = url.removeprefix("http://")
    assert seen[0].decode().split("\r\n") == [
        "POST /a%20b HTTP/1.1", f"host: {host}", "user-agent: test", "x-one: 1", "content-length: 3", "", "",
    ]  # fmt: skip
    assert seen[1] == b"{ }"


async def test_a_line_break_in_a_header_or_a_path_never_reaches_the_wire():
    async with server(always_ok) as (client, url, writers):
        with pytest.raises(ValueError, match="a line break in one of the headers x-one"):
            await client.request("GET", url, None, {"x-one": "1\r\nx-two: 2"}, DEADLINE_S)
        assert writers == []
        assert await get(client, url + "/a\r\nx-two: 2") == b"ok"


async def test_headers_and_cookies_are_told_without_attributes():
    answer = OK.replace(b"\r\n\r\n", b"\r\nX-One: 1\r\nSet-Cookie: a=1; Path=/\r\nset-cookie: b=2=3\r\n\r\n")
    async with server(says(answer)) as (client, url, _):
        reply = await client.request("GET", url, None, {}, DEADLINE_S)
    assert reply.headers["x-one"] == "1"
    assert reply.cookies == {"a": "1", "b": "2=3"}


async def test_one_connection_serves_one_request_after_the_other():
    async with server(always_ok) as (client, url, writers):
        for _ in range(5):
            assert await get(client, url) == b"ok"
        assert len(writers) == 1


async def test_a_connection_that_the_server_closed_while_it_was_idle_is_not_used():
    async with server(says(OK)) as (client, url, writers):
        assert await get(client, url) == b"ok"
        await writers[0].wait_closed()
        for _ in range(10):
            await asyncio.sleep(0)  # turns of the loop, in which the client reads what its kernel was told
        assert await get(client, url) == b"ok"
        assert len(writers) == 2


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "closed before an answer"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nok", "closed before an answer"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n", "closed before an answer"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "the answer is no HTTP"),
        (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", "the answer is no HTTP"),
    ],
)
async def test_an_answer_that_breaks_off_or_is_no_http_is_a_broken_connection(answer: bytes, why: str):
    async with server(says(answer)) as (client, url, _):
        with pytest.raises(ConnectionResetError, match=why):
            await get(client, url)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "ftp://host", "http://host:port", "nothing"])
async def test_a_request_that_was_never_sent_says_so(url: str):
    client = Client({})
    with pytest.raises(ConnectionRefusedError):
        await get(client, url)
    await client.close()


async def test_a_deadline_says_what_was_waited_for_and_its_late_answer_reaches_nobody():
    late = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await request_head(reader)
        if b"/late" in head:
            await late.wait()
        writer.write(OK if b"/late" not in head else OK.replace(b"ok", b"no"))

    async with server(talk) as (client, url, _):
        with pytest.raises(TimeoutError, match="waited for the answer"):
            await get(client, url + "/late", timeout_s=0.05)
        late.set()
        assert await get(client, url) == b"ok"


async def test_a_cancelled_request_closes_its_connection():
    asked = asyncio.Event()
    left = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_head(reader)
        asked.set()
        assert await reader.read() == b""
        left.set()

    async with server(talk) as (client, url, _), asyncio.timeout(DEADLINE_S):
        task = asyncio.create_task(get(client, url))
        await asked.wait()
        task.cancel()
        await left.wait()


async def test_what_a_server_says_unasked_ends_its_connection():
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_head(reader)
        writer.write(OK + OK.replace(b"ok", b"no"))
        assert await reader.read() == b""

    async with server(talk) as (client, url, writers), asyncio.timeout(DEADLINE_S):
        assert await get(client, url) == b"ok"
        assert await get(client, url) == b"ok"
        assert len(writers) == 2


async def test_any_number_of_requests_wait_for_their_answers_together():
    """A bound on connections would stand still here: nobody is answered before all have asked."""
    count = 3 * MAX_CONNECTING
    asked = asyncio.Barrier(count)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_head(reader)
        await asked.wait()
        writer.write(OK)

    async with server(talk) as (client, url, writers), asyncio.timeout(DEADLINE_S):
        assert await asyncio.gather(*(get(client, url) for _ in range(count))) == [b"ok"] * count
        assert len(writers) == count


async def test_requests_are_answered_in_the_order_in_which_they_came_for_a_connection():
    order: list[int] = []

    async def ask(client: Client, url: str, number: int) -> None:
        await get(client, url)
        order.append(number)

    async with server(always_ok) as (client, url, writers):
        await asyncio.gather(*(ask(client, url, number) for number in range(500)))
        assert len(writers) < 500  # those that wait take what comes back
    assert sorted(order) == list(range(500))
    assert all(
        order.index(number) < order.index(number + 3 * MAX_CONNECTING) for number in range(500 - 3 * MAX_CONNECTING)
    )


async def test_closing_the_client_ends_what_is_in_flight():
    asked = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_head(reader)
        asked.set()
        await reader.read()

    async with server(talk) as (client, url, _), asyncio.timeout(DEADLINE_S):
        task = asyncio.create_task(get(client, url))
        await asked.wait()
        await client.close()
        with pytest.raises(ConnectionResetError):
            await task
