"""The typed options of a service, and the context of a service process."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, get_args

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo
from pydantic.fields import FieldInfo

from ngym.config.yaml_tree import ConfigTree, parse
from ngym.did_you_mean import did_you_mean, near_file
from ngym.errors import ConfigError, ServiceError
from ngym.net.auth import ADMIN_TOKEN, RUN_TOKEN, token_from
from ngym.peers import Peers
from ngym.schema import Kind
from ngym.telemetry.log_format import Redactor

OPTION = "NGYM_OPTION_"  # and the option's name in capitals: an option of a service that another server starts
MAX_SHOWN = 8  # services in a message
RESULT_MIB = 16  # limit of a tool's result, and of all results of a rollout: a request of 32 MiB holds them, escaped


@dataclass(frozen=True)
class _Reference:
    """Marks an option that names another service. kind: of that service; None: any."""

    kind: Kind | None = None


ServiceName = Annotated[str, _Reference()]
GymServerName = Annotated[str, _Reference("gym_server")]
ModelName = Annotated[str, _Reference("model")]


def _in_project(path: Path, info: ValidationInfo) -> Path:
    root: Path = (info.context or {}).get("root", Path())
    return root / path


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"there is no file {path}{near_file(path)}")
    return path


def _existing_folder(path: Path) -> Path:
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder" if path.exists() else f"there is no folder {path}{near_file(path)}")
    return path


ProjectPath = Annotated[Path, AfterValidator(_in_project)]
"""An option with a path, relative to the config's folder."""
InputFile = Annotated[ProjectPath, AfterValidator(_existing)]
"""The same, of a file that must exist when the service starts."""
InputFolder = Annotated[ProjectPath, AfterValidator(_existing_folder)]
"""The same, of a folder that must exist when the service starts."""


class ServiceOptions(BaseModel):
    """The options that a stanza may have next to kind, app and url. Derive from it; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    max_body_mib: int | None = Field(
        default=None,
        ge=1,
        description="Limit of a request body in MiB. null: 32 for rows and conversations, else 16. Parsing a text of 64 MiB takes 0.25 s, in which the service answers no other request.",
    )
    max_json_weight: int | None = Field(
        default=None,
        ge=1000,
        description="Limit of the values in a request's JSON: 8 for each object, list and member of an object, 1 for "
        "any other value and for 16 bytes outside of strings. null: 200,000 for tools, 4,000,000 for many rows, else "
        "2,000,000. Parsing 1,000,000 takes 0.1 s, in which the service answers no other request.",
    )


Options = TypeVar("Options", bound=ServiceOptions)


@dataclass(frozen=True)
class ServiceContext:
    """The context of a service process: its options, its sockets (bound and listening) and its peers.

    root: folder of the config file; relative paths in options are relative to it.
    run_token: the token that callers must send, None where the run is open.
    admin_token: the token for weight updates.
    tls: the files of ngym.tls, if the run speaks https.
    redact: removes the secrets that this process knows from its outgoing texts.
    at_new_address: whether no other process has served at this address.
    """

    name: str
    kind: Kind
    options: Any
    peers: Peers
    sockets: list[socket.socket] = field(default_factory=list)
    root: Path = Path()
    admin_token: str | None = None
    run_token: str | None = None
    tls: Mapping[str, str] | None = None
    redact: Redactor = field(default_factory=lambda: Redactor([]))
    at_new_address: bool = False


def most_result_bytes(options: Any) -> int:
    """Limit of a tool's result in bytes, for a service with these options."""
    return max(RESULT_MIB, getattr(options, "max_body_mib", None) or 0) << 20


def check_result(name: str, size: int, options: Any, where: str | None = None) -> None:
    """Raise ServiceError for a tool's result that no request could hold: the model server would refuse the next call."""
    most = most_result_bytes(options)
    if size > most:
        raise ServiceError(
            f"{name} returned {size / (1 << 20):.1f} MiB, more than {most >> 20}{f' ({where})' if where else ''}; "
            "return less, or raise the stanza's max_body_mib",
            failure="tool_error",
        )


def parse_options(
    model: type[Options],
    values: Mapping[str, Any],
    lines: Mapping[str, str],
    where: str,
    services: Iterable[str],
    root: Path = Path(),
    kinds: Mapping[str, Kind] = MappingProxyType({}),
) -> Options:
    """A stanza's options as the service's own record.

    Args:
        root: the folder of the config file.
        kinds: of the services, where known, also of those that do not run: a hint names them.

    Raises:
        ConfigError: unknown keys, unknown service names, and names of services of another kind than the option needs.
    """
    tree = ConfigTree(dict(values), lines, root, default_where=where)
    services = list(services)

    def wrong_services(parsed: Mapping[str, Any]) -> list[str]:
        references = [(name, parsed.get(name), _reference(info)) for name, info in model.model_fields.items()]
        mistakes = []
        for name, value, reference in references:
            if reference is None or not isinstance(value, str):
                continue
            kind = kinds.get(value)
            if value not in services:
                missing = f"{tree.where(name)}: no service named {value!r}"
                if name in values:
                    mistakes.append(missing + did_you_mean(value, {*services, *kinds}))
                else:  # `--only` does not know defaults
                    hint = did_you_mean(value, services)
                    fix = f"write `{name}: NAME`, which `ng_run --only` starts, too"
                    mistakes.append(f"{missing}, the default of {name}{hint}; {fix}")
            elif None not in (kind, reference.kind) and kind != reference.kind:
                fit = [one for one in services if kinds.get(one) == reference.kind]
                known = f" (known: {', '.join(fit[:MAX_SHOWN])})" if fit else ""
                mistakes.append(f"{tree.where(name)}: {name}: {value!r} is of kind {kind}, not {reference.kind}{known}")
        return mistakes

    try:
        options = parse(model, tree)
    except ConfigError as error:
        raise ConfigError("\n".join([str(error), *wrong_services(values)])) from None
    if mistakes := wrong_services(vars(options)):
        raise ConfigError("\n".join(mistakes))
    return options


def context_from_environment(name: str, kind: Kind, model: type[ServiceOptions]) -> ServiceContext:
    """The context of a service that ngym did not start (`uvicorn app:app`, a test client): defaults and the environment.

    NGYM_OPTION_MAX_IN_FLIGHT=8 sets the option `max_in_flight`, as YAML; the value of an option that names a service
    is its address. NGYM_TOKEN is sent to these services.

    Raises:
        ConfigError: an option is wrong, or one without a default is not set.
    """
    values: dict[str, Any] = {}
    urls: dict[str, list[str]] = {}
    for option, info in model.model_fields.items():
        setting = os.environ.get(OPTION + option.upper())
        if _reference(info):
            if setting or info.is_required() or info.default:
                values[option] = option  # the service is called as the option
                urls[option] = [setting.rstrip("/")] if setting else []
        elif setting is not None:
            values[option] = yaml.safe_load(setting)
    lines = {option: OPTION + option.upper() for option in model.model_fields}
    options = parse_options(model, values, lines, f"the environment ({OPTION}...)", urls)
    token = token_from(RUN_TOKEN)
    return ServiceContext(
        name, kind, options, Peers(urls, None, token, owner=name), [], Path(), token_from(ADMIN_TOKEN), token
    )


def _reference(info: FieldInfo) -> _Reference | None:
    marks = [
        *info.metadata,
        *(mark for kind in get_args(info.annotation) for mark in getattr(kind, "__metadata__", ())),
    ]
    return next((mark for mark in marks if isinstance(mark, _Reference)), None)
