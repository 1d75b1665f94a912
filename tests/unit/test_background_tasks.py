"""Background tasks that no caller awaits: their unexpected errors are logged, and endless ones go on."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from ngym.runtime.event_loop import log_error, run_endlessly
from ngym.services.base import joining
from ngym.services.base.joining import Joining, announced


async def test_an_endless_task_goes_on_after_an_error_which_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    attempts = 0

    async def work() -> None:
        nonlocal attempts
        attempts += 1
        if attempts < 4:
            raise KeyError("status")

    await run_endlessly(work, "the watch", pause_s=0)
    assert attempts == 4
    (record,) = caplog.records
    assert record.getMessage() == "the watch: an unexpected error, after which it goes on"
    assert record.exc_info is not None and record.exc_info[0] is KeyError


async def test_the_error_of_a_task_that_no_caller_awaits_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        raise KeyError("status")

    task = asyncio.create_task(work(), name="the display")
    cancelled = asyncio.create_task(asyncio.sleep(60))
    for each in (task, cancelled):
        each.add_done_callback(log_error)
    cancelled.cancel()
    await asyncio.wait([task, cancelled])
    await asyncio.sleep(0)
    (record,) = caplog.records
    assert record.getMessage() == "the display ended by an unexpected error"
    assert record.exc_info is not None and record.exc_info[0] is KeyError


async def test_a_replica_announces_itself_again_after_an_unexpected_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[Any] = [TypeError("no record"), {"status": "ready"}]
    has_joined = asyncio.Event()

    async def announce(replica: Joining) -> dict[str, Any]:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        has_joined.set()
        return dict(answer)

    monkeypatch.setattr(joining, "announce", announce)
    monkeypatch.setattr("ngym.runtime.event_loop.run_endlessly.__defaults__", (0.0,))
    caplog.set_level(logging.INFO)
    async with announced(
        Joining("http://head", "token", "math", "gym_server", "gym_servers/math", {}, (), "http://here")
    ):
        await has_joined.wait()
        await asyncio.sleep(0)
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("ngym")]
    assert messages == [
        "the announcement of this replica: an unexpected error, after which it goes on",
        "takes calls of the run at http://head",
    ]
