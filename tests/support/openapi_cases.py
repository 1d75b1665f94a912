"""Cases drawn from the OpenAPI document of a service, valid and invalid, sent and checked.

A separate module, so that processes can be started that do it.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from itertools import count
from typing import Any, NamedTuple

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.specs.openapi import checks as promises
from waiting import PATIENCE_S

CHECKS = [
    not_a_server_error,
    promises.content_type_conformance,
    promises.response_schema_conformance,
    promises.status_code_conformance,
    promises.unsupported_method,
]
DELIBERATE = 503
AT_ONCE = 20  # cases of a seed: Hypothesis keeps them, and some have strings of a million characters


class Route(NamedTuple):
    url: str
    method: str
    path: str
    mode: schemathesis.GenerationMode


@cache
def load_schema(url: str) -> Any:
    """The service's document."""
    return schemathesis.openapi.from_url(f"{url}/openapi.json")


def routes(url: str) -> list[Route]:
    """Each route of the service, to be asked as its document says and as it does not."""
    operations = [found.ok() for found in load_schema(url).get_all_operations()]
    return [Route(url, one.method, one.path, mode) for one in operations for mode in schemathesis.GenerationMode]


def check_route(route: Route, examples: int) -> int:
    """Ask `examples` times, or as often as there are different cases; how many there were."""
    cases = 0
    with requests.Session() as session:
        session.trust_env = False  # no look at files for each request
        for number in count():
            expected = min(AT_ONCE, examples - cases)
            found = _ask(route, expected, number, session)
            cases += found
            if found < expected or cases >= examples:
                break
    return cases


def _ask(route: Route, examples: int, number: int, session: requests.Session) -> int:
    """Ask for the cases of this seed; how many there were."""
    cases = 0

    def ask(case: Any) -> None:
        nonlocal cases
        cases += 1
        session.cookies.clear()
        answer = case.call(base_url=route.url, timeout=PATIENCE_S, session=session)
        checks = [check for check in CHECKS if answer.status_code != DELIBERATE or check is not not_a_server_error]
        case.validate_response(answer, checks=checks)

    operation = load_schema(route.url)[route.path][route.method]
    once = settings(
        max_examples=examples,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        database=None,
        deadline=None,
    )
    with suppress(Unsatisfiable):  # a route that takes nothing cannot be asked wrongly
        try:
            once(seed(number)(given(case=operation.as_strategy(generation_mode=route.mode))(ask)))()
        except (Failure, FailureGroup) as error:  # which no other process can be sent
            message = "\n".join(map(str, getattr(error, "exceptions", [error])))
            raise AssertionError(f"{route.method} {route.path}: {message}") from None
    return cases
