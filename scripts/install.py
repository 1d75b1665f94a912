"""Makes .venv hold exactly what locks/cpu.txt says and this project, editable; done already, it does nothing.

Run by `make` with the Python that .venv is to have. Only the standard library is used, because nothing else is there yet.
pip installs uv, and uv the rest, many times faster, from the sources that pip is configured for
(ngym/supervise/package_indexes.py).
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import re
import runpy
import subprocess
import sys
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "locks" / "cpu.txt"
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "installed"
# Where the CPU builds of torch live when no configured index or folder has them.
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# What the trainer and the model server import: 6,000 of the 31,000 files that are installed, and uv compiles none.
IMPORTED = (
    "ngym.trainer.training_run, transformers.models.qwen3.modeling_qwen3, matplotlib.pyplot",
    (
        "vllm.engine.arg_utils, vllm.v1.engine.async_llm, vllm.v1.engine.core, vllm.v1.executor.uniproc_executor, "
        "vllm.v1.worker.cpu_worker, vllm.v1.attention.backends.cpu_attn, vllm.model_executor.models.qwen3, "
        "vllm.entrypoints.launchers.api_server.app_state"
    ),
)


@dataclass(frozen=True)
class Installation:
    """The contents of a complete .venv. place: scripts in .venv name their folder, and packages fit one Python."""

    place: str
    digest: str

    @classmethod
    def required(cls) -> Installation:
        """Its digest is of all that decides what is installed."""
        inputs = (LOCK, ROOT / "pyproject.toml", Path(__file__))
        digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in inputs)).hexdigest()
        return cls(place=f"{ROOT} {sys.version_info.major}.{sys.version_info.minor}", digest=digest)

    @classmethod
    def installed(cls) -> Installation | None:
        """None if there is no installation, or only an unfinished one."""
        if not (STAMP.is_file() and PYTHON.exists()):
            return None
        place, digest = STAMP.read_text().splitlines()
        return cls(place, digest)

    def write(self) -> None:
        """Last of all and at once: an installation that was killed has no stamp."""
        partial = STAMP.with_suffix(".partial")
        partial.write_text(f"{self.place}\n{self.digest}\n")
        partial.rename(STAMP)


def main() -> None:
    """Install unless the stamp says that this very installation is complete."""
    warn_of_missing_libraries()
    wanted = Installation.required()
    if Installation.installed() == wanted:
        return
    with LOCK.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second `make` in another terminal waits here, and then has nothing to do
        found = Installation.installed()
        if found == wanted:
            return
        STAMP.unlink(missing_ok=True)
        if found is None or found.place != wanted.place:
            create()
        fill()
        compile_imported()
        wanted.write()


def warn_of_missing_libraries() -> None:
    """Warn of missing libraries that no Python package brings and only the policy needs."""
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        say("libnuma is missing, and vLLM does not start without it (Debian, Ubuntu: apt install libnuma1)")


def create() -> None:
    """An empty .venv with uv in it."""
    say("creating .venv")
    venv.create(VENV, with_pip=True, clear=True)
    run(str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", pinned("uv") or "uv")


def fill() -> None:
    """The packages of the lock, no others, and the project itself."""
    indexes = runpy.run_path(str(ROOT / "ngym" / "supervise" / "package_indexes.py"))
    settings = indexes["pip_settings"](str(PYTHON))
    own = {"VIRTUAL_ENV": str(VENV)}
    operators = {"DS_BUILD_OPS": "0"}  # DeepSpeed compiles an operator when it is first needed
    environment = operators | indexes["uv_environment"](settings, os.environ) | own
    offline = ["--no-index"] if indexes["is_offline"](settings) else []
    uv = [str(VENV / "bin" / "uv"), "pip"]
    install = [*uv, "install", "--no-deps", *offline]
    torch = pinned("torch")
    if torch is not None and not succeeds(*install, "--dry-run", torch, environment=environment):
        say(f"no configured source has {torch}; taking it from PyTorch's own index")
        run(*install, "--index", PYTORCH_CPU_INDEX, torch, environment=environment)
    say(f"installing {LOCK.relative_to(ROOT)}")
    run(*uv, "sync", *offline, str(LOCK), environment=environment)
    run(*install, "--no-build-isolation", "--editable", str(ROOT), environment=environment)


def compile_imported() -> None:
    """Write the bytecode of what is imported, so that no first start has to: 15 CPU seconds, on two cores at once.

    A part that cannot be imported is left out: the command that needs it reports why.
    """
    say("compiling what the trainer and the model server import")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    imports = [
        subprocess.Popen([PYTHON, "-c", f"import os, {names}; os._exit(0)"], env=environment, cwd="/", **quiet)
        for names in IMPORTED
    ]
    for each in imports:
        each.wait()


def pinned(package: str) -> str | None:
    """The requirement of this package in the lock, such as `uv==1.2.3`."""
    found = re.search(rf"^{re.escape(package)}==[^\s;]+", LOCK.read_text(), re.MULTILINE)
    return found and found.group()


def say(step: str) -> None:
    print(f"install: {step}", flush=True)


def run(*command: str, environment: Mapping[str, str] | None = None) -> None:
    """Run a command with its output on this terminal; its failure is ours."""
    # Not in this folder: uv would apply the [tool.uv] of pyproject.toml, which is for `uv sync`, to the lock.
    status = subprocess.run(command, env=environment, cwd="/", check=False).returncode
    if status:
        sys.exit(f"install: failed ({status}): {' '.join(command)}")


def succeeds(*command: str, environment: Mapping[str, str]) -> bool:
    return subprocess.run(command, env=environment, cwd="/", capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    main()
