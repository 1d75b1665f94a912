"""Clients that send slowly, too much or invalid data, or disconnect: the cost of each is bounded, and others are
served."""

from __future__ import annotations

import asyncio
import logging
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
import uvicorn
from fastapi import FastAPI
from local_services import bound_socket, local_services
from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from waiting import PATIENCE_S, until

from ngym import AgentOptions, ModelCall, RolloutContext, ServiceOptions, VerifyRequest, agent, gym_server, model_server
from ngym.net.connection_limits import BODY_BYTES, BODY_S, MAX_HEAD_BYTES, MAX_PAUSE_S, Connection, Server
from ngym.net.json_limits import CALL_BYTES, ROW_BYTES
from ngym.peers import Peers
from ngym.schema import Json
from ngym.services.base.app import JsonResponse, add_route, service_app
from ngym.services.base.options import ServiceContext
from ngym.services.base.request_bodies import json_body
from ngym.services.base.runner import Stall, Watchdog
from ngym.services.models.server import ModelOptions

HASTE = 10  # its seconds are a tenth of ours
UPLOAD = 12


class Hasty(Server):
    """A server whose seconds are short, so that no one has to wait for them."""

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(0)


class Still(Server):
    """A server without seconds of its own."""

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(1)


class Shop(NamedTuple):
    url: str
    address: tuple[str, int]
    server: Server
    sold: asyncio.Event  # what takes long is over when this is set


def wares(sold: asyncio.Event) -> FastAPI:
    app = service_app("gym_server", options=ServiceOptions)

    async def order(request: Request) -> Response:
        return JsonResponse({"keys": len(await json_body(request))})

    async def slow(request: Request) -> Response:
        await json_body(request)
        await sold.wait()
        return JsonResponse({"answered": True})

    async def upload(request: Request) -> Response:
        return JsonResponse({"bytes": sum([len(part) async for part in request.stream()])})

    add_route(app, "POST", "/order", order)
    add_route(app, "POST", "/slow", slow)
    add_route(app, "PUT", "/upload", upload, most_bytes=None, finishes=True)
    return app


@asynccontextmanager
async def shop(room: int | None = None, kind: type[Server] = Hasty) -> AsyncIterator[Shop]:
    listener, sold = bound_socket(), asyncio.Event()
    app = wares(sold)
    app.state.context = ServiceContext("shop", "gym_server", ServiceOptions(), Peers({}), [listener])
    config = uvicorn.Config(app, http=Connection, ws="none", limit_concurrency=room, log_level="critical")
    server = kind(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    host, port = listener.getsockname()
    try:
        while not server.started:
            await asyncio.sleep(0.01)
        yield Shop(f"http://{host}:{port}", (host, port), server, sold)
    finally:
        sold.set()
        server.should_exit = True
        await serving


async def read_all(reader: asyncio.StreamReader) -> bytes:
    """All that the server says until it hangs up."""
    async with asyncio.timeout(PATIENCE_S):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


async def send_and_read(at: Shop, *parts: bytes) -> bytes:
    """The server's answer to a client that sends this and then waits."""
    reader, writer = await asyncio.open_connection(*at.address)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        return await read_all(reader)
    finally:
        writer.close()


def is_problem(answer: bytes, status: int) -> bool:
    return answer.startswith(f"HTTP/1.1 {status} ".encode()) and b"content-type: application/problem+json" in answer


HEAD = b"POST /order HTTP/1.1\r\nhost: shop\r\n"
SLOW = {
    "nothing": b"",
    "a line break": b"\r\n",
    "half a request line": b"POST /ord",
    "half a head": HEAD,
    "a head alone": HEAD + b"content-length: 100\r\n\r\n",
    "half a body": HEAD + b'content-length: 100\r\n\r\n{"a": ',
    "half a chunk": HEAD + b'transfer-encoding: chunked\r\n\r\nff\r\n{"a": ',
    "a second head": b"GET /health HTTP/1.1\r\nhost: shop\r\n\r\nGET /he",
    "a body for nobody": b"POST /nowhere HTTP/1.1\r\nhost: shop\r\ncontent-length: 100\r\n\r\n{",
}


async def test_only_a_client_that_sends_too_slowly_is_disconnected() -> None:
    async def drips(at: Shop, first_bytes: bytes) -> bytes:
        """A client that sends a little now and then."""
        reader, writer = await asyncio.open_connection(*at.address)
        writer.write(first_bytes)
        answer = asyncio.create_task(read_all(reader))
        while not answer.done():
            await asyncio.wait([answer], timeout=0.3)
            if first_bytes.endswith((b"shop\r\n", b": ")):
                writer.write(b"x-a: b\r\n")
        writer.close()
        return await answer

    async def steadily() -> AsyncIterator[bytes]:
        for _ in range(UPLOAD):
            yield b" " * BODY_BYTES
            await asyncio.sleep(BODY_S / HASTE / 4)
        yield b"{}"

    async with shop() as at, httpx.AsyncClient(base_url=at.url, timeout=PATIENCE_S) as client:
        answers = asyncio.gather(client.post("/slow", json={}), client.post("/order", content=steadily()))
        slow = await asyncio.gather(*(drips(at, first_bytes) for first_bytes in SLOW.values()))
        upload = await client.put("/upload", content=b"x")
        for (name, first_bytes), answer in zip(SLOW.items(), slow, strict=True):
            if name == "a second head":
                assert answer.startswith(b"HTTP/1.1 200 ")
            elif name == "a body for nobody":
                assert is_problem(answer, 404)
            else:
                assert is_problem(answer, 408), (name, first_bytes, answer)
        at.sold.set()
        response, uploaded = await answers
        assert response.json() == {"answered": True}, "an answer may take as long as it takes"
        assert uploaded.json() == {"keys": 0}, "a body may take as long as it takes while it comes along"
        assert upload.json() == {"bytes": 1}


@pytest.mark.parametrize(("kib", "seconds"), [(0, BODY_S), (5, BODY_S + 5), (40, BODY_S + 40), (500, MAX_PAUSE_S)])
async def test_a_body_may_pause_for_a_second_for_each_kib_that_came_up_to_a_limit(kib: int, seconds: int) -> None:
    """Lines that many share are not fair; who sends a lot at once holds no connection longer than with a steady trickle."""
    async with shop(kind=Still) as at:
        _, writer = await asyncio.open_connection(*at.address)
        writer.write(HEAD + b"content-length: 1000000\r\n\r\n" + b" " * (kib << 10))
        await until(lambda: at.server.server_state.connections)
        (connection,) = at.server.server_state.connections
        assert isinstance(connection, Connection)
        await until(lambda: connection.cycle and connection._bytes == kib << 10 and not connection.flow.read_paused)
        lasted = -1
        while not connection.is_closing():
            connection.second()
            lasted += 1
        assert lasted == seconds
        writer.close()


async def test_a_handler_that_watches_its_body_itself_may_wait_longer_for_it() -> None:
    async with shop() as at:
        reader, writer = await asyncio.open_connection(*at.address)
        writer.write(b"PUT /upload HTTP/1.1\r\nhost: shop\r\ncontent-length: 2\r\n\r\nx")
        others = [send_and_read(at, HEAD + b"content-length: 2\r\n\r\nx") for _ in range(3)]
        for response in await asyncio.gather(*others):
            assert is_problem(response, 408)
        writer.write(b"y")
        assert b'{"bytes":2}' in await asyncio.wait_for(reader.readuntil(b"}"), PATIENCE_S)
        writer.close()


async def test_what_comes_of_a_refused_body_is_thrown_away_for_a_while_and_then_disconnected() -> None:
    async with shop() as at:
        reader, writer = await asyncio.open_connection(*at.address)
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        sent = 0
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    writer.write(chunk)
                    await writer.drain()
                    sent += 0x10000
        assert sent > CALL_BYTES
        answer = await read_all(reader)
        assert not answer or is_problem(answer, 413)
        assert not [one for one in at.server.server_state.connections if not one.transport.is_closing()]
        writer.close()


STILL_COMING = {
    "a body too large": (HEAD + f"connection: close\r\ncontent-length: {24 << 20}\r\n\r\n".encode(), 413),
    "a head that does not end": (HEAD + b"x-a: ", 431),
    "no HTTP": (b"\x16\x03\x01 hello\r\n\r\n", 400),
}


@pytest.mark.parametrize("what", STILL_COMING)
async def test_who_reads_only_when_all_is_sent_still_gets_the_refusal(what: str) -> None:
    """A server that hung up at once would have the client's system throw the answer away."""
    first_bytes, status = STILL_COMING[what]
    async with shop(kind=Server) as at:  # a slow machine needs some tenths of a second to send it all
        reader, writer = await asyncio.open_connection(*at.address)
        writer.write(first_bytes)
        for _ in range(24):
            writer.write(b" " * (1 << 20))
            await writer.drain()
        assert is_problem(await read_all(reader), status)
        writer.close()
        async with asyncio.timeout(PATIENCE_S):
            while at.server.server_state.connections:
                await asyncio.sleep(0.01)


async def test_seconds_of_refused_bodies_are_not_added_up_over_a_connections_requests() -> None:
    async with shop() as at:
        reader, writer = await asyncio.open_connection(*at.address)
        for _ in range(8):
            writer.write(b"POST /nowhere HTTP/1.1\r\nhost: shop\r\ncontent-length: 2\r\n\r\n")
            assert is_problem(await asyncio.wait_for(reader.readuntil(b"}}"), PATIENCE_S), 404)
            await asyncio.sleep(1.5 / HASTE)
            writer.write(b"{}")
        writer.close()


async def test_a_refusal_after_pipelined_requests_leaves_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    slow = b"POST /slow HTTP/1.1\r\nhost: shop\r\ncontent-length: 2\r\n\r\n{}"
    async with shop() as at:
        log = logging.getLogger("uvicorn.error")  # which informs only its own handlers
        log.setLevel(logging.ERROR)
        log.addHandler(caplog.handler)
        _, writer = await asyncio.open_connection(*at.address)
        writer.write(slow + slow + b"\x16\x03\x01 hello\r\n\r\n")
        await writer.drain()
        while not any(one.cycle and one.cycle.disconnected for one in at.server.server_state.connections):
            await asyncio.sleep(0.01)
        at.sold.set()
        async with asyncio.timeout(PATIENCE_S):
            while at.server.server_state.connections or at.server.server_state.tasks:
                await asyncio.sleep(0.01)
        writer.close()
        log.removeHandler(caplog.handler)
    assert not caplog.records, caplog.text


async def test_requests_that_come_in_one_piece_are_all_answered() -> None:
    one = b"GET /health HTTP/1.1\r\nhost: shop\r\n\r\n"
    count = 4 * MAX_HEAD_BYTES // len(one)
    async with shop() as at:
        reader, writer = await asyncio.open_connection(*at.address)
        writer.write(one * count + one[:-2])
        for _ in range(count):
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n{"), PATIENCE_S)
            assert b"HTTP/1.1 200 OK" in answer
        writer.close()


WRONG = {
    "no HTTP": (b"\x16\x03\x01 hello\r\n\r\n", 400),
    "two lengths": (HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}", 400),
    "a length and chunks": (HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "a negative length": (HEAD + b"content-length: -2\r\n\r\n{}", 400),
    "a length of letters": (HEAD + b"content-length: two\r\n\r\n{}", 400),
    "a length beyond 64 bits": (HEAD + b"content-length: 99999999999999999999999\r\n\r\n{}", 400),
    "a chunk without a size": (HEAD + b"transfer-encoding: chunked\r\n\r\nxyz\r\n", 400),
    "a path beyond ASCII": (b"GET /\xc3\xa4 HTTP/1.1\r\nhost: shop\r\n\r\n", 400),
    "a path that is none": (b"GET http://[::1 HTTP/1.1\r\nhost: shop\r\n\r\n", 400),
    "a host to connect to": (b"CONNECT shop:80 HTTP/1.1\r\nhost: shop\r\n\r\n", 400),
    "a folded header": (HEAD + b"x: y\r\n z\r\n\r\n", 400),
    "a null in a header": (HEAD + b"x: \0\r\n\r\n", 400),
    "a head that does not end": (HEAD + b"x-a: " + b"y" * (MAX_HEAD_BYTES + 1), 431),
    "a path that does not end": (b"GET /" + b"y" * (MAX_HEAD_BYTES + 1), 431),
    "a body too large": (HEAD + f"content-length: {300 << 20}\r\n\r\n{{".encode(), 413),
    "a body shorter than announced": (HEAD + b"content-length: 3\r\n\r\n{}", 408),
    "a body longer than announced": (HEAD + b"connection: close\r\ncontent-length: 2\r\n\r\n{}{}", 200),
}


async def test_a_request_that_is_invalid_gets_a_problem_document() -> None:
    async with shop() as at:
        answers = await asyncio.gather(*(send_and_read(at, raw) for raw, _ in WRONG.values()))
    for (name, (_, status)), answer in zip(WRONG.items(), answers, strict=True):
        expected = is_problem(answer, status) if status != 200 else answer.startswith(b"HTTP/1.1 200 ")
        assert expected, (name, answer[:200])


async def test_when_there_is_not_a_room_for_more_connections_new_ones_get_an_error() -> None:
    async with shop(room=4, kind=Server) as at, httpx.AsyncClient(base_url=at.url, timeout=PATIENCE_S) as client:
        held = [await asyncio.open_connection(*at.address) for _ in range(4)]
        while len(at.server.server_state.connections) < len(held):
            await asyncio.sleep(0.01)
        response = await client.post("/order", json={})
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.headers["content-type"] == "application/problem+json" and response.json()["retryable"]
        assert (await client.get("/health")).status_code == 200, "it is alive"
        for _, writer in held:
            writer.close()
        while (await client.post("/order", json={})).status_code == 503:
            await asyncio.sleep(0.01)


ROUTES = {
    "gym": {
        "/seed_session": ROW_BYTES,
        "/verify": ROW_BYTES,
        "/sleep": CALL_BYTES,
        "/aggregate_metrics": ROW_BYTES,
        "/mcp": CALL_BYTES,
        "/nowhere": 0,
    },
    "model": {"/v1/responses": ROW_BYTES, "/v1/chat/completions": ROW_BYTES, "/rollouts/r/v1/messages": ROW_BYTES},
    "agent": {"/run": ROW_BYTES, "/v1/responses": ROW_BYTES, "/aggregate_metrics": ROW_BYTES},
}


class Nothing(BaseModel):
    """The arguments of a tool that has none."""


class Underway:
    """The calls in the services of a rollout: begun ones, and cancelled ones."""

    def __init__(self) -> None:
        self.started: set[str] = set()
        self.cancelled: set[str] = set()

    async def work(self, what: str) -> None:
        self.started.add(what)
        try:
            await asyncio.sleep(PATIENCE_S)
        except asyncio.CancelledError:
            self.cancelled.add(what)
            raise


def services(underway: Underway) -> dict[str, FastAPI]:
    async def sleep(body: Nothing) -> str:
        """Sleeps."""
        await underway.work("a tool")
        return ""

    async def verify(task: VerifyRequest) -> float:
        await underway.work("a verifier")
        return 0.0

    async def respond(request: Json, call: ModelCall) -> Json:
        await underway.work("a model")
        return {}

    async def acts(request: Json, rollout: RolloutContext) -> Json:
        return await rollout.sample(request)

    return {
        "gym": gym_server(verify=verify, tools=[sleep]),
        "model": model_server(respond=respond, options=ModelOptions),
        "agent": agent(respond=acts, options=AgentOptions),
    }


OPTIONS: dict[str, dict[str, Any]] = {"agent": {"gym": "gym", "model": "model"}}


async def test_every_route_refuses_a_body_that_is_too_large_for_it_before_it_comes() -> None:
    async with local_services(OPTIONS, **services(Underway())) as peers:
        for name, routes in ROUTES.items():
            host, port = peers.urls[name][0].removeprefix("http://").split(":")
            for path, most in routes.items():
                reader, writer = await asyncio.open_connection(host, int(port))
                head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {most + 1}\r\n\r\n"
                writer.write(head.encode() + b"{")
                answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
                assert answer.startswith(b"HTTP/1.1 413 " if most else b"HTTP/1.1 404 "), (name, path, answer)
                writer.close()


ROW: Json = {"responses_create_params": {"input": "Wait."}, "response": {"output": []}}


@pytest.mark.parametrize(
    ("name", "path", "begins"),
    [
        ("gym", "/sleep", {"a tool"}),
        ("gym", "/verify", {"a verifier"}),
        ("model", "/v1/responses", {"a model"}),
        ("agent", "/run", {"a model"}),
        ("agent", "/v1/responses", {"a model"}),
    ],
)
async def test_what_is_done_for_a_caller_who_disconnects_is_cancelled(name: str, path: str, begins: set[str]) -> None:
    underway = Underway()
    body = ROW if path in ("/run", "/verify") else {"input": "Wait."} if path == "/v1/responses" else {}
    async with (
        local_services(OPTIONS, **services(underway)) as peers,
        asyncio.timeout(PATIENCE_S),
        httpx.AsyncClient(base_url=peers.urls[name][0], timeout=PATIENCE_S) as client,
    ):
        request = asyncio.create_task(client.post(path, json=body))
        while underway.started != begins:
            await asyncio.sleep(0.01)
        request.cancel()
        while underway.cancelled != begins:
            await asyncio.sleep(0.01)
        metrics = ""
        while f'ngym_requests_total{{route="{path}",status="499"}} 1.0' not in metrics:
            metrics = (await client.get("/metrics")).text


async def test_what_blocks_the_event_loop_is_counted_and_named(caplog: pytest.LogCaptureFixture) -> None:
    def blocks_it() -> None:
        time.sleep(0.5)

    registry = CollectorRegistry()
    with Watchdog(registry) as watchdog:
        async with asyncio.timeout(PATIENCE_S):
            while "blocks_it" not in caplog.text:  # where the machine itself hung, no one could look
                await asyncio.sleep(0.2)
                blocks_it()
                await asyncio.sleep(0.2)
        assert registry.get_sample_value("ngym_loop_stalls_total") >= 1  # type: ignore[operator]
        assert registry.get_sample_value("ngym_loop_stalled_seconds_total") > 0.3  # type: ignore[operator]
        began = time.thread_time()
        while time.thread_time() - began < 0.5:
            pass
        async with asyncio.timeout(PATIENCE_S):
            while watchdog.longest.cpu_s < 0.3:
                await asyncio.sleep(0.01)


IDLE = """
import asyncio, logging, os, sys
from asyncio.subprocess import PIPE
from prometheus_client import CollectorRegistry
from ngym.services.base.runner import Stall, Watchdog

async def main():
    registry = CollectorRegistry()
    pid = os.getpid()
    stops = f"while read line; do sleep 0.3; kill -STOP {pid}; sleep 0.5; kill -CONT {pid}; sleep 0.3; echo; done"
    suspending = await asyncio.create_subprocess_exec("sh", "-c", stops, stdin=PIPE, stdout=PIPE)
    with Watchdog(registry):
        while not registry.get_sample_value("ngym_machine_stalls_total"):
            suspending.stdin.write(b"\\n")
            await suspending.stdout.readline()  # nothing else is done meanwhile: what computes is not idle
    suspending.stdin.close()
    await suspending.wait()

logging.basicConfig()
if sys.argv[1] == "uvloop":
    import uvloop
    uvloop.run(main())
else:
    asyncio.run(main())
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_stall_of_an_idle_process_is_counted_as_the_machines_and_not_logged(loop: str) -> None:
    command = [sys.executable, "-c", IDLE, loop]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 0, ended.stderr
    assert "blocked" not in ended.stderr


async def test_a_stall_that_has_just_ended_has_no_place_in_the_watchdog_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    watchdog, idle = Watchdog(CollectorRegistry()), []
    read_clocks = watchdog._read

    def reading() -> Any:
        idle.append(watchdog._is_idle(sys._getframe()))
        return read_clocks()

    with watchdog:
        monkeypatch.setattr(watchdog, "_read", reading)
        await until(lambda: bool(idle))
    assert all(idle) and not watchdog._is_idle(sys._getframe())


@pytest.mark.parametrize(
    ("stall", "of_machine"),
    [
        (Stall(0.13, 0.0, ""), True),
        (Stall(0.13, 0.0, "in app.py", queued_s=0.12), True),
        (Stall(0.5, 0.0, "in app.py, a blocking call"), False),
        (Stall(0.5, 0.4, "in app.py"), False),
        (Stall(0.5, 0.0, "", process_s=0.5), False),  # another thread held the interpreter
    ],
)
def test_a_stall_is_the_machines_if_the_process_computed_almost_nothing(stall: Stall, of_machine: bool) -> None:
    assert stall.is_of_machine is of_machine


SERVE = """
import resource, socket, sys
from ngym.services.base.runner import ServiceSpec, run
descriptor, app, what, limit = int(sys.argv[1]), sys.argv[2], getattr(resource, sys.argv[3]), int(sys.argv[4])
resource.setrlimit(what, (limit, limit))
options = {"max_json_weight": 10**9}  # so that memory is what runs out
spec = ServiceSpec("counter", "gym_server", app, options, "a test", {})
raise SystemExit(run(spec, [socket.socket(fileno=descriptor)]))
"""


@pytest.mark.soak
async def test_a_flood_of_slow_clients_is_gone_soon_and_the_others_notice_nothing(root: Path) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # it holds their sockets
    heads = [head.replace(b"shop", b"localhost") for name, head in SLOW.items() if name != "a second head"]
    async with asyncio.timeout(PATIENCE_S), limited_server(root, "RLIMIT_NOFILE", 8192) as (_, address, client):
        while (await client.get("/tools")).status_code != 200:
            await asyncio.sleep(0.1)
        held = []
        for number in range(1500):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(heads[number % len(heads)])
            held.append((asyncio.create_task(read_all(reader)), writer))
        seconds = []
        while not all(answer.done() for answer, _ in held):
            start = time.monotonic()
            assert (await client.get("/health")).status_code == 200
            seconds.append(time.monotonic() - start)
            await asyncio.sleep(0.05)
        answers = await asyncio.gather(*(answer for answer, _ in held))
        assert all(answer.startswith((b"HTTP/1.1 408 ", b"HTTP/1.1 404 ")) for answer in answers)
        for _, writer in held:
            writer.close()
        print(f"/health meanwhile: p99 {sorted(seconds)[len(seconds) * 99 // 100] * 1e3:.0f} ms of {len(seconds)}")


class Limited(NamedTuple):
    process: psutil.Process
    address: tuple[str, int]
    client: httpx.AsyncClient


@asynccontextmanager
async def limited_server(root: Path, what: str, limit: int) -> AsyncIterator[Limited]:
    """A gym server in a process that may have so much."""
    with bound_socket() as listener:
        host, port = address = listener.getsockname()
        app = str(root / "gym_servers" / "counter" / "app.py")
        words = [sys.executable, "-P", "-c", SERVE, str(listener.fileno()), app, what, str(limit)]
        started = await asyncio.create_subprocess_exec(*words, pass_fds=[listener.fileno()])
        try:
            async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=PATIENCE_S) as client:
                yield Limited(psutil.Process(started.pid), address, client)
            assert started.returncode is None, "it is still there"
        finally:
            started.terminate()
            await started.wait()


async def test_a_service_that_runs_out_of_file_descriptors_refuses_and_continues(root: Path) -> None:
    async with asyncio.timeout(PATIENCE_S), limited_server(root, "RLIMIT_NOFILE", 256) as (process, address, client):
        assert (await client.get("/tools")).status_code == 200
        held = [await asyncio.open_connection(*address) for _ in range(400)]
        reads = [asyncio.create_task(read_all(reader)) for reader, _ in held]
        await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
        await until(lambda: process.num_fds() < 200)
        began = sum(process.cpu_times()[:2])
        await asyncio.sleep(1)
        assert sum(process.cpu_times()[:2]) - began < 0.5, "who cannot accept does not spin"
        for _, writer in held:
            writer.close()
        await asyncio.gather(*reads)
        while True:
            with suppress(httpx.TransportError):
                if (await client.get("/tools")).status_code == 200:
                    break


async def test_a_service_that_runs_out_of_memory_refuses_and_continues(root: Path) -> None:
    async with asyncio.timeout(PATIENCE_S), limited_server(root, "RLIMIT_AS", 1 << 30) as (process, _, client):
        bomb = b'{"responses_create_params":{},"response":{"output":[' + b"[]," * (10 << 20) + b"[]]}}"
        before = process.memory_info().rss
        for count in (1, 8):
            for answer in await asyncio.gather(*(client.post("/verify", content=bomb) for _ in range(count))):
                assert answer.status_code == 503 and answer.json()["retryable"], answer.text
        assert (await client.get("/tools")).status_code == 200
        assert process.memory_info().rss - before < 512 << 20
