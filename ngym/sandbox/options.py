"""Which sandbox does a stanza ask for? `sandbox: {provider: local, tier: auto}` and its likes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from ngym.sandbox.docker import IMAGE, DockerSandbox
from ngym.sandbox.interface import Sandbox
from ngym.sandbox.local import PRELOAD, LocalSandbox
from ngym.sandbox.remote import RemoteSandbox


class _Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Local(_Options):
    """See LocalSandbox. The strongest tier that works is taken; naming one makes any other an error."""

    provider: Literal["local"] = "local"
    tier: Literal["auto", "namespaces", "landlock", "seccomp"] = Field("auto", description="How programs are held.")
    slots: int | None = Field(None, ge=1, description="Programs at a time; null: one for each processor.")
    preload: tuple[str, ...] = Field(PRELOAD, description="Modules that are there when a program begins.")


class Docker(_Options):
    """See DockerSandbox; `gvisor` is Docker with `--runtime runsc`."""

    provider: Literal["docker", "gvisor"]
    image: str = Field(IMAGE, description="With a Python in it.")
    slots: int = Field(4, ge=1, description="Containers at a time.")


class Remote(_Options):
    """See RemoteSandbox."""

    provider: Literal["remote"]
    url: str | list[str] = Field(description="Of gym_servers/sandbox; of several, each gets its share.")


SandboxOptions = Annotated[Local | Docker | Remote, Field(discriminator="provider")]


def sandbox_of(options: Local | Docker | Remote) -> Sandbox:
    """The sandbox of these options, not yet started."""
    if isinstance(options, Local):
        return LocalSandbox(options.tier, slots=options.slots, preload=options.preload)
    if isinstance(options, Docker):
        runtime = "runsc" if options.provider == "gvisor" else None
        return DockerSandbox(options.image, runtime=runtime, slots=options.slots)
    return RemoteSandbox(*([options.url] if isinstance(options.url, str) else options.url))
