"""The `sandbox:` option of a stanza, such as `sandbox: {provider: local, tier: auto}`."""

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
    """Options of LocalSandbox. `auto` uses the strongest tier that works; a named tier is required."""

    provider: Literal["local"] = "local"
    tier: Literal["auto", "namespaces", "landlock", "seccomp"] = Field("auto", description="How programs are confined.")
    slots: int | None = Field(None, ge=1, description="Concurrent programs; null: one for each processor.")
    preload: tuple[str, ...] = Field(PRELOAD, description="Modules that are imported before a program begins.")


class Docker(_Options):
    """Options of DockerSandbox; `gvisor` is Docker with `--runtime runsc`."""

    provider: Literal["docker", "gvisor"]
    image: str = Field(IMAGE, description="The image; it needs Python.")
    slots: int = Field(4, ge=1, description="Concurrent containers.")


class Remote(_Options):
    """Options of RemoteSandbox."""

    provider: Literal["remote"]
    url: str | list[str] = Field(description="URL of gym_servers/sandbox; several share the load.")


SandboxOptions = Annotated[Local | Docker | Remote, Field(discriminator="provider")]


def sandbox_of(options: Local | Docker | Remote) -> Sandbox:
    """The sandbox of these options, not yet started."""
    if isinstance(options, Local):
        return LocalSandbox(options.tier, slots=options.slots, preload=options.preload)
    if isinstance(options, Docker):
        runtime = "runsc" if options.provider == "gvisor" else None
        return DockerSandbox(options.image, runtime=runtime, slots=options.slots)
    return RemoteSandbox(*([options.url] if isinstance(options.url, str) else options.url))
