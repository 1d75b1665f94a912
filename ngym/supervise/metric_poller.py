"""What do the services do now? Their metrics, looked at every few seconds by whoever shows the run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping

from ngym.supervise.probe import get
from ngym.supervise.scrapes import Scrape, numbers, read
from ngym.supervise.service import State
from ngym.supervise.status_board import Traffic

EVERY_S = 5.0
TIMEOUT_S = 2.0
WANTED = ("ngym_requests_total", "ngym_errors_total")  # an engine's own page has thousands of lines


async def look_for_ever(
    states: Callable[[], Iterable[State]], token: str | None, tell: Callable[[Mapping[str, Traffic]], None]
) -> None:
    """Tell, again and again, what each process of ours did since the look before. token: the run's."""
    before: dict[str, Scrape] = {}
    while True:
        ours = [state for state in states() if state.app and state.status == "ready"]
        found = await asyncio.gather(*(_scrape(state.url, token) for state in ours))
        now = {state.label: scrape for state, scrape in zip(ours, found, strict=True) if scrape is not None}
        tell({label: _traffic(before[label], scrape) for label, scrape in now.items() if label in before})
        before = now
        await asyncio.sleep(EVERY_S)


def _traffic(before: Scrape, now: Scrape) -> Traffic:
    seen = numbers(before, now)
    return Traffic(seen.requests_per_s, sum(seen.errors.values()))


async def _scrape(url: str, token: str | None) -> Scrape | None:
    try:
        reply = await get(f"{url}/metrics", TIMEOUT_S, token)
        lines = reply.body.decode().splitlines() if reply.status == 200 else []
        return read("\n".join(line for line in lines if line.startswith(WANTED)) + "\n", time.monotonic())
    except (OSError, ValueError):  # it is busy, or of another make
        return None
