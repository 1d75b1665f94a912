"""global_config.yaml -> one frozen tree: YAML files and `key=value` overrides, interpolated, checked, each error with its line."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from ngym.config.shipped_files import app_file, shipped_file
from ngym.config.yaml_tree import COMMAND_LINE, Tree, load_tree, parse, subtree
from ngym.did_you_mean import did_you_mean, nearest
from ngym.errors import ConfigError, UsageError
from ngym.net.address_rules import wrong_url
from ngym.net.tls import check_pair, client_context, trust
from ngym.schema import Kind
from ngym.telemetry.tracing import Destination

SETTINGS_KEY = "ngym"
OTEL = ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
KINDS: tuple[str, ...] = get_args(Kind)


class HeadSettings(BaseModel):
    """Where `ng_run` answers for the whole run. 11000 is the port at which NeMo Gym's tools look."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    host: str = Field(default="127.0.0.1", description="The address that it is bound to.")
    port: int = Field(
        default=11000,
        ge=0,
        le=65535,
        description="0: any free one. The default gives way to a free one where it is taken.",
    )


class TlsSettings(BaseModel):
    """With these everything that listens speaks https. Paths are relative to the config file; all files are PEM."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    certificate: Path = Field(description="Valid for every address that a url names, 127.0.0.1 too where it is one.")
    key: Path = Field(description="The certificate's private key.")
    ca: Path | None = Field(default=None, description="Whom the services believe beside the machine's authorities.")

    def within(self, root: Path) -> TlsSettings:
        """The same with whole paths."""
        return TlsSettings(**{name: root / path for name, path in self if path is not None})


class TracingSettings(BaseModel):
    """OpenTelemetry: where spans go. Headers and the like are told by the standard's OTEL_* variables."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    endpoint: str = Field(description="Of OTLP over HTTP, such as http://127.0.0.1:4318.")
    sample: float = Field(default=1.0, ge=0, le=1, description="The share of rollouts that are traced.")
    contents: bool = Field(default=False, description="With what was said to and by models and tools.")

    def destination(self) -> Destination:
        return Destination(self.endpoint, self.sample, self.contents)


class Settings(BaseModel):
    """What holds for the whole run: the `ngym:` key of the global config."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    head: HeadSettings = HeadSettings()
    host: str = Field(default="127.0.0.1", description="The address that services are bound to.")
    ready_timeout_s: float = Field(default=120, gt=0, description="For gym servers and agents.")
    model_ready_timeout_s: float = Field(default=600, gt=0, description="For model servers.")
    max_restarts: int = Field(default=5, ge=0, description="Deaths in a row before the run gives up.")
    tls: TlsSettings | None = None
    tracing: TracingSettings | None = None
    logs: Literal["text", "json"] = Field(default="text", description="What services print: lines, or JSON objects.")
    require_token: bool = Field(default=False, description="Lock the run on loopback, too; elsewhere it always is.")


class Stanza(BaseModel):
    """One service of the config: what the house needs to know, and the service's own options, unread."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    kind: Kind = Field(description="What it is.")
    app: str | None = Field(
        default=None,
        description="Its file, by path: in the folder of the config first, then among the shipped services.",
    )
    url: str | None = Field(default=None, description="It runs elsewhere, at this address; it is used and not started.")
    urls: tuple[str, ...] = Field(default=(), description="The same with several replicas, an address each.")
    replicas: int = Field(
        default=1, ge=1, le=1024, description="So many processes; a rollout's session stays with one of them."
    )
    port: int | None = Field(default=None, ge=1, le=65535, description="A fixed port; null: a free one.")
    requirements: str | None = Field(
        default=None, description="A requirements.txt: the service runs in an environment of its own that holds these."
    )
    token_env: str | None = Field(
        default=None, description="With a `url`: the environment variable that holds the bearer token it wants."
    )
    options: dict[str, Any] = {}
    where: str = ""
    key_where: dict[str, str] = {}

    @property
    def external(self) -> bool:
        """Whether somebody else runs this service."""
        return bool(self.url or self.urls)

    @property
    def external_urls(self) -> list[str]:
        return [self.url] if self.url else list(self.urls)


class Config(BaseModel):
    """The whole of global_config.yaml."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    services: dict[str, Stanza]
    settings: Settings
    root: Path
    files: tuple[Path, ...]

    @property
    def tracing(self) -> Destination | None:
        """Where spans go: as the config says, else as the environment does."""
        return self.settings.tracing.destination() if self.settings.tracing else tracing_from_environment()

    def stanza(self, name: str) -> Stanza:
        """The stanza of a service, or a ConfigError that names the nearest one."""
        if name not in self.services:
            raise ConfigError(f"{self.files[0].name}: no service named {name!r}{did_you_mean(name, self.services)}")
        return self.services[name]

    @property
    def others(self) -> dict[str, str | None]:
        """The services of somebody else, and what the variable that their stanza names says: the bearer token they want."""
        foreign = [stanza for stanza in self.services.values() if stanza.app is None]
        return {each.name: os.environ.get(each.token_env) if each.token_env else None for each in foreign}

    def only(self, names: Iterable[str]) -> Config:
        """The config with just these services, those that their options name, theirs, and so on.

        Raises:
            ConfigError: there is no service of such a name.
        """
        wanted, found = [self.stanza(name).name for name in names], set[str]()
        while wanted:
            name = wanted.pop()
            found.add(name)
            named = [value for value in self.services[name].options.values() if isinstance(value, str)]
            wanted += [value for value in named if value in self.services and value not in found]
        services = {name: stanza for name, stanza in self.services.items() if name in found}
        return self.model_copy(update={"services": services})


def load_config(paths: Sequence[Path], overrides: Sequence[str] = ()) -> Config:
    """Read the global config. Files win over earlier files, then `key=value` overrides from left to right."""
    tree = load_tree(paths, overrides)
    written = {key.partition(".")[0] for key, line in tree.lines.items() if line != COMMAND_LINE} | {SETTINGS_KEY}
    for key in tree.values:
        if (
            key not in written and key not in tree.lines
        ):  # only an override names it: more likely a typo than a whole service
            raise ConfigError(f"{COMMAND_LINE}: no service named {key!r}{did_you_mean(key, written)}")
    settings = parse(Settings, subtree(tree, SETTINGS_KEY))
    if settings.tls is not None:
        settings = settings.model_copy(update={"tls": _checked(settings.tls.within(tree.root), tree)})
    if settings.tracing is not None:
        _check_tracing(settings.tracing, tree)
    services = {name: _stanza(name, tree) for name in tree.values if name != SETTINGS_KEY}
    if not services:
        raise ConfigError(
            f"{paths[0]}: no services; add a stanza such as `policy: {{kind: model, app: models/scripted}}`"
        )
    _check_ports(services, settings.head.port)
    return Config(services=services, settings=settings, root=tree.root, files=tuple(paths))


def tracing_from_environment() -> Destination | None:
    """Where the standard's variable says that spans go; None without it, and where OpenTelemetry's SDK is not installed."""
    endpoint = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    return Destination(endpoint) if endpoint and _has_otel() else None


def tracing_of(shown: Mapping[str, Any]) -> Destination | None:
    """Where the spans of a run go whose head shows this config; else where the environment says."""
    told = (shown.get(SETTINGS_KEY) or {}).get("tracing")
    return TracingSettings(**told).destination() if told and _has_otel() else tracing_from_environment()


def _has_otel() -> bool:
    try:
        return all(find_spec(name) for name in OTEL)
    except ModuleNotFoundError:
        return False


def _check_ports(services: dict[str, Stanza], head: int) -> None:
    """Those that we start share an address; two of them cannot share a port."""
    taken = {head: "the head"} if head else {}
    for stanza in services.values():
        if stanza.port is None or stanza.external:
            continue
        if stanza.port in taken:
            where = stanza.key_where["port"]
            raise ConfigError(f"{where}: port {stanza.port} is that of {taken[stanza.port]}; take another, or none")
        taken[stanza.port] = f"service {stanza.name!r}"


def _checked(tls: TlsSettings, tree: Tree) -> TlsSettings:
    try:
        check_pair(tls.certificate, tls.key)
        if tls.ca is not None:
            trust(tls.ca)
            client_context()
    except UsageError as error:
        raise ConfigError(f"{tree.where(f'{SETTINGS_KEY}.tls')}: {error}") from None
    return tls


def _check_tracing(tracing: TracingSettings, tree: Tree) -> None:
    where = tree.where(f"{SETTINGS_KEY}.tracing")
    if problem := wrong_url(tracing.endpoint):
        raise ConfigError(f"{where}: {problem}")
    if not _has_otel():
        raise ConfigError(
            f"{where}: traces need OpenTelemetry's packages: install the extra ngym[otel], or take it out"
        )


def _stanza(name: str, tree: Tree) -> Stanza:
    part = subtree(tree, name)
    if not isinstance(part.values, dict) or not part.values:
        raise ConfigError(f"{tree.where(name)}: {name!r} is no service: write `{name}: {{kind: ..., app: ...}}`")
    if not name.replace("_", "").replace("-", "").isalnum():
        raise ConfigError(f"{tree.where(name)}: {name!r} is no service name; use letters, digits, '_' and '-'")
    own = {"kind", "app", "url", "urls", "replicas", "port", "requirements", "token_env"}
    options = {key: value for key, value in part.values.items() if key not in own}
    fields = {key: value for key, value in part.values.items() if key in own}
    if "kind" not in fields:
        hint = next((f" (is {key!r} a misspelt 'kind'?)" for key in options if nearest(key, ["kind"])), "")
        raise ConfigError(f"{tree.where(name)}: service {name!r} has no kind{hint}; kinds: {', '.join(KINDS)}")
    if fields["kind"] not in KINDS:
        raise ConfigError(
            f"{part.where('kind')}: {fields['kind']!r} is no kind of service{did_you_mean(str(fields['kind']), KINDS)}"
        )
    stanza = parse(Stanza, Tree({**fields, "name": name}, part.lines, part.root, part.default_where, part.environment))
    _check_stanza(stanza, part, tree.root)
    return stanza.model_copy(update={"options": options, "where": tree.where(name), "key_where": dict(part.lines)})


def _check_stanza(stanza: Stanza, part: Tree, root: Path) -> None:
    if stanza.url and stanza.urls:
        raise ConfigError(f"{part.where('urls')}: service {stanza.name!r} has both url and urls; keep one")
    for url in stanza.external_urls:
        if problem := wrong_url(url):
            raise ConfigError(f"{part.where('url' if stanza.url else 'urls')}: {problem}")
    if stanza.token_env is not None:
        _check_token_env(stanza, part)
    if not stanza.app and not stanza.external:
        raise ConfigError(
            f"{part.default_where}: service {stanza.name!r} needs an app (a path such as gym_servers/math) or a url"
        )
    if stanza.app:
        app_file(stanza.app, root, part.where("app"))
    if stanza.requirements is not None:
        if not stanza.app:
            raise ConfigError(f"{part.where('requirements')}: service {stanza.name!r} runs elsewhere; leave it out")
        shipped_file(stanza.requirements, root, part.where("requirements"))


def _check_token_env(stanza: Stanza, part: Tree) -> None:
    where = part.where("token_env")
    if stanza.app:
        raise ConfigError(f"{where}: {stanza.name!r} is one of ours and wants the run's own token; leave token_env out")
    if not os.environ.get(stanza.token_env or ""):
        raise ConfigError(
            f"{where}: the environment has no {stanza.token_env!r}; it holds the bearer token that {stanza.name!r} wants"
        )
