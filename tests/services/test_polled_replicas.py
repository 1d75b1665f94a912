"""Replicas on other machines, whose /ready the supervisor polls: late answers, refusals, readiness."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from waiting import until

from ngym.supervise import service
from ngym.supervise.service import LATE_PROBES, PolledReplica, ReplicaState

READY, NOT_READY, SILENT = b"HTTP/1.0 200 OK\r\n\r\n{}", b'HTTP/1.0 503 No\r\n\r\n{"reason": "loading"}', b""


class Probed:
    """A server of /ready that gives each probe the next of these answers, and the last one again and again.

    seen: whether the replica was listed when a probe arrived.
    """

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.seen: list[bool] = []
        self.changes: list[ReplicaState] = []
        self.replica: PolledReplica | None = None
        self.server: asyncio.Server | None = None

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self.replica is not None
        self.seen.append(self.replica.state.listed)
        await reader.readuntil(b"\r\n\r\n")
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer == SILENT:
            await reader.read()  # until the probe gives up
        writer.write(answer)
        writer.close()


@asynccontextmanager
async def watched(probed: Probed) -> AsyncIterator[PolledReplica]:
    """A replica of a trained policy that joined, with the weights of version 3."""
    server = probed.server = await asyncio.start_server(probed.talk, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    state = ReplicaState("policy", "model", None, "policy@x", 1, url, listed=False, version=3)
    probed.replica = PolledReplica(state, probed.changes.append, is_guest=True)
    watch = asyncio.create_task(probed.replica.watch())
    yield probed.replica
    watch.cancel()
    server.close()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "READY_POLL_S", 0.01)
    monkeypatch.setattr(service, "STARTING_POLL_S", 0.01)
    monkeypatch.setattr(service, "PROBE_TIMEOUT_S", 0.2)


async def test_a_replica_that_answers_late_a_few_times_stays_listed_and_keeps_its_weights() -> None:
    late = [SILENT] * (LATE_PROBES - 1)
    probed = Probed(READY, *late, READY, *late, READY)
    async with watched(probed) as replica:
        await until(lambda: len(probed.seen) > 2 * LATE_PROBES + 2)
        assert replica.state.status == "ready"
    assert [(state.status, state.listed, state.version) for state in probed.changes] == [("ready", True, 3)]


async def test_a_replica_that_does_not_answer_is_delisted_after_several_probes_until_it_answers() -> None:
    probed = Probed(READY, *[SILENT] * (LATE_PROBES + 1), READY)
    async with watched(probed) as replica:
        await until(lambda: replica.state.detail)
        assert (replica.state.status, replica.state.listed, replica.state.held) == ("not ready", False, True)
        assert replica.state.detail == "no answer within 0.2 s"
        await until(lambda: replica.state.listed)
    assert probed.seen[: LATE_PROBES + 2] == [False] + [True] * LATE_PROBES + [False]


async def test_a_replica_that_says_that_it_is_not_ready_is_delisted_at_once() -> None:
    probed = Probed(READY, NOT_READY, SILENT)
    async with watched(probed) as replica:
        await until(lambda: replica.state.detail)
        assert (replica.state.listed, replica.state.detail) == (False, "loading")
    assert probed.seen[:2] == [False, True]


async def test_a_replica_that_refuses_connections_is_delisted_at_once() -> None:
    probed = Probed(READY)
    async with watched(probed) as replica:
        await until(lambda: replica.state.listed)
        assert probed.server is not None
        probed.server.close()
        await until(lambda: not replica.state.listed)
        assert replica.state.detail.startswith("not reachable")
    assert len(probed.changes) == 2
