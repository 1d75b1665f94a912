"""Runs each program in a container through the `docker` command, confined by Docker or by gVisor (`runtime="runsc"`).

Starting a container takes a few tenths of a second. A container's report is under the program's control: it can falsify
its time or its exit code, but nothing that is compared outside.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
from contextlib import suppress
from pathlib import Path

from ngym.errors import ServiceError
from ngym.sandbox.base import Limits, Program, Result, Sandbox, Verdict, infra_error
from ngym.sandbox.docker_guest import MEMORY_EXIT

IMAGE = "python:3.11-slim-bookworm"
NOBODY = "65534:65534"
DAEMON_FAILED, RUNTIME_FAILED = 125, (126, 127)
REMOVE_S = 5.0
START_S = 60.0  # seconds beyond the wall limit, for a container to start and be removed
OVERHEAD_MIB = 64  # two interpreters
SCRATCH_MIB = 8  # minimum, for the program's source
RUNNER = Path(__file__).with_name("docker_guest.py")


class DockerSandbox(Sandbox):
    """One container for each program.

    Args:
        image: needs `python`, and the packages that programs may import.
        runtime: for `docker run --runtime`; `runsc` is gVisor, which must be installed for Docker.
        slots: concurrent containers.
        command: the client, if it is not `docker` (such as `podman`).
    """

    def __init__(
        self, image: str = IMAGE, *, runtime: str | None = None, slots: int = 4, command: tuple[str, ...] = ("docker",)
    ) -> None:
        self.image, self.runtime, self.command = image, runtime, command
        self.tier = "gvisor" if runtime == "runsc" else "docker"
        self._free = asyncio.Semaphore(slots)

    async def start(self) -> None:
        try:
            async with asyncio.timeout(START_S):
                code, stdout, stderr = await _ask([*self.command, "version", "--format", "{{.Server.Version}}"])
        except TimeoutError:
            raise ServiceError(
                f"the {self.tier} sandbox: its engine did not answer within {START_S:g} s", failure="config"
            ) from None
        except OSError as error:
            raise ServiceError(f"the {self.tier} sandbox needs the command {self.command[0]!r}: {error}") from None
        if code:
            raise ServiceError(f"the {self.tier} sandbox: {stderr.strip() or stdout.strip()}", failure="config")

    async def aclose(self) -> None:
        """Does nothing: each container is removed with its program."""

    async def execute(self, program: Program, limits: Limits) -> Result:
        name = f"ngym-{secrets.token_hex(8)}"
        async with self._free:
            try:
                async with asyncio.timeout(limits.wall + START_S):
                    code, stdout, stderr = await _ask(self.arguments(name, limits), request(program, limits))
            except TimeoutError:
                await self._remove(name)
                return infra_error(self.tier, "the container neither ran nor ended")
            except OSError as error:
                return infra_error(self.tier, f"{self.command[0]}: {error}")
            except asyncio.CancelledError:
                await asyncio.shield(self._remove(name))
                raise
        if code == DAEMON_FAILED or code in RUNTIME_FAILED:
            return infra_error(self.tier, stderr.strip()[-500:])
        return result(self.tier, limits, code, stdout)

    def arguments(self, name: str, limits: Limits) -> list[str]:
        """The command line of one container."""
        memory = f"{limits.memory_mib + limits.disk_mib + OVERHEAD_MIB + SCRATCH_MIB}m"
        scratch = limits.disk_mib + SCRATCH_MIB
        options = {
            "--name": name,
            "--network": "none",
            "--user": NOBODY,
            "--cap-drop": "ALL",
            "--security-opt": "no-new-privileges",
            "--memory": memory,
            "--memory-swap": memory,
            "--cpus": "1",
            "--pids-limit": str(limits.threads + 8),
            "--ulimit": f"nofile={limits.files}:{limits.files}",
            "--tmpfs": f"/box:rw,nosuid,nodev,size={scratch}m,nr_inodes={64 + 16 * scratch},mode=1777",
            "--workdir": "/box",
            "--env": "OPENBLAS_NUM_THREADS=1",
            "--log-driver": "none",
            **({"--runtime": self.runtime} if self.runtime else {}),
        }
        flags = [part for option in options.items() for part in option]
        inside = ["python", "-I", "-c", RUNNER.read_text()]
        return [*self.command, "run", "--rm", "--interactive", "--init", "--read-only", *flags, self.image, *inside]

    async def _remove(self, name: str) -> None:
        """Remove a container; gives up after a timeout, so that a hanging engine does not block the program's slot."""
        with suppress(OSError):
            async with asyncio.timeout(REMOVE_S):
                await _ask([*self.command, "rm", "--force", name])


def request(program: Program, limits: Limits) -> bytes:
    """The line of JSON for `contained`."""
    body = {
        "code": program.code,
        "stdin": program.stdin,
        "files": dict(program.files),
        "cpu_s": limits.cpu_s,
        "wall_s": limits.wall,
        "memory_bytes": limits.memory_mib << 20,
        "output_bytes": limits.output_kib << 10,
    }
    return json.dumps(body).encode() + b"\n"


def result(tier: str, limits: Limits, code: int, stdout: str) -> Result:
    """The result from the output of `contained`; without a valid report the program counts as failed."""
    try:
        answer = json.loads(stdout)
        verdict, detail = _verdict(answer["cause"], answer["status"], answer["cpu_s"], limits)
        status = answer["status"]
        return Result(
            verdict=verdict,
            tier=tier,
            detail=detail,
            exit_code=status if status >= 0 else None,
            signal=signal.Signals(-status).name if status < 0 else None,
            **{key: answer[key] for key in ("stdout", "stderr", "answer", "cpu_s", "wall_s", "memory_bytes")},
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return Result(verdict="runtime_error", tier=tier, detail=f"its container ended with code {code}")


def _verdict(cause: str, status: int, cpu_s: float, limits: Limits) -> tuple[Verdict, str]:
    if cause == "output":
        return "output_limit", f"wrote more than {limits.output_kib} KiB"
    if cause == "asleep":
        return "time_limit", "ran until the wall-clock limit"
    if status == MEMORY_EXIT:
        return "memory_limit", "ran out of memory"
    if cpu_s >= limits.cpu_s or status == -signal.SIGXCPU:
        return "time_limit", "used its CPU time"
    if status == -signal.SIGKILL:
        return "memory_limit", "was killed, as the kernel does at the container's memory limit"
    if status == 0:
        return "ok", ""
    return "runtime_error", f"exit code {status}" if status > 0 else signal.Signals(-status).name


async def _ask(command: list[str], stdin: bytes = b"") -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        stdout, stderr = await process.communicate(stdin)
    except asyncio.CancelledError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    return process.returncode or 0, stdout.decode(errors="replace"), stderr.decode(errors="replace")
