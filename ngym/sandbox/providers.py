"""The `sandbox:` option of a stanza, such as `sandbox: {provider: local, tier: auto}`.

`sandbox: {provider: my_file.py:MySandbox, ...}` is a Sandbox of the user's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, PrivateAttr, Tag, ValidationInfo, model_validator

from ngym.config.import_path import check_arguments, import_class, refusal
from ngym.sandbox.base import Sandbox
from ngym.sandbox.docker import IMAGE, DockerSandbox
from ngym.sandbox.local import PRELOAD, LocalSandbox
from ngym.sandbox.remote import RemoteSandbox


class _Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LocalOptions(_Options):
    """Options of LocalSandbox. `auto` uses the strongest tier that works; a named tier is required."""

    provider: Literal["local"] = Field("local", description="Run programs on this machine.")
    tier: Literal["auto", "namespaces", "landlock", "seccomp"] = Field("auto", description="How programs are confined.")
    slots: int | None = Field(None, ge=1, description="Concurrent programs; null: one for each processor.")
    preload: tuple[str, ...] = Field(PRELOAD, description="Modules that are imported before a program begins.")


class DockerOptions(_Options):
    """Options of DockerSandbox; `gvisor` is Docker with `--runtime runsc`."""

    provider: Literal["docker", "gvisor"] = Field(description="Run programs in containers.")
    image: str = Field(IMAGE, description="The image; it needs Python.")
    slots: int = Field(4, ge=1, description="Concurrent containers.")


class RemoteOptions(_Options):
    """Options of RemoteSandbox."""

    provider: Literal["remote"] = Field(description="Run programs on another machine.")
    url: str | list[str] = Field(description="URL of gym_servers/sandbox; several share the load.")


class CustomOptions(BaseModel):
    """A Sandbox of the user's; all other keys are the keyword arguments of its constructor."""

    model_config = ConfigDict(frozen=True, extra="allow")
    provider: str = Field(
        description="Import path of a subclass of ngym.sandbox.Sandbox, such as my_file.py:MySandbox."
    )
    _kind: type[Sandbox] = PrivateAttr()

    @property
    def arguments(self) -> dict[str, Any]:
        return self.model_extra or {}

    @model_validator(mode="after")
    def _check_constructor_arguments(self, info: ValidationInfo) -> Self:
        """Import the class. A relative file is searched next to the config, which `parse_options` passes as `root`."""
        root = (info.context or {}).get("root", Path())
        try:
            self._kind = import_class(self.provider, Sandbox, root)
            check_arguments(self.provider, self._kind, self.arguments)
        except ValueError as error:
            raise refusal("provider", self.provider, error) from None
        return self

    def create(self) -> Sandbox:
        return self._kind(**self.arguments)


PROVIDERS = {"local": "local", "docker": "docker", "gvisor": "docker", "remote": "remote"}


def _tag(value: Any) -> str | None:
    provider = value.get("provider", "local") if isinstance(value, dict) else getattr(value, "provider", None)
    return "own" if ":" in str(provider) else PROVIDERS.get(str(provider))


SandboxOptions = Annotated[
    Annotated[LocalOptions, Tag("local")]
    | Annotated[DockerOptions, Tag("docker")]
    | Annotated[RemoteOptions, Tag("remote")]
    | Annotated[CustomOptions, Tag("own")],
    Discriminator(
        _tag,
        custom_error_type="provider",
        custom_error_message="unknown provider; use local, docker, gvisor, remote, or the import path of a Sandbox "
        "(my_file.py:MySandbox)",
    ),
]


def choose_sandbox(options: LocalOptions | DockerOptions | RemoteOptions | CustomOptions) -> Sandbox:
    """The sandbox of these options, not yet started."""
    if isinstance(options, CustomOptions):
        return options.create()
    if isinstance(options, LocalOptions):
        return LocalSandbox(options.tier, slots=options.slots, preload=options.preload)
    if isinstance(options, DockerOptions):
        runtime = "runsc" if options.provider == "gvisor" else None
        return DockerSandbox(options.image, runtime=runtime, slots=options.slots)
    return RemoteSandbox(*([options.url] if isinstance(options.url, str) else options.url))
