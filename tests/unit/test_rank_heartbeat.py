"""The heartbeat of a rank goes on whatever happens in its threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import orjson
import pytest
from waiting import wait_until

from ngym.trainer.engine import distributed
from ngym.trainer.engine.distributed import DONE, FIRST, Heartbeat, RankHost, machine_names


class Store:
    """The rendezvous store of two ranks. errors: what the next requests raise."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self.values: dict[str, bytes] = {"ngym/sign of life/1": FIRST}

    def set(self, key: str, value: str | bytes) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.values[key] = value.encode() if isinstance(value, str) else value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.values.get(key) or orjson.dumps(list(RankHost("gpu", "10.0.0.1"))) for key in keys]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()
    monkeypatch.setattr(distributed, "HEARTBEAT_CHECK_S", 0.001)
    monkeypatch.setattr(distributed, "MISSED_HEARTBEATS", 10**9)
    monkeypatch.setattr(Heartbeat, "_join_store", lambda self: store)
    monkeypatch.setattr(distributed, "_reconnect", lambda: store)
    return store


@pytest.fixture
def begin(store: Store) -> Iterator[Callable[[], Heartbeat]]:
    """Begins the heartbeat of rank 0, which ends with the test."""
    with ExitStack() as stack:

        def heartbeat() -> Heartbeat:
            begun = Heartbeat(0, 2)
            stack.callback(begun.leave, DONE)
            return begun

        yield heartbeat


def sent(store: Store) -> int:
    return int(store.values.get("ngym/sign of life/0", b"0"))


def test_heartbeats_go_on_after_an_unexpected_error(
    store: Store, begin: Callable[[], Heartbeat], capfd: pytest.CaptureFixture[str]
) -> None:
    heartbeat = begin()
    wait_until(lambda: sent(store))
    store.errors = [ValueError("an answer of another kind"), RuntimeError("no answer"), ValueError("once more")]
    wait_until(lambda: not store.errors)
    before = sent(store)
    wait_until(lambda: sent(store) > before)
    heartbeat.leave(DONE)
    assert store.values["ngym/sign of life/0"] == DONE
    shown = capfd.readouterr().err
    assert "an answer of another kind" in shown and "once more" in shown and "no answer" not in shown


def test_checks_of_the_others_go_on_after_an_unexpected_error(
    store: Store, begin: Callable[[], Heartbeat], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[Exception] = [ValueError("a bug")]

    def message(self: Heartbeat, checks: int) -> None:
        if errors:
            raise errors.pop()

    monkeypatch.setattr(Heartbeat, "_dead_ranks_message", message)
    heartbeat = begin()
    wait_until(lambda: not errors)
    before = heartbeat._checks
    wait_until(lambda: heartbeat._checks > before and sent(store) > before)


def test_a_rank_ends_with_a_dead_one_although_no_one_reads_its_output(
    begin: Callable[[], Heartbeat], monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []

    def broken(*args: object, **kwargs: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(distributed, "print", broken, raising=False)
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(distributed, "MISSED_HEARTBEATS", 1)
    begin()
    wait_until(lambda: codes)
    assert set(codes) == {1}


def test_machines_with_equal_names_are_shown_without_an_address_that_others_cannot_use() -> None:
    names = machine_names([RankHost("gpu", "127.0.1.1"), RankHost("gpu", "10.0.0.2"), RankHost("gpu", "10.0.0.3")])
    assert names == ["gpu", "gpu at 10.0.0.2", "gpu at 10.0.0.3"]
