"""The head of a run: addresses, resolved config, NeMo Gym's views, and a page for a browser."""

from __future__ import annotations

import asyncio
import json
import re
from base64 import b64encode
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote, urlsplit

import yaml
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from ngym.config.service_config import Config, Stanza, common_options, redacted_config
from ngym.errors import ConfigError, ServiceError, UsageError
from ngym.net.addresses import WILDCARDS, with_host
from ngym.net.api_docs import api_docs_routes
from ngym.net.auth import (
    ADMIN_TOKEN,
    LocalOnlyMiddleware,
    OriginCheck,
    TokenAuth,
    TokenAuthMiddleware,
    hosts_of,
    is_loopback,
    wrong_url,
)
from ngym.net.connection_limits import Server, server_config
from ngym.runtime.event_loop import log_error
from ngym.schema import Kind
from ngym.supervise import metrics_scraper
from ngym.supervise.head_file import http_get
from ngym.supervise.metrics_scraper import resident_bytes
from ngym.supervise.service import ReplicaState, called_urls, listen, url_of
from ngym.telemetry.log_format import redact

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

TYPES: dict[Kind, str] = {
    "gym_server": "resources_servers",
    "agent": "responses_api_agents",
    "model": "responses_api_models",
}
# An agent's option -> its name in NeMo Gym, and the kind of the referenced service.
REFERENCES: dict[str, tuple[str, Kind]] = {
    "gym": ("resources_server", "gym_server"),
    "model": ("model_server", "model"),
}
RUNNING_TIMEOUT_S = 5.0
MAX_BODY = 64 << 10
TITLE = "the head of a run"
# From good to bad: a service with replicas has the state of its worst replica.
SEVERITY = ("ready", "stopped", "starting", "not ready", "restarting", "failed")
PAGE = (Path(__file__).parent / "head_page.html").read_text(encoding="utf-8")


def _digest(tag: str) -> str:
    """The source expression of a content security policy for what is in this element of the page."""
    text = PAGE.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


PAGE_HEADERS = {
    "content-security-policy": f"default-src 'none'; script-src {_digest('script')}; style-src {_digest('style')}; "
    "connect-src 'self'; base-uri 'none'; frame-ancestors 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


def global_config_dict_yaml(config: Config, urls: Mapping[str, Sequence[str]], head_url: str) -> str:
    """The body of NeMo Gym's GET /global_config_dict_yaml: a JSON string that holds YAML.

    That format has one address per service: the first replica's.
    """
    head = urlsplit(head_url)
    tree: dict[str, Any] = {"head_server": {"host": head.hostname, "port": head.port}}
    for stanza in config.services.values():
        implementation = Path(stanza.app).stem if stanza.app else stanza.name
        tree[stanza.name] = {TYPES[stanza.kind]: {implementation: _nemo_server(stanza, urls[stanza.name][0])}}
    for stanza in config.services.values():
        if stanza.kind == "agent":
            tree.setdefault(f"{stanza.name}_environment_server", _relay(stanza.name, urls[stanza.name][0]))
    return json.dumps(yaml.safe_dump(tree, sort_keys=False))


def server_instances(states: Sequence[ReplicaState], uptime_seconds: Mapping[str, float]) -> list[dict[str, Any]]:
    """The body of NeMo Gym's GET /server_instances; one entry per process."""
    return [_instance(state, uptime_seconds[state.label]) for state in states]


def _nemo_server(stanza: Stanza, url: str) -> dict[str, Any]:
    server = {**_address(url), **redact(stanza.options)}
    if stanza.kind == "gym_server":
        server.setdefault("domain", "other")
    if stanza.kind == "agent":
        for option, (reference, kind) in REFERENCES.items():
            if option in stanza.options:
                server[reference] = {"type": TYPES[kind], "name": stanza.options[option]}
    return server


def _relay(agent: str, url: str) -> dict[str, Any]:
    """The environment server of an agent, through which NeMo Gym's collector reaches it since version 0.7.

    Theirs passes `/run` and `/aggregate_metrics` on to the agent unchanged, so the agent itself can take its place.
    """
    reference = {"type": TYPES["agent"], "name": agent}
    return {"environment_servers": {"legacy_agent": {**_address(url), "agent_server": reference}}}


def _address(url: str) -> dict[str, Any]:
    address = urlsplit(url)
    port = address.port or (443 if address.scheme == "https" else 80)
    return {"host": address.hostname, "port": port, "entrypoint": "app.py"}


def _instance(state: ReplicaState, uptime_seconds: float) -> dict[str, Any]:
    address = urlsplit(state.url)
    return {
        "name": Path(state.app).stem if state.app else state.name,
        "process_name": state.name,
        "config_path": state.name,
        "dir_path": state.app,
        "entrypoint": "app.py",
        "server_type": TYPES[state.kind],
        "host": address.hostname,
        "port": address.port,
        "url": state.url,
        "pid": state.pid,
        "status": "success" if state.status == "ready" else "connection_error",
        "start_time": state.started_at.timestamp() if state.started_at else None,
        "uptime_seconds": uptime_seconds,
    }


class SupervisedRun(Protocol):
    """A run, as the head shows and changes it; `Supervisor` is one."""

    config: Config
    urls: dict[str, list[str]]
    admin_token: str
    run_token: str | None

    @property
    def head_url(self) -> str: ...

    @property
    def states(self) -> list[ReplicaState]: ...

    def log_tail(self, label: str) -> tuple[Path, list[str]] | None: ...

    def join(self, name: str, url: str) -> ReplicaState: ...

    def record_proof(self, name: str, version: int, proved: Collection[str]) -> list[str]: ...


class Head:
    """Serves the supervisor's state. Binds its socket at once; if the default port is taken, it uses a free one."""

    def __init__(self, supervisor: SupervisedRun) -> None:
        settings = supervisor.config.settings.head
        remedy = "stop that program or set ngym.head.port to another one (0: any free port)"
        try:
            self._socket = listen(settings.host, settings.port, "the head", remedy)
        except UsageError:
            if "port" in settings.model_fields_set:
                raise
            self._socket = listen(settings.host, 0, "the head", remedy)
        tls = supervisor.config.settings.tls
        self.url = url_of(self._socket, tls is not None)
        app: ASGIApp = _app(supervisor)
        if supervisor.run_token:
            app = _with_page(
                TokenAuthMiddleware(app, TokenAuth([supervisor.run_token, supervisor.admin_token]), "the head")
            )
        else:
            urls = chain([self.url], *(stanza.external_urls for stanza in supervisor.config.services.values()))
            app = LocalOnlyMiddleware(_with_page(app), OriginCheck(hosts_of(urls)), "the head")
        files = {"ssl_certfile": tls.certificate, "ssl_keyfile": tls.key} if tls else {}
        self._server = Server(server_config(app, lifespan="off", log_config=None, **files))
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="the head's server")
        self._task.add_done_callback(log_error)

    async def close(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        if self._task:
            await self._task
        self._socket.close()


def _with_page(app: ASGIApp) -> ASGIApp:
    """The application, with the page for browsers at /. The page holds no data: it brings the token of a locked run."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        accept = dict(scope["headers"]).get(b"accept", b"") if scope["type"] == "http" else b""
        if b"text/html" in accept and (scope["method"], scope["path"]) == ("GET", "/"):
            await HTMLResponse(PAGE, headers=PAGE_HEADERS)(scope, receive, send)
        else:
            await app(scope, receive, send)

    return answer


def servers(states: list[ReplicaState]) -> list[dict[str, Any]]:
    """One record per service, for GET /servers (reference/wire.md)."""
    by_name: dict[str, list[ReplicaState]] = {}
    for state in states:
        by_name.setdefault(state.name, []).append(state)
    sizes = resident_bytes([state.pid for state in states if state.pid and not state.node])
    return [_server(replicas, sizes) for replicas in by_name.values()]


def _server(replicas: list[ReplicaState], sizes: Mapping[int, int]) -> dict[str, Any]:
    worst = max(replicas, key=lambda state: SEVERITY.index(state.status))
    urls = called_urls(replicas)
    address: dict[str, Any] = {"url": urls[0]} if len(replicas) == 1 else {"urls": urls}
    if any(state.node for state in replicas):
        address["nodes"] = [state.node for state in replicas]
    if any(state.held or state.version is not None for state in replicas):
        address["versions"] = [state.version for state in replicas]
    started = min((state.started_at for state in replicas if state.started_at), default=None)
    return {
        "name": worst.name,
        "kind": worst.kind,
        "app": worst.app,
        **address,
        "pid": replicas[0].pid,
        "pids": [state.pid for state in replicas],
        "status": worst.status,
        "detail": _detail(worst) or _waiting(replicas),
        "external": worst.external,
        "started_at": started.isoformat() if started else None,
        "uptime_seconds": uptime_seconds(started),
        "restarts": sum(state.restarts for state in replicas),
        "memory_bytes": sum(sizes.get(state.pid or 0, 0) for state in replicas if not state.node) or None,
    }


def _detail(worst: ReplicaState) -> str:
    """The reason why it is not ready; of one of several replicas with its label."""
    return f"{worst.label}: {worst.detail}" if worst.detail and worst.label != worst.name else worst.detail


def _waiting(replicas: list[ReplicaState]) -> str:
    labels = [state.label for state in replicas if state.held]
    return f"{', '.join(labels)} without calls until the trainer has pushed its weights there" if labels else ""


def uptime_seconds(started: datetime | None) -> float:
    return round((datetime.now(UTC) - started).total_seconds(), 1) if started else 0.0


def _app(supervisor: SupervisedRun) -> Starlette:
    config = supervisor.config

    snapshots = metrics_scraper.MetricsSnapshots(supervisor.run_token)
    admin = TokenAuth([supervisor.admin_token])

    def _check_admin(request: Request, what: str) -> None:
        if not admin.accepts(request.scope["headers"]):
            raise HTTPException(403, f"{what} needs its admin token ({ADMIN_TOKEN})")

    async def root(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def show_status(request: Request) -> Response:
        records = servers(supervisor.states)
        measured = await snapshots.now(records)
        records_with_metrics = [{**record, "metrics": measured.get(record["name"])} for record in records]
        for record in records_with_metrics:
            record["labels"] = [state.label for state in supervisor.states if state.name == record["name"]]
        running = await metrics_scraper.running(records, supervisor.run_token)
        return JSONResponse({"head": supervisor.head_url, "servers": records_with_metrics, "running": running})

    async def show_log(request: Request) -> Response:
        tail = supervisor.log_tail(label := request.path_params["label"])
        if tail is None:
            raise HTTPException(404, f"no process of this run is called {label!r:.80}")
        return JSONResponse({"label": label, "path": str(tail[0]), "lines": tail[1]})

    async def show_running(request: Request) -> Response:
        agent, rollout_id = request.path_params["agent"], quote(request.path_params["rollout_id"], safe="")
        for url in [state.url for state in supervisor.states if state.name == agent and state.app]:
            reply = await http_get(f"{url.rstrip('/')}/running/{rollout_id}", RUNNING_TIMEOUT_S, supervisor.run_token)
            if reply.status == 200:
                return Response(reply.body, media_type="application/json")
        raise HTTPException(404, "this rollout has ended")

    async def list_servers(request: Request) -> Response:
        return JSONResponse(servers(_reachable_states(supervisor, request)))

    async def addresses(request: Request) -> Response:
        return JSONResponse(_reachable_urls(supervisor, request))

    async def join(request: Request) -> Response:
        # a policy that joins gets weights, and the token that changes them
        _check_admin(request, "joining a run")
        match await _body(request):
            case {"name": str(name), "url": str(url), **stanza} if not wrong_url(url):
                pass
            case _:
                raise HTTPException(422, 'send {"name": a service of the config, "url": "http://host:port"}')
        try:
            _check_stanza(config.stanza(name), stanza)
            state = supervisor.join(name, url.rstrip("/"))
        except ConfigError as error:
            raise HTTPException(404, str(error)) from None
        shown = {"label": state.label, "status": state.status, "detail": state.detail}
        return JSONResponse({"name": name, "url": state.url, **shown}, 202)

    async def trained(request: Request) -> Response:
        _check_admin(request, "training a policy")
        match await _body(request):
            case {"version": int(version), "urls": list(urls)}:
                pass
            case _:
                raise HTTPException(422, 'send {"version": the policy version, "urls": [where it was proved]}')
        shown = {state.label: state.url for state in _reachable_states(supervisor, request)}
        ours = {shown[state.label]: state.url for state in supervisor.states}
        try:
            proved = [ours.get(url, url) for url in map(str, urls)]
            waiting = supervisor.record_proof(request.path_params["name"], version, proved)
        except ConfigError as error:
            raise HTTPException(404, str(error)) from None
        return JSONResponse({"waiting": [url for url, own in ours.items() if own in waiting]})

    async def show_config(request: Request) -> Response:
        return JSONResponse(redacted_config(config))

    async def nemo_config(request: Request) -> Response:
        text = global_config_dict_yaml(config, _reachable_urls(supervisor, request), supervisor.head_url)
        return PlainTextResponse(text, media_type="application/json")

    async def nemo_instances(request: Request) -> Response:
        uptimes = {state.label: uptime_seconds(state.started_at) for state in supervisor.states}
        return JSONResponse(server_instances(supervisor.states, uptimes))

    async def metrics(request: Request) -> Response:
        return Response(metrics_scraper.exposition(supervisor.states), media_type=CONTENT_TYPE_LATEST)

    async def targets(request: Request) -> Response:
        return JSONResponse(metrics_scraper.targets(supervisor.states, supervisor.head_url))

    async def openapi(request: Request) -> Response:
        return JSONResponse(_document(supervisor.run_token is not None))

    routes = {
        "/": root,
        "/openapi.json": openapi,
        "/health": root,
        "/servers": list_servers,
        "/status": show_status,
        "/logs/{label}": show_log,
        "/running/{agent}/{rollout_id}": show_running,
        "/addresses": addresses,
        "/metrics": metrics,
        "/prometheus/targets": targets,
        "/config": show_config,
        "/global_config_dict_yaml": nemo_config,
        "/server_instances": nemo_instances,
    }
    served = [Route(path, endpoint, methods=["GET"]) for path, endpoint in routes.items()]
    served += api_docs_routes(lambda: TITLE)
    served.append(Route("/servers", join, methods=["POST"]))
    served.append(Route("/servers/{name}/weights", trained, methods=["PUT"]))
    app = Starlette(routes=served, exception_handlers={HTTPException: _problem})
    app.router.redirect_slashes = False
    return app


def _reachable_states(supervisor: SupervisedRun, request: Request) -> list[ReplicaState]:
    """The states with addresses that the caller can use.

    Services that listen at every address of this machine are known here by its loopback. A caller from another machine
    reaches them as it reaches the head.
    """
    states, host = supervisor.states, urlsplit(f"//{request.headers.get('host', '')}").hostname
    if supervisor.config.settings.host not in WILDCARDS or not host or is_loopback(host):
        return states
    return [
        state if state.external or state.node else replace(state, url=with_host(state.url, host)) for state in states
    ]


def _reachable_urls(supervisor: SupervisedRun, request: Request) -> dict[str, list[str]]:
    states = _reachable_states(supervisor, request)
    return {name: called_urls([state for state in states if state.name == name]) for name in supervisor.urls}


def _check_stanza(ours: Stanza, theirs: Mapping[Any, Any]) -> None:
    """Refuse a replica with another kind or app, or with options that may change answers.

    theirs: its kind, app and options, if it names them; `differs`: options that may be other ones.
    """
    for key, value in (("kind", ours.kind), ("app", ours.app)):
        if (other := theirs.get(key, value)) != value:
            detail = f"{ours.name!r} has {key} {value} in this run's config, and {other} in that of the replica"
            raise HTTPException(409, f"{detail}: both machines need the same stanza")
    match theirs:
        case {"options": dict(options), "differs": list(differs)}:
            mine = common_options(ours)
        case _:
            return
    for key in sorted((mine.keys() | options.keys()) - set(map(str, differs))):
        if mine.get(key) != options.get(key):
            detail = f"{mine.get(key, 'none')} in this run's config, and {options.get(key, 'none')!s:.100}"
            raise HTTPException(
                409,
                f"{ours.name!r} has {key} {detail} in that of the replica, whose answers may differ: make them "
                f"equal, or start it with --differs {key}",
            )


_OBJECT: dict[str, Any] = {"type": "object"}
_OBJECTS: dict[str, Any] = {"type": "array", "items": _OBJECT}
# Path -> its summary, the media type and the schema of its answer.
_ANSWERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "/": ("Liveness; for a browser, the page of the run", "application/json", _OBJECT),
    "/health": ("Liveness", "application/json", _OBJECT),
    "/servers": ("All services: address, state, processes", "application/json", _OBJECTS),
    "/status": (
        "All services with their rates, latencies and errors, and the rollouts that run",
        "application/json",
        _OBJECT,
    ),
    "/logs/{label}": ("The last lines of a process's log", "application/json", _OBJECT),
    "/running/{agent}/{rollout_id}": ("A rollout that runs, as a row", "application/json", _OBJECT),
    "/addresses": ("Service name -> URLs of the replicas that take calls", "application/json", _OBJECT),
    "/metrics": ("Prometheus metrics of all services", "text/plain", {"type": "string"}),
    "/prometheus/targets": ("Targets for Prometheus' HTTP discovery", "application/json", _OBJECTS),
    "/config": ("The resolved config, without secrets", "application/json", _OBJECT),
    "/global_config_dict_yaml": ("The config as NeMo Gym's tools read it", "application/json", {"type": "string"}),
    "/server_instances": ("The processes as NeMo Gym's tools read them", "application/json", _OBJECTS),
}


def _document(is_locked: bool) -> dict[str, Any]:
    """The OpenAPI document of the head."""
    paths: dict[str, dict[str, Any]] = {
        path: {
            "get": {
                "summary": summary,
                "parameters": [
                    {"in": "path", "name": name, "required": True, "schema": {"type": "string"}}
                    for name in re.findall(r"{(\w+)}", path)
                ],
                "responses": {"200": {"description": "OK", "content": {media_type: {"schema": schema}}}},
            }
        }
        for path, (summary, media_type, schema) in _ANSWERS.items()
    }
    properties: dict[str, Any] = {name: {"type": "string"} for name in ("name", "url", "kind", "app")}
    properties |= {"options": _OBJECT, "differs": {"type": "array", "items": {"type": "string"}}}
    replica = {"type": "object", "properties": properties, "required": ["name", "url"]}
    paths["/servers"]["post"] = {
        "summary": "Add a replica that runs elsewhere (`ng_serve --join`); needs the admin token",
        "requestBody": {"required": True, "content": {"application/json": {"schema": replica}}},
        "responses": {"202": {"description": "Accepted", "content": {"application/json": {"schema": _OBJECT}}}},
    }
    proved = {"version": {"type": "integer"}, "urls": {"type": "array", "items": {"type": "string"}}}
    pushed = {"type": "object", "properties": proved, "required": list(proved)}
    paths["/servers/{name}/weights"] = {
        "put": {
            "summary": "A trainer has proved this policy version at these URLs; answers who waits for it. Admin token",
            "parameters": [{"in": "path", "name": "name", "required": True, "schema": {"type": "string"}}],
            "requestBody": {"required": True, "content": {"application/json": {"schema": pushed}}},
            "responses": {"200": {"description": "OK", "content": {"application/json": {"schema": _OBJECT}}}},
        }
    }
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": TITLE, "version": version("ngym")},
        "paths": paths,
    }
    if is_locked:
        document["components"] = {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}}
        document["security"] = [{"token": []}]
    return document


async def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    failure = ServiceError(f"{request.method} {request.url.path}: {error.detail}", status=error.status_code)
    return JSONResponse(failure.problem("the head"), error.status_code, error.headers, "application/problem+json")


async def _body(request: Request) -> Any:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            break
    try:
        return json.loads(body[:MAX_BODY])
    except ValueError:
        return None
