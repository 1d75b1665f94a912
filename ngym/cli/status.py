"""`ng_status`: what the run in this folder is doing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import click

from ngym.cli.main import command
from ngym.errors import NgymError

TIMEOUT_S = 5.0
EXIT_CODES = """\
Exit codes: 0  every service is ready
            1  something is not ready, or nothing runs here"""


@command("ng_status", epilog=EXIT_CODES)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    default="global_config.yaml",
    show_default=True,
    metavar="FILE",
    help="The config that ng_run was given (the first one).",
)
@click.option("--head", metavar="URL", help="Ask this head instead, such as http://127.0.0.1:11000.")
@click.option("--json", "as_json", is_flag=True, help="The head's own JSON.")
@click.pass_context
def main(ctx: click.Context, config: Path, head: str | None, as_json: bool) -> None:
    """Show every service of the run: whether it is ready, where it is, since when."""
    url = head or _running_head(config)
    servers = asyncio.run(_ask(url))
    if as_json:
        click.echo(json.dumps({"head": url, "servers": servers}, indent=2))
    else:
        _print_table(url, servers)
    ctx.exit(0 if all(server["status"] == "ready" for server in servers) else 1)


def _running_head(config: Path) -> str:
    from ngym.supervise.headfile import find_running

    root = config.resolve().parent
    running = find_running(root)
    if running is None:
        raise NgymError(f"nothing runs in {root}: start it with ng_run there, or name a run with --head URL")
    return running.url


async def _ask(url: str) -> list[dict[str, Any]]:
    from ngym.supervise.probe import get

    try:
        reply = await get(f"{url.rstrip('/')}/servers", TIMEOUT_S)
        servers: list[dict[str, Any]] = json.loads(reply.body)
    except (OSError, ValueError) as error:
        raise NgymError(f"{url}: no head of ng_run answers there ({error or type(error).__name__})") from None
    return servers


def _print_table(url: str, servers: list[dict[str, Any]]) -> None:
    ready = sum(server["status"] == "ready" for server in servers)
    click.echo(f"{ready} of {len(servers)} services ready; {url}")
    rows: list[tuple[str, ...]] = [("NAME", "KIND", "STATUS", "PID", "UP", "RESTARTS", "URL")]
    rows += [_row(server) for server in servers]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _row(server: dict[str, Any]) -> tuple[str, ...]:
    status = server["status"] + (f" ({server['detail']})" if server["detail"] else "")
    urls = server.get("urls") or [server["url"]]
    pids = ",".join(str(pid) for pid in server["pids"] if pid) or "external"
    up = f"{server['uptime_seconds']:.0f} s" if server["started_at"] else ""
    return (server["name"], server["kind"], status, pids, up, str(server["restarts"]), " ".join(urls))
