"""Each service's OpenAPI document: its schemas are valid, and no case drawn from them is answered with a 5xx."""

from __future__ import annotations

import asyncio
import math
import os
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from hostile_stack import AGENTS, FEW, MANY, stack
from openapi_cases import Route, check_route, routes

SPARE = 1.25  # some routes have fewer different cases than their share
SERVICES = ("policy", *(f"{name}_agent" for name in AGENTS), *MANY)


async def keeps_its_promises(url: str, cases: int, within: Executor) -> int:
    """A service, asked so often at the least; how often it was."""
    loop = asyncio.get_running_loop()

    async def total(of: list[Route], examples: int) -> list[int]:
        return await asyncio.gather(*(loop.run_in_executor(within, check_route, route, examples) for route in of))

    found = await asyncio.to_thread(routes, url)
    first = await total(found, 2)
    varied = [route for route, count in zip(found, first, strict=True) if count > 1]
    share = math.ceil(SPARE * cases / len(varied))
    return sum(first) + sum(await total(varied, share))


async def test_cases_drawn_from_the_openapi_documents_are_answered(tmp_path: Path) -> None:
    async with stack(tmp_path, FEW[:1]) as running:
        with ThreadPoolExecutor(1) as here:
            assert sum([await keeps_its_promises(url, 1, here) for (url,) in running.urls.values()]) > 80


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("service", SERVICES)
async def test_ten_thousand_cases_are_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, service: str) -> None:
    """To draw a case takes 15 ms of CPU, to ask and to check it another 5: each processor draws."""
    gyms = (service,) if service in MANY else FEW[:1]
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 18))  # else freed strings of a megabyte stay in the heap
    async with stack(tmp_path, gyms, AGENTS) as running:
        with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as processes:
            (url,) = running.urls[service]
            count = await keeps_its_promises(url, 10_000, processes)
    print(f"{service}: {count} cases")
    assert count >= 10_000
