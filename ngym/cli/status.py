"""`ng_status`: shows the services of the run in this folder, their load and their errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ngym.cli.shell.main import command
from ngym.errors import NgymError, UsageError
from ngym.net.auth import RUN_TOKEN, wrong_url
from ngym.runtime.live_region import align, duration, sanitize
from ngym.supervise.head_file import find_running, token_of

if TYPE_CHECKING:
    from ngym.runtime.live_region import Screen

COLUMNS = (
    "NAME", "KIND", "STATUS", "PID", "UP", "RESTARTS", "MEMORY", "REQ/S", "P50", "P95", "IN FLIGHT", "ERRORS", "URL",
)  # fmt: skip
OF_MODELS = ("MODEL", "TOKENS IN/S", "TOKENS OUT/S", "WAITING", "POLICY VERSION")
TIMEOUT_S = 5.0
EXIT_CODES = """\
Exit codes: 0  every service is ready
            1  a service is not ready, or nothing runs here
            2  the command is wrong; the line says where"""
Server = dict[str, Any]  # a record of the head's /servers


def tables(url: str, servers: list[dict[str, Any]]) -> Iterator[str]:
    """Lines of the tables: all services, and why they are not ready; model servers; failures by class and by status."""
    ready = sum(server["status"] == "ready" for server in servers)
    yield f"{ready} of {len(servers)} services ready; {url}"
    yield from align([COLUMNS, *map(_row, servers)])
    reasons = [f"  {server['name']}: {sanitize(server['detail'])}" for server in servers if server["detail"]]
    if reasons:
        yield ""
        yield "reasons:"
        yield from reasons
    models = [server for server in servers if "waiting" in (server.get("metrics") or {})]
    if models:
        yield ""
        yield from align([OF_MODELS, *map(_of_model, models)])
    failed = [line for server in servers if (line := _failures(server))]
    if failed:
        yield ""
        yield "failed since the start, by class and by HTTP status:"
        yield from failed


def _row(server: dict[str, Any]) -> tuple[str, ...]:
    urls = server.get("urls") or [server["url"]]
    pids = ",".join(str(pid) for pid in server["pids"] if pid) or ("external" if server["external"] else "")
    up = duration(server["uptime_seconds"]) if server["started_at"] else ""
    memory = f"{server['memory_bytes'] / 2**20:.0f} MiB" if server.get("memory_bytes") else ""
    measured = server.get("metrics")
    work = ("", "", "", "", "")
    if measured:
        latencies = (_latency(measured.get("p50_s")), _latency(measured.get("p95_s")))
        errors = str(sum(measured["errors"].values()))
        work = (f"{measured['requests_per_s']:.1f}", *latencies, str(measured["in_flight"]), errors)
    known = (server["name"], server["kind"], server["status"], pids, up, str(server["restarts"]), memory)
    nodes = dict.fromkeys(filter(None, server.get("nodes", ())))
    return (*known, *work, " ".join(urls) + (f" on {', '.join(nodes)}" if nodes else ""))


def _of_model(server: dict[str, Any]) -> tuple[str, ...]:
    measured = server["metrics"]
    tokens = [f"{measured[f'{way}_tokens_per_s']:.0f}" for way in ("input", "output")]
    return (server["name"], *tokens, str(measured["waiting"]), str(measured.get("policy_version", "")))


def _failures(server: dict[str, Any]) -> str:
    measured = server.get("metrics") or {}
    bad = {status: count for status, count in measured.get("statuses", {}).items() if status >= "400"}
    if not bad and not measured.get("errors"):
        return ""
    counts_shown = [f"{name} {count}" for counts in (measured["errors"], bad) for name, count in counts.items()]
    return f"  {server['name']}: {', '.join(counts_shown)} ({measured['errors_per_s']:.1f}/s)"


def _latency(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


@command("ng_status", epilog=EXIT_CODES)
@click.option(
    "--config", type=click.Path(path_type=Path), default="global_config.yaml", show_default=True, metavar="FILE",
    help="The first config of the ng_run command.",
)  # fmt: skip
@click.option("--head", metavar="URL", help="Ask this head instead, such as http://127.0.0.1:11000.")
@click.option(
    "--json", "as_json", is_flag=True,
    help="One JSON object (with --watch: one per line): the head's records, with `metrics`.",
)  # fmt: skip
@click.option("--watch", is_flag=True, help="Repeat until Ctrl-C.")
@click.option(
    "--interval", "interval_s", type=click.FloatRange(min=0.1), default=1.0, show_default=True, metavar="SECONDS",
    help="The period that rates are measured over.",
)  # fmt: skip
@click.pass_context
def main(ctx: click.Context, config: Path, head: str | None, as_json: bool, watch: bool, interval_s: float) -> None:
    """Show every service of the run: its status, address and uptime, its load and latency, and its failures.

    \b
    Examples: ng_status
              ng_status --watch --interval 5
              ng_status --head http://127.0.0.1:11000 --json
    """
    if head and (problem := wrong_url(head)):
        raise UsageError(f"--head {problem}")
    url = (head or _running_head(config)).rstrip("/")
    token = token_of(url, config.resolve().parent)
    ready = True

    async def show() -> None:
        nonlocal ready
        async with contextlib.aclosing(_poll(url, token, interval_s)) as looks:
            async for servers in looks:
                ready = all(server["status"] == "ready" for server in servers)
                _print(url, servers, as_json, watch, screen)
                if not watch:
                    return

    with _screen(watch and not as_json) as screen, contextlib.suppress(KeyboardInterrupt):
        asyncio.run(show())
    ctx.exit(0 if ready else 1)


@contextlib.contextmanager
def _screen(watch: bool) -> Iterator[Screen | None]:
    """A screen on which each table replaces the one before; the last one stays."""
    from ngym.runtime.live_region import Screen, is_live

    screen = Screen(sys.stdout) if watch and is_live(sys.stdout) else None
    try:
        yield screen
    finally:
        if screen is not None:
            screen.keep()


def _print(url: str, servers: list[Server], as_json: bool, watch: bool, screen: Screen | None) -> None:
    if as_json:
        click.echo(json.dumps({"head": url, "servers": servers}, indent=None if watch else 2))
        return
    if screen is not None:
        from rich.text import Text

        lines = [Text(line) for line in tables(url, servers)]
        screen.show(lambda size: lines)
        return
    for line in tables(url, servers):
        click.echo(line)


def _running_head(config: Path) -> str:
    root = config.resolve().parent
    running = find_running(root)
    if running is None:
        raise NgymError(f"nothing runs in {root}: start it with ng_run there, or name a run with --head URL")
    return running.url


async def _poll(url: str, token: str | None, interval_s: float) -> AsyncGenerator[list[Server], None]:
    """Yield the head's records forever, each with the metrics since the previous one."""
    from ngym.supervise.metrics_scraper import numbers, scrapes

    before = await scrapes(await _ask(url, token), token, TIMEOUT_S)
    while True:
        await asyncio.sleep(interval_s)
        servers = await _ask(url, token)
        now = await scrapes(servers, token, TIMEOUT_S)
        both = {name: numbers(before[name], scrape).as_json() for name, scrape in now.items() if name in before}
        yield [{**server, "metrics": both.get(server["name"])} for server in servers]
        before = now


async def _ask(url: str, token: str | None) -> list[Server]:
    from ngym.peers import servers_in
    from ngym.supervise.head_file import http_get

    try:
        reply = await http_get(f"{url}/servers", TIMEOUT_S, token)
        if reply.status == 401:
            raise NgymError(f"{url}: the run there is locked; set the variable {RUN_TOKEN} to its token")
        return servers_in(reply.body)
    except TimeoutError:
        raise NgymError(f"{url}: no head of ng_run answers there (no answer within {TIMEOUT_S:.0f} s)") from None
    except (OSError, ValueError) as error:
        raise NgymError(f"{url}: no head of ng_run answers there ({error})") from None
