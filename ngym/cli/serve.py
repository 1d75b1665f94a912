"""`ng_serve`: runs one service of the config in this process, as a container does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click

from ngym.cli.shell.completion_names import services
from ngym.cli.shell.main import command, config_options
from ngym.errors import ConfigError, UsageError
from ngym.net.addresses import WILDCARDS, has_loopback, is_own, route_to, with_host
from ngym.net.auth import ADMIN_TOKEN, RUN_TOKEN, is_loopback, token_from, wrong_url
from ngym.supervise.head_file import find_running

if TYPE_CHECKING:
    from ngym.config.service_config import Config, Stanza
    from ngym.schema import Json
    from ngym.services.base.joining import Joining

HEAD_TIMEOUT_S = 5.0
EXIT_CODES = """\
Exit codes: 0  stopped by Ctrl-C or SIGTERM
            1  the service could not start
            2  the command, the config or the service's options are wrong; the line says where"""


@command("ng_serve", epilog=EXIT_CODES)
@click.argument("name", shell_complete=services())
@config_options
@click.option(
    "--host",
    metavar="ADDRESS",
    help="The address to listen at; 0.0.0.0 in a container.  [default: ngym.host of the config]",
)
@click.option(
    "--port", type=click.IntRange(0, 65535), metavar="N",
    help="The port to listen at; 0: a free one.  [default: that of the stanza's port, or of its url of this machine, "
    "else a free one]",
)  # fmt: skip
@click.option("--join", metavar="URL", help="Add this process to the run of this head, as a further replica of NAME.")
@click.option(
    "--differs", multiple=True, metavar="KEY",
    help="With --join: an option of the stanza that may be another one than in the run, such as the model's path.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Show what would be started, and where; start nothing.")
@click.option(
    "--json", "as_json", is_flag=True,
    help="One JSON object: the address of the service; with --dry-run, what would be started.",
)  # fmt: skip
def main(
    name: str,
    configs: tuple[Path, ...],
    overrides: tuple[str, ...],
    host: str | None,
    port: int | None,
    join: str | None,
    differs: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Run the service NAME of the config in this process, and nothing else.

    It finds the other services at the `url` of their stanza, or through ng_run if that runs in the same folder. With
    --join it becomes a replica of a run on another machine: callers use it while it is ready.

    \b
    Examples: ng_serve math
              ng_serve policy --host 0.0.0.0 --port 8000 policy.model=Qwen/Qwen3-0.6B
              ng_serve math --join http://10.0.0.1:11000 --host 10.0.0.2
    """
    from ngym.cli.run import show_service
    from ngym.config.service_config import common_options, load_config
    from ngym.supervise.service import listen, url_of
    from ngym.supervise.service_main import ServiceJob, perform
    from ngym.supervise.supervisor import service_spec
    from ngym.supervise.venvs import find_uv, make, venv_of

    if differs and join is None:
        raise UsageError("--differs needs --join URL: it names options that may differ from those of that run")
    config = load_config(configs, overrides)
    stanza = config.stanza(name)
    if stanza.app is None:
        raise ConfigError(f"{stanza.where}: {name!r} has no app, only a url: it is an external service")
    if stanza.nodes > 1:
        where = stanza.key_where.get("nodes", stanza.where)
        raise ConfigError(
            f"{where}: nodes: ng_serve starts one process; a replica on {stanza.nodes} machines needs ng_run"
        )
    requested_port = _port_here(stanza) if port is None else port
    address = host or config.settings.host
    token = _token(config, address)
    if dry_run:
        show_service(config, stanza, stanza.app, address, requested_port, as_json)
        return
    if join is not None and (problem := wrong_url(join)):
        raise UsageError(f"--join {problem}")
    sock = listen(address, requested_port, f"service {name!r}", "stop that program or give another --port")
    url = url_of(sock, config.settings.tls is not None)
    joining = None
    if join is not None:
        from ngym.services.base.joining import Joining

        url = _reachable(url, address, join)
        token_of_admin, options = _admin_token(config, join), common_options(stanza)
        joining = Joining(join.rstrip("/"), token_of_admin, name, stanza.kind, stanza.app, options, differs, url)
    head_url, urls = asyncio.run(_addresses(config, stanza, joining, token))
    if joining is not None:
        asyncio.run(_join(joining))
    _warn_of_addresses(stanza, None if address in WILDCARDS else url, urls)
    known = {**urls, name: urls[name] or [url]}
    spec = service_spec(config, stanza, known, head_url, admin_token=token_from(ADMIN_TOKEN), run_token=token)
    spec["joining"] = joining
    if as_json:
        click.echo(json.dumps({"name": name, "url": url}))
        sys.stdout.flush()
    else:
        click.echo(f"{name} listens at {url}", err=True)

    request = {"action": "serve", "spec": spec}
    if venv := venv_of(config, stanza):
        request["python"] = str(asyncio.run(make(venv, lambda text: click.echo(text, err=True), find_uv())))
    perform(ServiceJob(request, [sock]))


def _port_here(stanza: Stanza) -> int:
    """The port at which others call this process: that of the stanza's port or url; 0: any.

    UsageError if its urls have several ports, and not exactly one of them is of this machine.
    """
    if stanza.port is not None or not stanza.external:
        return stanza.port or 0
    urls = stanza.external_urls
    if len({urlsplit(url).port for url in urls}) > 1:
        urls = list(filter(is_own, urls))
    if len(ports := {urlsplit(url).port for url in urls}) == 1:
        return ports.pop() or 0
    where, number = stanza.key_where.get("urls", stanza.where), len(ports) or "none"
    raise UsageError(
        f"{where}: {number} of the addresses of {stanza.name!r} ({', '.join(stanza.external_urls)}) belong to this "
        "machine, so its port is not known: give --port"
    )


def _token(config: Config, address: str) -> str | None:
    """The run's token: NGYM_TOKEN, else that of the ng_run in this folder; UsageError if one is needed but missing."""
    running = find_running(config.root)
    token = token_from(RUN_TOKEN) or (running.run_token if running else None)
    if token is None and (config.settings.require_token or not is_loopback(address)):
        raise UsageError(
            f"{RUN_TOKEN} is not set, and other machines can reach {address}: set it to the same value, such as "
            "the output of `openssl rand -hex 32`, for every service of the run and for their clients"
        )
    return token


def _admin_token(config: Config, head_url: str) -> str:
    """NGYM_ADMIN_TOKEN, else that of the ng_run in this folder, if it is the one to join."""
    running = find_running(config.root)
    own = running.admin_token if running and running.url == head_url.rstrip("/") else None
    if (token := token_from(ADMIN_TOKEN) or own) is None:
        raise UsageError(f"--join {head_url}: {ADMIN_TOKEN} is not set: give it the value that ng_run was started with")
    return token


def _reachable(url: str, address: str, head_url: str) -> str:
    """The URL at which the machine of a head reaches this process, which listens at `address`.

    UsageError if it cannot.
    """
    try:
        route = route_to(head_url)
    except OSError as error:
        raise UsageError(f"--join {head_url}: {error.strerror or error}") from None
    if route.is_local:
        return url
    if address in WILDCARDS:
        return with_host(url, route.own)
    if has_loopback(url):
        named = "" if is_loopback(address) else f" ({address} is that here)"
        raise UsageError(
            f"--join {head_url}: that is another machine, which cannot call {url}{named}: give the address of this "
            f"machine, --host {route.own}"
        )
    return url


def _warn_of_addresses(stanza: Stanza, url: str | None, urls: dict[str, list[str]]) -> None:
    """Warn of services that cannot be called. url: that of this one; None: all of its machine's addresses."""
    if stanza.external and url and has_loopback(url) and not any(map(has_loopback, stanza.external_urls)):
        where = stanza.key_where.get("url", stanza.key_where.get("urls", stanza.where))
        click.echo(
            f"{where}: others call {stanza.name!r} at {', '.join(stanza.external_urls)}, and it listens at {url}, for "
            "this machine only: give --host, such as 0.0.0.0",
            err=True,
        )
    for key, value in stanza.options.items():
        if isinstance(value, str) and urls.get(value) == []:
            where = stanza.key_where.get(key, stanza.where)
            click.echo(
                f"{where}: the address of {value!r} is unknown: give its stanza a url, or start ng_run here", err=True
            )


async def _join(joining: Joining) -> None:
    """Announce this replica to the head, which waits for its readiness. UsageError if the head does not take it."""
    from ngym.services.base.joining import announce

    try:
        await announce(joining)
    except OSError as error:
        raise _no_head(joining.head_url, error) from None


def _no_head(url: str, error: Exception) -> UsageError:
    """The error of a head that does not answer."""
    reason = f"no answer within {HEAD_TIMEOUT_S:.0f} s" if isinstance(error, TimeoutError) else str(error)
    hint = ""
    if isinstance(error, ConnectionRefusedError):
        hint = "; its address is ngym.head.host, by default one that only its own machine can call"
    return UsageError(f"--join {url}: no head of ng_run answers there ({reason}){hint}")


async def _addresses(
    config: Config, stanza: Stanza, joining: Joining | None, token: str | None
) -> tuple[str | None, dict[str, list[str]]]:
    """The URL of the head to join, or that runs in this folder, if any, and the known addresses of each service.

    UsageError if the services that the stanza names cannot be called from here.
    """
    urls = {each.name: each.external_urls for each in config.services.values()}
    running = find_running(config.root)
    if joining is None:
        if running is None:
            return None, urls
        with contextlib.suppress(OSError, ValueError):  # the run has just ended
            _add(await _servers(running.url, token), urls)
        return running.url, urls
    try:
        _add(await _servers(joining.head_url, token), urls)
    except (OSError, ValueError) as error:
        raise _no_head(joining.head_url, error) from None
    if not route_to(joining.head_url).is_local:
        for key, value in stanza.options.items():
            if isinstance(value, str) and any(map(has_loopback, urls.get(value, ()))):
                raise UsageError(
                    f"--join {joining.head_url}: {key} {value!r} listens at {', '.join(urls[value])} of that machine, "
                    "which only that machine can call: set ngym.host there"
                )
    return joining.head_url, urls


async def _servers(head_url: str, token: str | None) -> list[Json]:
    """The head's records of its services. OSError or ValueError without an answer of a head; UsageError for a wrong token."""
    from ngym.peers import servers_in
    from ngym.supervise.head_file import http_get

    reply = await http_get(f"{head_url}/servers", HEAD_TIMEOUT_S, token)
    if reply.status == 401:
        raise UsageError(f"{head_url}: {RUN_TOKEN} is not the token of the run there")
    return servers_in(reply.body)


def _add(servers: list[Json], urls: dict[str, list[str]]) -> None:
    """Add the addresses of services that have none in the config."""
    for server in servers:
        urls[server["name"]] = urls.get(server["name"]) or server.get("urls") or [server["url"]]
