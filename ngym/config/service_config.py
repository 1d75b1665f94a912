"""Loads global_config.yaml files and `key=value` overrides into one frozen `Config`; errors name file and line."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from ngym.config.shipped_files import app_file, shipped_file
from ngym.config.yaml_tree import COMMAND_LINE, ConfigTree, load_tree, parse, subtree
from ngym.did_you_mean import did_you_mean, nearest
from ngym.errors import ConfigError, UsageError
from ngym.files.model_checkpoint import checkpoint_problem
from ngym.net.auth import wrong_url
from ngym.net.tls import check_pair, client_context, trust
from ngym.option_names import option
from ngym.schema import Kind
from ngym.telemetry.log_format import redact, secrets_in
from ngym.telemetry.tracing import Destination

SETTINGS_KEY = "ngym"
OTEL = ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
MAX_REPLICAS = 1024
MAX_NODES = 64
KINDS: tuple[str, ...] = get_args(Kind)


class HeadSettings(BaseModel):
    """The address of `ng_run`'s head server. NeMo Gym's tools use port 11000."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    host: str = Field(default="127.0.0.1", description="The address that the head binds to.")
    port: int = Field(
        default=11000, ge=0, le=65535, description="0: any free port. If the default is taken, a free port is used."
    )


class TlsSettings(BaseModel):
    """With these, every server of the run uses https. Paths are relative to the config file; all files are PEM."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    certificate: Path = Field(description="Valid for every address in a url, including 127.0.0.1 if it is one.")
    key: Path = Field(description="The certificate's private key.")
    ca: Path | None = Field(
        default=None, description="A certificate authority that services trust, in addition to the machine's."
    )

    def within(self, root: Path) -> TlsSettings:
        """The same with absolute paths."""
        return TlsSettings(**{name: root / path for name, path in self if path is not None})


class TracingSettings(BaseModel):
    """OpenTelemetry export of spans. Headers and other settings come from the standard OTEL_* variables."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    endpoint: str = Field(description="OTLP over HTTP, such as http://127.0.0.1:4318.")
    sample: float = Field(default=1.0, ge=0, le=1, description="The share of rollouts that are traced.")
    contents: bool = Field(default=False, description="Include the inputs and outputs of models and tools.")

    def destination(self) -> Destination:
        return Destination(self.endpoint, self.sample, self.contents)


class Settings(BaseModel):
    """Settings of the whole run: the `ngym:` key of the global config."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    head: HeadSettings = HeadSettings()
    host: str = Field(default="127.0.0.1", description="The address that services bind to.")
    ready_timeout_s: float = Field(default=120, gt=0, description="Startup limit of gym servers and agents.")
    model_ready_timeout_s: float = Field(default=600, gt=0, description="Startup limit of model servers.")
    max_restarts: int = Field(default=5, ge=0, description="Consecutive deaths of a service before the run fails.")
    tls: TlsSettings | None = None
    tracing: TracingSettings | None = None
    logs: Literal["text", "json"] = Field(
        default="text", description="The format of service logs: lines, or JSON objects."
    )
    require_token: bool = Field(
        default=False, description="Also require the token on loopback; other addresses always do."
    )


class Resources(BaseModel):
    """The resources of each process of a service. Keys that are left out are neither limited nor reserved."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    gpus: int | None = Field(default=None, ge=0, le=64, description="GPUs that only this process sees; 0: none.")
    cpus: float | None = Field(default=None, gt=0, description="Processor cores.")
    memory_gb: float | None = Field(default=None, gt=0, description="Main memory, in GiB.")


class ReplicaRange(BaseModel):
    """A number of replicas that follows the load."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    min: int = Field(default=1, ge=1, le=MAX_REPLICAS, description="Replicas at the start, and always.")
    max: int = Field(ge=1, le=MAX_REPLICAS, description="The limit of the growth.")


def _replicas(value: object) -> object:
    """One message for everything that is not a number of replicas."""
    value = int(value) if isinstance(value, str) and value.isdecimal() else value  # of an environment variable
    match value:
        case bool():
            pass
        case int() if 1 <= value <= MAX_REPLICAS:
            return value
        case "per_node" | ReplicaRange():
            return value
        case {"max": int(high), **rest} if rest.keys() <= {"min"}:
            low = rest.get("min", 1)
            if isinstance(low, int) and 1 <= low <= high <= MAX_REPLICAS:
                return value
    raise ValueError(f"Input should be a number from 1 to {MAX_REPLICAS}, per_node, or such as {{min: 1, max: 8}}")


class Stanza(BaseModel):
    """One service of the config: the keys that ngym reads, and the service's own options, which it does not check."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    kind: Kind = Field(description="The kind of service.")
    app: str | None = Field(
        default=None,
        description="The path of its Python file: first in the folder of the config, then among the shipped services.",
    )
    url: str | None = Field(default=None, description="The address of an external service, which is not started.")
    urls: tuple[str, ...] = Field(default=(), description="The addresses of an external service with several replicas.")
    replicas: Annotated[
        Annotated[int, Field(ge=1, le=MAX_REPLICAS)] | Literal["per_node"] | ReplicaRange, BeforeValidator(_replicas)
    ] = Field(
        default=1,
        description="The number of processes; a rollout's session stays with one of them. per_node: one on each node of a "
        "cluster. {min, max}: of a model, more while calls wait.",
    )
    nodes: int = Field(
        default=1,
        ge=1,
        le=MAX_NODES,
        description="Of models/vllm: the machines of each replica, for a model that is larger than one. Each machine runs "
        "one process, with these `resources`.",
    )
    resources: Resources | None = Field(default=None, description="What each process needs: gpus, cpus, memory_gb.")
    pool: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z][\w-]*$",
        description="The kind of machine, on a cluster: a custom resource of Ray's nodes. One machine is every pool.",
    )
    port: int | None = Field(default=None, ge=1, le=65535, description="A fixed port; null: a free one.")
    requirements: str | None = Field(
        default=None,
        description="A requirements.txt: the service runs in its own virtual environment with these packages.",
    )
    token_env: str | None = Field(
        default=None, description="With a `url`: the environment variable that holds its bearer token."
    )
    optional: bool = Field(
        default=False,
        description="If this service cannot be started, it is reported, and the run continues without it.",
    )
    options: dict[str, Any] = {}
    where: str = ""
    key_where: dict[str, str] = {}

    @property
    def external(self) -> bool:
        """Whether this service runs elsewhere and is not started."""
        return bool(self.url or self.urls)

    @property
    def first_replicas(self) -> int:
        """The number of processes at the start, on one node."""
        if isinstance(self.replicas, ReplicaRange):
            return self.replicas.min
        return 1 if self.replicas == "per_node" else self.replicas

    @property
    def most_replicas(self) -> int:
        """The most processes, on one node."""
        return self.replicas.max if isinstance(self.replicas, ReplicaRange) else self.first_replicas

    @property
    def external_urls(self) -> list[str]:
        return [self.url] if self.url else list(self.urls)


class Config(BaseModel):
    """The whole of global_config.yaml. left_out: the services that `only` did not select, with their kinds."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    services: dict[str, Stanza]
    left_out: dict[str, Kind] = {}
    settings: Settings
    root: Path
    files: tuple[Path, ...]

    @property
    def tracing(self) -> Destination | None:
        """The destination of spans: from the config, else from the environment."""
        return self.settings.tracing.destination() if self.settings.tracing else tracing_from_environment()

    def stanza(self, name: str) -> Stanza:
        """The stanza of a service, or a ConfigError that names the nearest one."""
        if name not in self.services:
            raise ConfigError(f"{self.files[0].name}: no service named {name!r}{did_you_mean(name, self.services)}")
        return self.services[name]

    def with_changes(self, name: str, **keys: Any) -> Config:
        """The config with these keys of a stanza changed."""
        stanza = self.stanza(name).model_copy(update=keys)
        return self.model_copy(update={"services": {**self.services, name: stanza}})

    @property
    def others(self) -> dict[str, str | None]:
        """External services and their bearer tokens, from the variable that `token_env` names."""
        external = [stanza for stanza in self.services.values() if stanza.app is None]
        return {each.name: os.environ.get(each.token_env) if each.token_env else None for each in external}

    def only(self, names: Iterable[str]) -> Config:
        """The config with only these services and, recursively, those that their options name.

        Raises:
            ConfigError: a name is not a service.
        """
        pending, selected = [self.stanza(name).name for name in names], set[str]()
        while pending:
            name = pending.pop()
            selected.add(name)
            references = [value for value in self.services[name].options.values() if isinstance(value, str)]
            pending += [value for value in references if value in self.services and value not in selected]
        services = {name: stanza for name, stanza in self.services.items() if name in selected}
        left_out = {name: stanza.kind for name, stanza in self.services.items() if name not in selected}
        return self.model_copy(update={"services": services, "left_out": self.left_out | left_out})


class ConfigMistakes(ConfigError):
    """A config has mistakes, a line for each. config: the services without one. names: those of all services."""

    def __init__(self, mistakes: Sequence[str], config: Config, names: Collection[str]) -> None:
        super().__init__("\n".join(mistakes))
        self.config = config
        self.names = names


def load_config(paths: Sequence[Path], overrides: Sequence[str] = ()) -> Config:
    """Read the global config. Files win over earlier files, then `key=value` overrides from left to right.

    Raises:
        ConfigMistakes: one line for each mistake.
        ConfigError: a file cannot be read, or has no services.
    """
    _refuse_paths(overrides)
    tree = load_tree(paths, overrides)
    written = {key.partition(".")[0] for key, line in tree.lines.items() if line != COMMAND_LINE} | {SETTINGS_KEY}
    mistakes: list[str] = []
    services: dict[str, Stanza] = {}
    settings = Settings()
    try:
        settings = _settings(tree)
    except ConfigError as error:
        mistakes.append(str(error))
    for key in tree.values:
        try:
            if key not in written and key not in tree.lines:  # only an override names it: a typo, not a whole service
                raise ConfigError(f"{COMMAND_LINE}: no service named {key!r}{did_you_mean(key, written)}")
            if key != SETTINGS_KEY:
                services[key] = _stanza(key, tree)
        except ConfigError as error:
            mistakes.append(str(error))
    if mistakes:
        right = Config(services=services, settings=settings, root=tree.root, files=tuple(paths))
        raise ConfigMistakes(mistakes, right, tree.values.keys() - {SETTINGS_KEY})
    if not services:
        raise ConfigError(
            f"{paths[0]}: no services; add a stanza such as `policy: {{kind: model, app: models/scripted}}`"
        )
    _check_ports(services, settings.head.port)
    _check_remotes(services)
    return Config(services=services, settings=settings, root=tree.root, files=tuple(paths))


def _refuse_paths(overrides: Sequence[str]) -> None:
    """NeMo Gym names its config files by `+config_paths=[a.yaml,b.yaml]`."""
    for override in overrides:
        key, _, files = override.lstrip("+").partition("=")
        if key == "config_paths":
            paths = [file.strip() for file in files.strip("[]").split(",") if file.strip()]
            raise ConfigError(f"{COMMAND_LINE}: {override!r}: write {option('config', paths or 'FILE')} instead")


def _settings(tree: ConfigTree) -> Settings:
    settings = parse(Settings, subtree(tree, SETTINGS_KEY))
    if settings.tls is not None:
        settings = settings.model_copy(update={"tls": _check_tls(settings.tls.within(tree.root), tree)})
    if settings.tracing is not None:
        where = tree.where(f"{SETTINGS_KEY}.tracing")
        if problem := wrong_url(settings.tracing.endpoint):
            raise ConfigError(f"{where}: {problem}")
        if not _has_otel():
            raise ConfigError(
                f"{where}: traces need OpenTelemetry's packages: install the extra ngym[otel], or remove this key"
            )
    return settings


# Shipped model servers whose option `model` is a folder, relative to the config file, or a hub name.
VLLM = "models/vllm"
LOADS_A_MODEL = (VLLM, "models/transformers")
REMOTE = "agents/remote"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
QUICKSTART = Path("runs/quickstart/sft/policy")


def model_problem(name: str, root: Path) -> str | None:
    """The reason why there is no model of this name, or None: a folder with a checkpoint, or what may be a hub name."""
    folder = (root / name).resolve()
    if folder.is_dir():
        return checkpoint_problem(folder)
    if HUB_NAME.fullmatch(name) and not folder.parent.is_dir():
        return None
    if Path(name) == QUICKSTART:
        return f"there is no folder {folder}; `make quickstart` makes it, or give a hub name such as Qwen/Qwen3-0.6B"
    return (
        f"there is no folder {folder}; give a folder relative to the config file, or a hub name such as Qwen/Qwen3-0.6B"
    )


def missing_models(config: Config) -> list[str]:
    """A line for each started service whose model does not exist, except those that wait for it."""
    mistakes = []
    for stanza in config.services.values():
        name = stanza.options.get("model")
        loads = not stanza.external and Path(stanza.app or "").as_posix().endswith(LOADS_A_MODEL)
        if not loads or not isinstance(name, str) or stanza.options.get("model_within_s"):
            continue
        if problem := model_problem(name, config.root):
            where = stanza.key_where.get("model", stanza.where)
            mistakes.append(f"{where}: service {stanza.name!r}: model {name!r}: {problem}")
    return mistakes


def tracing_from_environment() -> Destination | None:
    """The destination from the standard OTEL_* variables; None without them or without OpenTelemetry's SDK."""
    endpoint = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    return Destination(endpoint) if endpoint and _has_otel() else None


def tracing_of(shown: Mapping[str, Any]) -> Destination | None:
    """The destination of spans in the config that a head shows; else that of the environment."""
    tracing = (shown.get(SETTINGS_KEY) or {}).get("tracing")
    return TracingSettings(**tracing).destination() if tracing and _has_otel() else tracing_from_environment()


def _has_otel() -> bool:
    try:
        return all(find_spec(name) for name in OTEL)
    except ModuleNotFoundError:
        return False


def _check_ports(services: dict[str, Stanza], head: int) -> None:
    """Raise a ConfigError if two started processes have the same port: they share an address."""
    used = {head: "the head"} if head else {}
    for stanza in services.values():
        if stanza.port is None or stanza.external:
            continue
        if stanza.most_replicas > 1:
            where = stanza.key_where.get("port", stanza.where)
            raise ConfigError(
                f"{where}: {stanza.name!r} has {stanza.most_replicas} replicas and one port; leave `port` out"
            )
        if stanza.port in used:
            where = stanza.key_where["port"]
            raise ConfigError(
                f"{where}: port {stanza.port} is that of {used[stanza.port]}; choose another, or remove it"
            )
        used[stanza.port] = f"service {stanza.name!r}"


def _check_remotes(services: dict[str, Stanza]) -> None:
    """Raise a ConfigError if one agents/remote forwards to another: in a ring of them, none does the task."""
    remotes = {
        name
        for name, stanza in services.items()
        if not stanza.external and Path(stanza.app or "").as_posix().endswith(REMOTE)
    }
    for name in remotes:
        stanza, target = services[name], services[name].options.get("remote")
        if target in remotes:
            where = stanza.key_where.get("remote", stanza.where)
            raise ConfigError(
                f"{where}: remote: {target!r} is itself agents/remote and only forwards the task; name the service that "
                "does it"
            )


def _check_tls(tls: TlsSettings, tree: ConfigTree) -> TlsSettings:
    try:
        if tls.ca is not None:
            trust(tls.ca)
            client_context()
        check_pair(tls.certificate, tls.key)
    except UsageError as error:
        raise ConfigError(f"{tree.where(f'{SETTINGS_KEY}.tls')}: {error}") from None
    return tls


def _stanza(name: str, tree: ConfigTree) -> Stanza:
    part = subtree(tree, name)
    of_service = {key: f"{line}: {name}" if line == COMMAND_LINE else line for key, line in part.lines.items()}
    part = replace(part, lines=of_service)
    if not isinstance(part.values, dict) or not part.values:
        raise ConfigError(f"{tree.where(name)}: {name!r} is not a service: write `{name}: {{kind: ..., app: ...}}`")
    if not name.replace("_", "").replace("-", "").isalnum():
        raise ConfigError(f"{tree.where(name)}: {name!r} is not a service name; use letters, digits, '_' and '-'")
    own = Stanza.model_fields.keys() - {"name", "options", "where", "key_where"}
    options = {key: value for key, value in part.values.items() if key not in own}
    fields = {key: value for key, value in part.values.items() if key in own}
    mistakes = []
    if "kind" not in fields:
        hint = next((f" (is {key!r} a misspelled 'kind'?)" for key in options if nearest(key, ["kind"])), "")
        mistakes.append(f"{tree.where(name)}: service {name!r} has no kind{hint}; kinds: {', '.join(KINDS)}")
    elif fields["kind"] not in KINDS:
        mistakes.append(
            f"{part.where('kind')}: {fields['kind']!r} is not a service kind{did_you_mean(str(fields['kind']), KINDS)}"
        )
    fields_to_check = {**fields, "name": name, **({"kind": "model"} if mistakes else {})}  # to find the other mistakes
    try:
        stanza = parse(Stanza, ConfigTree(fields_to_check, part.lines, part.root, part.default_where, part.environment))
    except ConfigError as error:
        raise ConfigError("\n".join([*mistakes, str(error)])) from None
    if mistakes := [*mistakes, *_problems(stanza, part, tree.root)]:
        raise ConfigError("\n".join(mistakes))
    return stanza.model_copy(update={"options": options, "where": tree.where(name), "key_where": dict(part.lines)})


def _problems(stanza: Stanza, part: ConfigTree, root: Path) -> Iterator[str]:
    """A line for each mistake in the keys of a stanza that ngym reads."""
    if stanza.url and stanza.urls:
        yield f"{part.where('urls')}: service {stanza.name!r} has both url and urls; keep one"
    for url in stanza.external_urls:
        if problem := wrong_url(url):
            yield f"{part.where('url' if stanza.url else 'urls')}: {problem}"
    if stanza.token_env is not None:
        where = part.where("token_env")
        if stanza.app:
            yield f"{where}: {stanza.name!r} is started here and uses the run's token; remove token_env"
        elif not os.environ.get(stanza.token_env):
            yield f"{where}: the variable {stanza.token_env!r} is not set; it must hold the bearer token of {stanza.name!r}"
    if isinstance(stanza.replicas, ReplicaRange) and stanza.kind != "model":
        yield (
            f"{part.where('replicas')}: replicas: {{min, max}} is for models; {stanza.name!r} is of the kind "
            f"{stanza.kind}, give it a number"
        )
    if stanza.nodes > 1:
        yield from _problems_of_nodes(stanza, part)
    if not stanza.app and not stanza.external:
        yield f"{part.default_where}: service {stanza.name!r} needs an app (a path such as gym_servers/math) or a url"
    try:
        if stanza.app:
            app_file(stanza.app, root, part.where("app"))
        if stanza.requirements is not None and stanza.app:
            shipped_file(stanza.requirements, root, part.where("requirements"))
    except ConfigError as error:
        yield str(error)
    if stanza.requirements is not None and not stanza.app:
        yield f"{part.where('requirements')}: service {stanza.name!r} runs elsewhere; remove this key"


def _problems_of_nodes(stanza: Stanza, part: ConfigTree) -> Iterator[str]:
    where = f"{part.where('nodes')}: nodes"
    if stanza.external:
        yield f"{where}: {stanza.name!r} runs elsewhere; remove this key"
    elif not Path(stanza.app or "").as_posix().endswith(VLLM):
        yield f"{where}: only models/vllm runs one replica on several machines; remove it, or raise `replicas`"
    if stanza.replicas == "per_node":
        yield f"{where}: a replica on {stanza.nodes} machines cannot be one per_node; give `replicas` a number"


# Options that change no answer: they fit a process to its machine, or to the pushes of a trainer, which sets them.
OF_A_PROCESS = frozenset({
    "threads", "slots", "device", "batch", "kv_cache_mb", "max_in_flight", "max_waiting", "captured_tokens",
    "engine.gpu_memory_utilization", "engine.max_num_seqs", "engine.max_num_batched_tokens",
    "engine.tensor_parallel_size", "engine.enable_sleep_mode", "engine.weight_transfer_config",
    "model_within_s", "lora_rank", "bundle_tokens",
})  # fmt: skip
SHOWN_CHARS = 80


def common_options(stanza: Stanza) -> dict[str, str]:
    """The options in which all replicas of a service have to agree, as text without secrets; long ones as a digest.

    The keys of a mapping are options of their own, such as `engine.seed`.
    """
    texts: dict[str, str] = {}
    for key, value in redact(stanza.options).items():
        parts = {f"{key}.{name}": part for name, part in value.items()} if isinstance(value, dict) else {key: value}
        for name, part in parts.items():
            text = json.dumps(part, sort_keys=True, default=str)
            digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
            texts[name] = text if len(text) <= SHOWN_CHARS else f"{len(text)} characters ({digest})"
    return {name: text for name, text in texts.items() if name not in OF_A_PROCESS}


def redacted_config(config: Config) -> dict[str, Any]:
    """The resolved config in the form that users write, with secrets redacted."""
    tree: dict[str, Any] = {SETTINGS_KEY: config.settings.model_dump(mode="json")}
    for stanza in config.services.values():
        tree[stanza.name] = _explicit_fields(stanza) | redact(stanza.options)
    return tree


def _explicit_fields(stanza: Stanza) -> dict[str, Any]:
    hidden = {"name", "options", "where", "key_where"}
    fields = stanza.model_dump(mode="json", exclude=hidden, exclude_none=True)
    return {
        key: value for key, value in fields.items() if value and (key, value) not in (("replicas", 1), ("nodes", 1))
    }


def secrets_of(config: Config) -> Iterator[str]:
    """Everything that the run's logs must not show, except the run's own tokens."""
    for stanza in config.services.values():
        yield from secrets_in(stanza.options)
        yield os.environ.get(stanza.token_env or "", "")
