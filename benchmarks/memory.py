"""The memory of the services when idle, and for each 1,000 rollouts in flight. The model waits until all are in flight.

Resident set of each process at its peak, sampled ten times a second, while so many single-tool rollouts are begun as are to be in
flight; levels rise, on the same services. PSS (when idle) counts a page that several processes share once in all.

    python benchmarks/memory.py [--quick] [--json FILE]
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import psutil
from bare import Case
from parts import play
from rollouts import scripted_config, services, time_rollouts

from ngym.peers import Peers
from ngym.runtime import event_loop
from ngym.schema import Json

CASE = Case(1, False)
MB = 1e6


def measure(quick: bool) -> Iterator[Json]:
    levels, thinks_s = ([64, 512], 1.0) if quick else ([64, 512, 4096], 5.0)
    yield from event_loop.run(measure_growth(levels, thinks_s))


async def measure_growth(levels: list[int], thinks_s: float) -> list[Json]:
    async with services(scripted_config(CASE, latency_s=thinks_s)) as stack:
        peers = Peers(stack.urls)
        pids = {"collector": os.getpid()} | {state.name: state.pid for state in stack.states if state.pid}
        idle = {name: rss(pid) for name, pid in pids.items()}
        pss = {name: psutil.Process(pid).memory_full_info().pss / MB for name, pid in pids.items()}
        rows: list[Json] = [{"in_flight": 0, "rss_mb": idle, "pss_mb": pss, "services_mb": of_services(idle)}]
        for level in levels:
            peak = dict(idle)
            watching = asyncio.create_task(watch(pids, peak))
            await time_rollouts(peers, CASE, 0, level)
            watching.cancel()
            more = {name: (peak[name] - idle[name]) / level * 1000 for name in pids}
            rows.append(
                {
                    "in_flight": level,
                    "rss_mb": peak,
                    "services_mb": of_services(peak),
                    "services_mb_for_1000_more": of_services(more),
                    "collector_mb_for_1000_more": more["collector"],
                }
            )
        await peers.close()
        return rows


async def watch(pids: dict[str, int], peak: dict[str, float]) -> None:
    while True:
        for name, pid in pids.items():
            peak[name] = max(peak[name], rss(pid))
        await asyncio.sleep(0.1)


def of_services(megabytes: dict[str, float]) -> float:
    return sum(megabytes.values()) - megabytes["collector"]


def rss(pid: int) -> float:
    return float(psutil.Process(pid).memory_info().rss) / MB


if __name__ == "__main__":
    play(__doc__, measure)
