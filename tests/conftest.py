"""Fixtures of every test: blocked network, one thread a process, fixed seeds, and a check for processes left behind."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path

import forked
import psutil
import pytest
from hypothesis import HealthCheck, settings
from paths import ROOT
from waiting import running, wait_until

pytest_plugins = ["browser_pages", "parallel", "rerun"]

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
# Neither must how the tests are started: nohup, and a shell's &, have every process here ignore a signal.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# The same examples on every machine, and as much time for each as it takes.
settings.register_profile("anywhere", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("anywhere")


def pytest_configure(config: pytest.Config) -> None:
    """With `-m gpu` DeepSpeed takes the GPU, if there is one."""
    if config.option.markexpr == "gpu":
        del os.environ["DS_ACCELERATOR"]
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # torch's deterministic algorithms ask for it


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The objects that the imports of the test files make are not collected: looking for garbage in them is a fifth of
    their time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def root() -> Path:
    """The project's folder."""
    return ROOT


@pytest.fixture(scope="session")
def shared_venvs(root: Path) -> Path:
    """The folder of the virtual environments of services with packages of their own: made once in a checkout."""
    folder = root / ".ngym" / "venvs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def only_rank() -> Iterator[None]:
    """This process is the only rank of the trainer."""

    from ngym.trainer.engine import distributed
    from ngym.trainer.recipe import recipe

    with distributed.join_process_group(recipe.Launch(rank=0, local_rank=0, ranks=1)):
        yield


HELPERS = ("multiprocessing.resource_tracker", "torch/_inductor/compile_worker")


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left_behind() -> Iterator[None]:
    """Fails the last test of a file whose tests started a process that still runs."""
    this = psutil.Process()
    before = set(this.children(recursive=True))
    yield
    started = {process: _command(process) for process in this.children(recursive=True) if process not in before}
    # multiprocessing and torch.compile keep their helpers until the interpreter ends.
    spared = forked.server_pids()
    ours = [
        process
        for process, command in started.items()
        if not any(helper in command for helper in HELPERS) and process.pid not in spared
    ]
    with suppress(AssertionError):
        wait_until(lambda: not running(ours))
    left = running(ours)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    assert not left, f"still running: {[f'{process.pid}: {started[process]}' for process in left]}"


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return ""
