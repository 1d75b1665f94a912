"""The suite on several workers (pytest-xdist): slow folders first, and tests that need the whole machine alone.

Each worker gets whole files, so that a file's fixtures start once, and files that fork from the same process (forked.py) go
to one worker, so that it imports once. `@pytest.mark.alone` is for a test whose verdict depends
on what else runs on the machine, such as its free memory: while it runs, no other worker runs a test.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

FOLDERS = ("system", "trainer", "gpu", "services", "unit")  # by the time that a file takes: the last ones fill the gaps
FORKING = {
    "vllm": ("families", "letters", "model_vllm", "push_transports", "token_exact", "vllm_arguments", "weight_push"),
    "trainer": ("distillation", "dpo", "heldout", "kto", "online", "parallel", "ppo", "resume", "trainer_data",
                "trainer_engine", "trainer_faults", "trainer_tracing"),
}  # fmt: skip
LOCKS = pytest.StashKey[tuple[IO[bytes], IO[bytes]]]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "alone: no other worker runs a test at the same time")
    run = getattr(config, "workerinput", {}).get("testrunuid")
    if run is None:
        return
    # Else a pytest that a test starts would take itself for a worker.
    for name in [name for name in os.environ if name.startswith("PYTEST_XDIST_")]:
        del os.environ[name]
    folder = Path(tempfile.gettempdir())
    gate, machine = (folder / f"ngym-tests-{run}.{name}" for name in ("gate", "machine"))
    config.stash[LOCKS] = gate.open("wb"), machine.open("wb")


def pytest_unconfigure(config: pytest.Config) -> None:
    for file in config.stash.get(LOCKS, ()):
        file.close()
        Path(str(file.name)).unlink(missing_ok=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile`, where the files of FORKING count as two."""
    from xdist.scheduler import LoadFileScheduling

    if config.getoption("dist") != "loadfile":
        return None
    together = {f"test_{name}.py": group for group, names in FORKING.items() for name in names}

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return together.get(Path(file).name, file)

    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow folders first; within a folder and a file the order stays."""
    items.sort(key=lambda item: next((rank for rank, name in enumerate(FOLDERS) if name in item.path.parts), 0))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Outermost: a test's timeout begins when its turn has come."""
    locks = item.config.stash.get(LOCKS, None)
    if locks is None:
        return (yield)
    with _turn(*locks, alone=item.get_closest_marker("alone") is not None):
        return (yield)


@contextmanager
def _turn(gate: IO[bytes], machine: IO[bytes], *, alone: bool) -> Iterator[None]:
    """The machine, shared with other workers or alone. The gate lets no later test overtake one that waits to be alone."""
    fcntl.flock(gate, fcntl.LOCK_EX)
    try:
        fcntl.flock(machine, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
    finally:
        fcntl.flock(gate, fcntl.LOCK_UN)
    try:
        yield
    finally:
        fcntl.flock(machine, fcntl.LOCK_UN)
