"""What holds for every test: nothing from the network, one thread a process, and no process left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

# Read when torch, transformers or vLLM are imported, here or in a process that a test starts.
os.environ |= {
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
}
# A developer's own settings must not decide a test.
for name in [name for name in os.environ if name.startswith(("NGYM_", "OPENAI_", "AZURE_OPENAI_"))]:
    del os.environ[name]


@pytest.fixture(scope="session")
def root() -> Path:
    """The project's folder."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left_behind() -> Iterator[None]:
    """Fails the last test of a file whose tests started a process that still runs."""
    this = psutil.Process()
    before = set(this.children(recursive=True))
    yield
    left = [process for process in this.children(recursive=True) if process not in before]
    _, alive = psutil.wait_procs(left, timeout=5)
    alive = [process for process in alive if not _is_pythons_own(process)]
    commands = [f"{process.pid}: {' '.join(process.cmdline())}" for process in alive]
    for process in alive:
        process.kill()
    assert not alive, f"still running: {commands}"


def _is_pythons_own(process: psutil.Process) -> bool:
    """multiprocessing keeps one helper until the interpreter ends."""
    return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
