"""Virtual environments of services with their own packages: each is created once and includes ngym's core.

    .ngym/venvs/<folder of the requirements>-<hash>/      created under another name, renamed when complete

The hash covers the requirements, Python and ngym's core: a change creates a new environment, and no run changes the
environment of another. The core is not installed again: the environment links to the running package and installs that
package's requirements, so a checkout stays editable there too.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ngym.config.service_config import Config, Stanza
from ngym.config.shipped_files import shipped_file
from ngym.errors import ConfigError, UsageError
from ngym.supervise.head_file import FOLDER
from ngym.supervise.package_indexes import is_offline, pip_settings, uv_environment
from ngym.supervise.service_main import own_environment

LOCK_POLL_S = 0.2
SHOWN_LINES = 8
CORE = Path(__file__).resolve().parents[1]  # the package `ngym`


@dataclass(frozen=True)
class Venv:
    """The virtual environment of a service; it exists once `make` has returned."""

    owner: str
    where: str  # the line of the config that requires it
    requirements: Path
    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"


def venv_of(config: Config, stanza: Stanza) -> Venv | None:
    """The environment for a stanza's `requirements`, created or not; None for a service that uses our own packages."""
    if stanza.requirements is None:
        return None
    where = stanza.key_where.get("requirements", stanza.where)
    file = shipped_file(stanza.requirements, config.root, where)
    identity = "\n".join([file.read_text(), sys.version, sys.base_prefix, str(CORE), *_core_requirements()])
    name = f"{file.parent.name}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    return Venv(stanza.name, where, file, config.root / FOLDER / "venvs" / name)


async def make(venv: Venv, say: Callable[[str], None], uv: str | None = None) -> Path:
    """The environment's Python, after installing the packages if needed. Cancelling ends the installation.

    say: called with one line about the installation. uv: the program; without it, `venv` and pip are used.

    Raises:
        ConfigError: a package cannot be installed; with the installer's last lines.
        UsageError: the folder cannot be written.
    """
    if venv.folder.is_dir():
        return venv.python
    try:
        venv.folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{venv.folder.parent}: cannot be made ({error.strerror}); packages are put there") from None
    async with _locked(venv.folder.with_suffix(".lock"), say):
        if not venv.folder.is_dir():  # another process may have created it while we waited
            say(f"installing {venv.requirements} into {venv.folder}")
            unfinished = venv.folder.with_suffix(".new")  # the lock excludes other writers
            shutil.rmtree(unfinished, ignore_errors=True)
            await _install(venv, unfinished, uv)
            unfinished.rename(venv.folder)
    return venv.python


def find_uv() -> str | None:
    """The program uv: next to our own Python, or on the path."""
    return shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


@contextlib.asynccontextmanager
async def _locked(path: Path, say: Callable[[str], None]) -> AsyncIterator[None]:
    """Allow one process at a time; the kernel releases the lock when its holder ends, for any reason."""
    waits = False
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waits:
                    say(f"waiting for another process, which installs into {path.with_suffix('')}")
                waits = True
                await asyncio.sleep(LOCK_POLL_S)
        yield


async def _install(venv: Venv, folder: Path, uv: str | None) -> None:
    python = str(folder / "bin" / "python")
    requirements = ["-r", str(venv.requirements), *_core_requirements()]
    environment = own_environment() | {"NO_COLOR": "1"}
    if uv:
        settings = await asyncio.to_thread(pip_settings, sys.executable)
        environment = uv_environment(settings, environment)
        offline = ["--no-index"] if is_offline(settings) else []
        quiet = ["--quiet", "--no-progress", *offline]
        await _run(venv, [uv, "venv", "--quiet", "--relocatable", "--python", sys.executable, str(folder)], environment)
        await _run(venv, [uv, "pip", "install", *quiet, "--python", python, *requirements], environment)
    else:
        quiet = ["--quiet", "--disable-pip-version-check"]
        await _run(venv, [sys.executable, "-m", "venv", str(folder)], environment)
        await _run(venv, [python, "-m", "pip", "install", *quiet, *requirements], environment)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (site_packages / "ngym").symlink_to(CORE, target_is_directory=True)


async def _run(venv: Venv, command: Sequence[str], environment: Mapping[str, str]) -> None:
    installer = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env=environment,
    )  # fmt: skip
    try:
        output, _ = await installer.communicate()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            installer.kill()
        await installer.wait()
        raise
    if installer.returncode:
        lines = [line.strip() for line in output.decode(errors="replace").splitlines() if line.strip()]
        program = "uv" if Path(command[0]).name == "uv" else "pip"
        raise ConfigError(
            f"{venv.where}: the packages of {venv.owner!r} ({venv.requirements}) cannot be installed; {program} says:"
            f" {' '.join(lines[-SHOWN_LINES:]) or f'nothing (exit code {installer.returncode})'}"
        )


def _core_requirements() -> list[str]:
    """The requirements of the running ngym, without its extras."""
    try:
        declared = importlib.metadata.requires("ngym") or []
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(
            "ngym runs without being installed, so what it requires is unknown; install it: pip install -e ."
        ) from None
    return [each for each in declared if not re.search(r"\bextra\s*==", each)]
