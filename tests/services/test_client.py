"""The HTTP client, against servers that send given bytes."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import ngym.client
from ngym.client import MAX_CONNECTING, AnswerTooLong, Client, Pool, _ConnectTimeout

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
DEADLINE_S = 60.0

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(talk: Talk) -> AsyncIterator[tuple[Client, str, list[asyncio.StreamWriter]]]:
    """A client, the URL of a server that talks like this on each connection, and the connections that it was given."""
    writers: list[asyncio.StreamWriter] = []

    async def handle_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        try:
            await talk(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client left
        finally:
            writer.close()

    serving = await asyncio.start_server(handle_connection, "127.0.0.1", 0)
    client = Client({"user-agent": "test"})
    try:
        yield client, f"http://127.0.0.1:{serving.sockets[0].getsockname()[1]}", writers
    finally:
        await client.close()
        serving.close()
        for writer in writers:
            if not writer.transport.is_closing():
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
    received: list[bytes] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await request_head(reader))
        received.append(await reader.readexactly(3))
        writer.write(OK)

    async with server(talk) as (client, url, _):
        await client.request("POST", url + "/a b", b"{ }", {"x-one": "1"}, DEADLINE_S)
    host = url.removeprefix("http://")
    assert received[0].decode().split("\r\n") == [
        "POST /a%20b HTTP/1.1", f"host: {host}", "user-agent: test", "x-one: 1", "content-length: 3", "", "",
    ]  # fmt: skip
    assert received[1] == b"{ }"


async def test_a_line_break_in_a_header_or_a_path_never_reaches_the_wire():
    async with server(always_ok) as (client, url, writers):
        with pytest.raises(ValueError, match="a line break in one of the headers x-one"):
            await client.request("GET", url, None, {"x-one": "1\r\nx-two: 2"}, DEADLINE_S)
        assert writers == []
        assert await get(client, url + "/a\r\nx-two: 2") == b"ok"


async def test_headers_and_cookies_are_reported_without_attributes():
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
        await asyncio.sleep(0.2)  # in which the kernel informs the client, and the client reads it
        assert await get(client, url) == b"ok"
        assert len(writers) == 2


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "closed before an answer"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nok", "closed before an answer"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n", "closed before an answer"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "the answer is not HTTP"),
        (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", "the answer is not HTTP"),
    ],
)
async def test_an_answer_that_breaks_off_or_is_not_http_is_a_broken_connection(answer: bytes, why: str):
    async with server(says(answer)) as (client, url, _):
        with pytest.raises(ConnectionResetError, match=why):
            await get(client, url)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "ftp://host", "http://host:port", "nothing"])
async def test_a_request_that_was_never_sent_says_so(url: str):
    client = Client({})
    with pytest.raises(ConnectionRefusedError):
        await get(client, url)
    await client.close()


@pytest.mark.parametrize(
    ("begins", "goes_on"),
    [
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"100000\r\n" + bytes(1 << 20) + b"\r\n"),
        (b"HTTP/1.1 200 OK\r\n", b"x: " + b"a" * (1 << 20) + b"\r\n"),
    ],
    ids=["body", "head"],
)
async def test_an_answer_without_an_end_takes_no_memory_without_an_end(begins: bytes, goes_on: bytes):
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_head(reader)
        writer.write(begins)
        while True:
            writer.write(goes_on)
            await writer.drain()

    async with server(talk) as (client, url, _):
        with pytest.raises(AnswerTooLong, match="the answer has more than 256 MiB"):
            await client.request("GET", url, None, {}, DEADLINE_S)


async def test_an_answer_that_says_that_it_is_too_long_is_not_read():
    talk = says(b"HTTP/1.1 200 OK\r\ncontent-length: 268435457\r\n\r\n[")
    async with server(talk) as (client, url, _):
        with pytest.raises(AnswerTooLong, match="the answer has more than 256 MiB"):
            await client.request("GET", url, None, {}, DEADLINE_S)


async def test_a_deadline_says_what_was_waited_for_and_its_late_answer_reaches_no_one():
    late = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await request_head(reader):
            if b"/late" in head:
                await late.wait()
            writer.write(OK if b"/late" not in head else OK.replace(b"ok", b"no"))

    async with server(talk) as (client, url, _):
        assert await get(client, url) == b"ok"  # so there is a connection, which takes no time any more
        with pytest.raises(TimeoutError, match="waited for the answer"):
            await get(client, url + "/late", timeout_s=0.05)
        late.set()
        assert await get(client, url) == b"ok"


async def test_a_cancelled_request_closes_its_connection():
    arrived = asyncio.Event()
    left = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_head(reader)
        arrived.set()
        assert await reader.read() == b""
        left.set()

    async with server(talk) as (client, url, _), asyncio.timeout(DEADLINE_S):
        task = asyncio.create_task(get(client, url))
        await arrived.wait()
        task.cancel()
        await left.wait()


async def test_a_request_ends_with_a_machine_that_goes_silent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ngym.client, "KEEPALIVE_S", 0.05)
    silence: dict[str, float] = {"s": 0}
    monkeypatch.setattr(ngym.client, "silence_s", lambda sock: silence["s"])
    asked = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\no")
        asked.set()
        await reader.read()

    async def stream(client: Client, url: str) -> None:
        async with client.stream("GET", url, None, {}, DEADLINE_S) as answer:
            async for _ in answer.body:
                pass

    for ask in (get, stream):
        async with server(talk) as (client, url, _):
            silence["s"] = 0
            request = asyncio.create_task(ask(client, url))
            await asked.wait()
            silence["s"] = 31
            with pytest.raises(ConnectionResetError, match="its machine has been silent for 30 s"):
                await request


async def test_all_that_wait_for_a_silent_machine_fail_with_the_first_attempts(monkeypatch: pytest.MonkeyPatch):
    attempts = 0

    async def connect(pool: Pool) -> None:
        nonlocal attempts
        attempts += 1
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(0.2)
        raise _ConnectTimeout(began)

    monkeypatch.setattr(Pool, "_connect", connect)
    client = Client({})
    calls = [client.request("GET", "http://silent", None, {}, DEADLINE_S) for _ in range(5 * MAX_CONNECTING)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    await client.close()
    assert all(isinstance(answer, ConnectionRefusedError) for answer in answers)
    assert "no connection within 5 s" in str(answers[-1])
    assert attempts == MAX_CONNECTING


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
    """A bound on connections would hang here: no one is answered before all have asked."""
    count = 3 * MAX_CONNECTING
    barrier = asyncio.Barrier(count)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_head(reader)
        await barrier.wait()
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
    arrived = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_head(reader)
        arrived.set()
        await reader.read()

    async with server(talk) as (client, url, _), asyncio.timeout(DEADLINE_S):
        task = asyncio.create_task(get(client, url))
        await arrived.wait()
        await client.close()
        with pytest.raises(ConnectionResetError):
            await task


PARTS = (b"7\r\nfirst, \r\n", b"6\r\nsecond\r\n", b"0\r\n\r\n")


async def test_a_body_is_read_as_it_comes_and_the_connection_is_used_again():
    go_on = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            await request_head(reader)
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nx-a: b\r\n\r\n" + PARTS[0])
            await go_on.wait()
            writer.write(PARTS[1] + PARTS[2])

    async with server(talk) as (client, url, writers):
        for _ in range(2):
            async with client.stream("POST", url, b"{}", {}, DEADLINE_S) as answer:
                assert (answer.status, answer.headers["x-a"]) == (200, "b")
                parts = [await anext(answer.body)]
                go_on.set()
                parts += [part async for part in answer.body]
            assert b"".join(parts) == b"first, second"
        assert len(writers) == 1


async def test_a_body_that_ends_with_its_connection_is_whole():
    async with (
        server(says(b"HTTP/1.1 200 OK\r\n\r\nok")) as (client, url, _),
        client.stream("GET", url, None, {}, DEADLINE_S) as answer,
    ):
        assert [part async for part in answer.body] == [b"ok"]


async def test_a_body_that_breaks_off_is_not_a_whole_one():
    async with server(says(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok")) as (client, url, _):
        with pytest.raises(ConnectionResetError):
            async with client.stream("GET", url, None, {}, DEADLINE_S) as answer:
                _ = [part async for part in answer.body]


async def test_a_body_that_stalls_is_a_timeout_and_its_connection_is_closed():
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok")
        assert await reader.read() == b""

    async with server(talk) as (client, url, _):
        for timeout_s in (0.2, 2.0, 20.0):
            with pytest.raises(TimeoutError) as stalled:
                async with client.stream("GET", url, None, {}, timeout_s) as answer:
                    _ = [part async for part in answer.body]
            if "the rest" in str(stalled.value):
                break  # it had begun within this time
        assert "the rest of the answer" in str(stalled.value)


async def test_leaving_before_the_end_disconnects():
    hung_up = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok")
        with suppress(ConnectionError):
            await reader.read()
        hung_up.set()

    async with server(talk) as (client, url, _):
        async with client.stream("GET", url, None, {}, DEADLINE_S) as answer:
            assert await anext(answer.body) == b"ok"
        async with asyncio.timeout(DEADLINE_S):
            await hung_up.wait()


async def test_a_reader_that_is_slow_slows_the_server():
    size, sent = 1 << 26, 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await request_head(reader)
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {size}\r\n\r\n".encode())
        while sent < size:
            writer.write(bytes(1 << 16))
            await writer.drain()
            sent += 1 << 16

    async with server(talk) as (client, url, _), client.stream("GET", url, None, {}, DEADLINE_S) as answer:
        before = -1
        while sent != before:  # until the server waits for us
            before = sent
            await asyncio.sleep(0.1)
        assert sent < size
        assert sum([len(part) async for part in answer.body]) == size


async def test_https_goes_through_a_proxy_and_its_refusal_is_reported():
    requests: list[bytes] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await request_head(reader))
        writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")

    async with server(talk) as (_, url, _):
        client = Client({}, proxy=url.replace("//", "//me:se%20cret@"))
        try:
            with pytest.raises(ConnectionRefusedError, match=r"did not connect to example.org:443: HTTP/1.1 407"):
                await client.request("GET", "https://example.org/x", None, {}, DEADLINE_S)
        finally:
            await client.close()
    assert requests[0].startswith(b"CONNECT example.org:443 HTTP/1.1\r\n")
    assert b"proxy-authorization: Basic bWU6c2UgY3JldA==\r\n" in requests[0]


def certificate(folder: Path) -> tuple[Path, Path]:
    """A key and a certificate of `localhost`, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    signed = (
        x509.CertificateBuilder(
            name, name, key.public_key(), x509.random_serial_number(), now - timedelta(1), now + timedelta(1)
        )
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "key.pem").write_bytes(key.private_bytes(*pem))
    (folder / "cert.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    return folder / "key.pem", folder / "cert.pem"


async def test_https_is_spoken_directly_and_inside_a_proxys_tunnel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    key, cert = certificate(tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(cert, key)
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))

    async def secure(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await always_ok(reader, writer)

    serving = await asyncio.start_server(secure, "127.0.0.1", 0, ssl=tls)
    port = serving.sockets[0].getsockname()[1]
    tunnels = 0

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal tunnels
        assert (await request_head(reader)).startswith(f"CONNECT localhost:{port} ".encode())
        tunnels += 1
        there, onward = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while part := await source.read(1 << 16):
                sink.write(part)
            sink.close()

        await asyncio.gather(pump(reader, onward), pump(there, writer))

    async with server(proxy) as (direct, proxy_url, _):
        through = Client({}, proxy=proxy_url)
        for client in (direct, through):
            for _ in range(2):
                assert await get(client, f"https://localhost:{port}/x") == b"ok"
        await through.close()
    serving.close()
    assert tunnels == 1
