"""What each service's own OpenAPI document promises: its schemas are sound, and no case drawn from them is answered with a 5xx."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from machine import PATIENCE_S
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks as promises
from test_hostile_bodies import FEW, MANY, stack

CHECKS = [
    not_a_server_error,
    promises.content_type_conformance,
    promises.response_schema_conformance,
    promises.status_code_conformance,
    promises.unsupported_method,
]
DELIBERATE = 503


def drawn(url: str, examples: int) -> int:
    """Ask the service as its document says and as it does not, `examples` times a route; how many cases there were."""
    asked = 0

    def ask(case: Any) -> None:
        nonlocal asked
        asked += 1
        answer = case.call(base_url=url, timeout=PATIENCE_S)
        checks = [check for check in CHECKS if answer.status_code != DELIBERATE or check is not not_a_server_error]
        case.validate_response(answer, checks=checks)

    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    for found in schema.get_all_operations():
        operation = found.ok()
        for mode in schemathesis.GenerationMode:
            once = settings(
                max_examples=examples,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
                database=None,
            )
            with suppress(Unsatisfiable):  # a route that takes nothing cannot be asked wrongly
                once(given(case=operation.as_strategy(generation_mode=mode))(ask))()
    return asked


async def every_service_keeps_its_promises(folder: Path, gyms: tuple[str, ...], examples: int) -> int:
    """How many cases there were in all."""
    async with stack(folder, gyms) as running:
        return sum([await asyncio.to_thread(drawn, url, examples) for (url,) in running.urls.values()])


async def test_cases_drawn_from_the_openapi_documents_are_answered(tmp_path: Path) -> None:
    assert await every_service_keeps_its_promises(tmp_path, FEW[:1], examples=2) > 80


@pytest.mark.soak
@pytest.mark.timeout(7200)
async def test_ten_thousand_cases_a_service_are_answered(tmp_path: Path) -> None:
    assert await every_service_keeps_its_promises(tmp_path, MANY, examples=1000) > 10_000 * len(MANY)
