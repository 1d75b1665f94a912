"""Replicas on other machines, whose /ready the supervisor polls: late answers, refusals, readiness."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from waiting import reserved_port, until

from ngym.supervise import service
from ngym.supervise.head_file import Health, health
from ngym.supervise.service import LATE_PROBES, PolledReplica, ReplicaState

READY, NOT_READY, LATE = Health(True), Health(False, "loading"), Health(False, "no answer within 5 s", is_late=True)


class Probed:
    """The answers to the probes of a replica: the next of these each time, and the last one again and again.

    seen: whether the replica was listed when a probe was sent.
    """

    def __init__(self, *answers: Health) -> None:
        self.answers = list(answers)
        self.seen: list[bool] = []
        self.changes: list[ReplicaState] = []
        state = ReplicaState("policy", "model", None, "policy@x", 1, "http://there", listed=False, version=3)
        self.replica = PolledReplica(state, self.changes.append, is_guest=True)

    async def health(self, url: str, timeout_s: float, token: str | None = None) -> Health:
        self.seen.append(self.replica.state.listed)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@asynccontextmanager
async def watched(probed: Probed, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PolledReplica]:
    """A replica of a trained policy that joined, with the weights of version 3."""
    monkeypatch.setattr(service, "health", probed.health)
    watch = asyncio.create_task(probed.replica.watch())
    yield probed.replica
    watch.cancel()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "READY_POLL_S", 0.01)
    monkeypatch.setattr(service, "STARTING_POLL_S", 0.01)


async def test_a_server_that_accepts_connections_and_answers_nothing_is_late_and_one_that_refuses_them_is_not() -> None:
    server = await asyncio.start_server(lambda reader, writer: asyncio.Event().wait(), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    assert await health(url, 0.1) == Health(False, "no answer within 0.1 s", is_late=True)
    server.close()
    with reserved_port() as port:
        refused = await health(f"http://127.0.0.1:{port}", 60)
    assert (refused.ready, refused.is_late) == (False, False) and refused.reason.startswith("not reachable")


async def test_a_replica_that_answers_late_a_few_times_stays_listed_and_keeps_its_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = [LATE] * (LATE_PROBES - 1)
    probed = Probed(READY, *late, READY, *late, READY)
    async with watched(probed, monkeypatch) as replica:
        await until(lambda: len(probed.seen) > 2 * LATE_PROBES + 2)
        assert replica.state.status == "ready"
    assert [(state.status, state.listed, state.version) for state in probed.changes] == [("ready", True, 3)]


async def test_a_replica_that_does_not_answer_is_delisted_after_several_probes_until_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probed = Probed(READY, *[LATE] * (LATE_PROBES + 1), READY)
    async with watched(probed, monkeypatch) as replica:
        await until(lambda: replica.state.detail)
        assert (replica.state.status, replica.state.listed, replica.state.held) == ("not ready", False, True)
        assert replica.state.detail == LATE.reason
        await until(lambda: replica.state.listed)
    assert probed.seen[: LATE_PROBES + 2] == [False] + [True] * LATE_PROBES + [False]


@pytest.mark.parametrize("answer", [NOT_READY, Health(False, "not reachable: Connection refused")])
async def test_a_replica_that_says_that_it_is_not_ready_or_refuses_connections_is_delisted_at_once(
    answer: Health, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed = Probed(READY, answer)
    async with watched(probed, monkeypatch) as replica:
        await until(lambda: replica.state.detail)
        assert (replica.state.listed, replica.state.detail) == (False, answer.reason)
    assert probed.seen[:2] == [False, True]
