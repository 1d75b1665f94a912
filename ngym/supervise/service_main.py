"""The job of a freshly forked child: serve or check a service, in this Python or in that of the service's environment.

For a service with separate packages the child executes another Python, which runs
`python -P -m ngym.supervise.service_main FD SOCKET...` and continues with the same job. Pid, parent, session,
signals, log and listening sockets stay the same.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from ngym.errors import UsageError
from ngym.runtime.event_loop import exit_process

RUNNER = "ngym.services.base.runner"  # a program that this process executes, not a library
EXIT_USAGE = 2  # of our commands
OTHERS_PACKAGES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")  # variables that add other packages


@dataclass(frozen=True)
class ServiceJob:
    """request: `action` (run, check, or serve: run as a command does), `spec`; optional: `python` of separate
    packages, and `environment`, variables of its own.
    """

    request: dict[str, Any]
    sockets: list[socket.socket]


def perform(job: ServiceJob) -> NoReturn:
    """Run the job, here or in its own Python, and end this process with its exit code."""
    os.environ.update(job.request.get("environment", {}))
    if "python" in job.request:
        _become(job.request.pop("python"), job)
    runner = importlib.import_module(RUNNER)
    spec, action = runner.spec_from(job.request["spec"]), job.request["action"]
    code = _check(runner, spec) if action == "check" else runner.run(spec, job.sockets)
    exit_process(EXIT_USAGE if action == "serve" and code in (runner.EXIT_CONFIG, runner.EXIT_REFUSED) else code)


def _become(python: str, job: ServiceJob) -> NoReturn:
    with tempfile.TemporaryFile() as file:
        file.write(json.dumps(job.request).encode())
        file.seek(0)
        fds = [file.fileno(), *(sock.fileno() for sock in job.sockets)]
        for fd in fds:
            os.set_inheritable(fd, True)
        try:
            environment = dict(os.environ) if python == sys.executable else own_environment()
            os.execve(python, [python, "-P", "-m", "ngym.supervise.service_main", *map(str, fds)], environment)
        except OSError as error:
            print(
                f"{python}: cannot be run ({error.strerror}); start again to recreate the environment", file=sys.stderr
            )
            exit_process(int(importlib.import_module(RUNNER).EXIT_CONFIG))


def own_environment() -> dict[str, str]:
    """The environment variables for a Python that must find only its own packages."""
    return {key: value for key, value in os.environ.items() if key not in OTHERS_PACKAGES}


def _check(runner: ModuleType, spec: Any) -> int:
    """Load the service's file and its options without serving; returns an exit code like `run`, after a line on stderr."""
    try:
        runner.check(spec, runner.load(Path(spec.app_file)))
    except UsageError as error:
        print(error, file=sys.stderr)
        return int(runner.EXIT_CONFIG)
    return 0


def main() -> NoReturn:
    """The entry point in the service's own Python."""
    described, *listening = map(int, sys.argv[1:])
    with os.fdopen(described, "rb") as file:
        request = json.load(file)
    for fd in listening:
        os.set_inheritable(fd, False)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    perform(ServiceJob(request, [socket.socket(fileno=fd) for fd in listening]))


if __name__ == "__main__":
    main()
