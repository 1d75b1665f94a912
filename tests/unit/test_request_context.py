"""Timers that requests share, and the timeout of a request."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from ngym.net import request_context
from ngym.net.request_context import Timeout, later


async def test_shared_timers_fire_in_the_order_of_their_ticks_and_not_before_their_time() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    fired: list[tuple[str, float]] = []
    done = asyncio.Event()
    later(3 * request_context.TICK_S, lambda: (fired.append(("late", loop.time())), done.set()))
    later(0.0, lambda: fired.append(("early", loop.time())))
    await done.wait()
    assert [name for name, _ in fired] == ["early", "late"]
    assert fired[1][1] - began >= 3 * request_context.TICK_S * 0.99  # uvloop's clock counts milliseconds


async def test_a_cancelled_timer_does_not_fire_even_if_another_of_its_tick_cancels_it() -> None:
    fired: list[str] = []
    done = asyncio.Event()
    first = later(0.0, lambda: (fired.append("first"), second.cancel()))
    second = later(0.0, lambda: fired.append("second"))
    later(request_context.TICK_S, done.set)
    await done.wait()
    assert fired == ["first"]
    first.cancel()  # after it fired


async def test_timers_end_with_their_last_and_begin_again() -> None:
    for _ in range(2):
        done = asyncio.Event()
        later(0.0, done.set)
        await done.wait()
        await asyncio.sleep(0)


def test_each_event_loop_has_timers_of_its_own() -> None:
    async def fires() -> bool:
        done = asyncio.Event()
        later(0.0, done.set)
        return await asyncio.wait_for(done.wait(), 60)

    assert asyncio.run(fires())
    assert asyncio.run(fires())


@pytest.mark.parametrize("seconds", [0.001, request_context.EXACT_S / 8])
async def test_a_timeout_cancels_what_is_awaited_and_raises(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_context, "EXACT_S", 0.01)  # the second one is a shared timer
    with pytest.raises(TimeoutError), Timeout(seconds) as timer:
        await asyncio.Event().wait()
    assert timer.expired
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0


async def test_a_cancelled_caller_is_not_timed_out() -> None:
    async def call() -> None:
        with Timeout(60):
            await asyncio.Event().wait()

    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_timeout_within_another_leaves_the_outer_one_alone() -> None:
    with Timeout(60) as outer, pytest.raises(TimeoutError), Timeout(0.001):
        await asyncio.Event().wait()
    assert not outer.expired


async def test_a_timeout_in_time_is_freed_without_a_garbage_collection() -> None:
    class WeaklyReferencedTimeout(Timeout):
        __slots__ = ("__weakref__",)

    gc.disable()
    try:
        timer = WeaklyReferencedTimeout(60)
        reference = weakref.ref(timer)
        with timer:
            await asyncio.sleep(0)
        del timer
        assert reference() is None
    finally:
        gc.enable()
