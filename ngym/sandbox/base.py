"""The interface of all sandbox providers: programs, limits and results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import PurePosixPath
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

Verdict = Literal["ok", "runtime_error", "time_limit", "memory_limit", "output_limit", "infra_error"]


class Limits(BaseModel):
    """The resources that a program may use; a program that exceeds one is ended."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    cpu_s: float = Field(5.0, gt=0, le=3600, description="CPU seconds of all its threads.")
    wall_s: float | None = Field(
        None,
        gt=0,
        le=36000,
        description="Seconds, the backstop for a program that sleeps, not counting time without a processor; "
        "default: four times cpu_s.",
    )
    memory_mib: int = Field(
        512,
        ge=16,
        le=1 << 20,
        description="MiB of address space beyond that of the interpreter and the preloaded modules.",
    )
    output_kib: int = Field(1024, ge=1, le=1 << 16, description="KiB of stdout, of stderr and of the answer, each.")
    threads: int = Field(32, ge=0, le=1024, description="Threads in addition to the first; there is one process.")
    files: int = Field(64, ge=8, le=1024, description="Files open at once.")
    disk_mib: int = Field(0, ge=0, le=1 << 16, description="MiB of a writable directory; 0 for no directory.")

    @property
    def wall(self) -> float:
        """Seconds until a program is ended in any case, not counting time without a processor."""
        return self.wall_s or 4 * self.cpu_s + 1

    def at_most(self, bounds: Limits) -> Limits:
        """These limits, lowered to the bounds where they exceed them."""
        least = {name: min(value, getattr(bounds, name)) for name, value in self if name != "wall_s"}
        return Limits(**least, wall_s=min(self.wall, bounds.wall))


class Program(BaseModel):
    """Python source to run as `__main__`, with its stdin and files (name -> content)."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    code: str
    stdin: str = ""
    files: Mapping[str, str] = Field(default_factory=dict)

    @field_validator("files")
    @classmethod
    def _inside(cls, files: Mapping[str, str]) -> Mapping[str, str]:
        for name in files:
            path = PurePosixPath(name)
            if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name or len(name) > 200:
                raise ValueError(f"invalid file name {name!r}: give a short relative path without '..'")
        return files


class Result(BaseModel):
    """The outcome of one run.

    verdict: `ok` (it ended with exit code 0), `runtime_error` (an exception, another exit code, a signal), a limit, or
        `infra_error`: it could not run or was starved by a busy machine, independent of the program.
    answer: what the program wrote to file descriptor 3. tier: the confinement that was used.
    """

    model_config = ConfigDict(frozen=True)
    verdict: Verdict
    tier: str
    detail: str = ""
    stdout: str = ""
    stderr: str = ""
    answer: str = ""
    exit_code: int | None = None
    signal: str | None = None
    cpu_s: float = 0.0
    wall_s: float = 0.0
    memory_bytes: int = 0


class Sandbox(ABC):
    """Runs untrusted programs."""

    @abstractmethod
    async def execute(self, program: Program, limits: Limits) -> Result:
        """Run one program. Every outcome is a Result; `infra_error` if it could not run at all."""

    @abstractmethod
    async def start(self) -> None:
        """Start now instead of in the first run. Raises ServiceError with the reason if it is impossible."""

    @abstractmethod
    async def aclose(self) -> None:
        """End every process and connection."""

    async def run(
        self, code: str, *, stdin: str = "", files: Mapping[str, str] | None = None, limits: Limits | None = None
    ) -> Result:
        """Run Python source as `__main__`; see Program, Limits and Result."""
        return await self.execute(Program(code=code, stdin=stdin, files=files or {}), limits or Limits())

    @asynccontextmanager
    async def lifespan(self, context: object = None) -> AsyncIterator[None]:
        """The sandbox as a service's `lifespan=`: starts before the service is ready, and ends with it."""
        try:
            await self.start()
            yield
        finally:
            await self.aclose()


def infra_error(tier: str, detail: str) -> Result:
    """The result of a program that could not be run."""
    return Result(verdict="infra_error", tier=tier, detail=detail)
