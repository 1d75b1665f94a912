"""Tests of pure logic: a test that starts a process or opens a socket without the mark `process` fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

FORBIDDEN = {
    "os.fork": "starts a process",
    "os.forkpty": "starts a process",
    "os.posix_spawn": "starts a process",
    "subprocess.Popen": "starts a process",
    "socket.bind": "opens a socket",
    "socket.connect": "opens a socket",
}
_pure = False


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _pure and event in FORBIDDEN:
        raise AssertionError(f"a test of tests/unit {FORBIDDEN[event]} ({event}): mark it with pytest.mark.process")


sys.addaudithook(_audit)


@pytest.fixture(autouse=True)
def no_process_and_no_socket(request: pytest.FixtureRequest) -> Iterator[None]:
    global _pure
    _pure = request.node.get_closest_marker("process") is None
    yield
    _pure = False
