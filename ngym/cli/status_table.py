"""What `ng_status` prints: the records of a head's /servers, with what was measured, as lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ngym.cli.columns import aligned
from ngym.runtime.live_region import duration, harmless

COLUMNS = (
    "NAME", "KIND", "STATUS", "PID", "UP", "RESTARTS", "MEMORY", "REQ/S", "P50", "P95", "IN FLIGHT", "ERRORS", "URL",
)  # fmt: skip
OF_MODELS = ("MODEL", "TOKENS IN/S", "TOKENS OUT/S", "WAITING", "POLICY VERSION")


def tables(url: str, servers: list[dict[str, Any]]) -> Iterator[str]:
    """A table of all services; one of the model servers; what failed, by class and by status."""
    ready = sum(server["status"] == "ready" for server in servers)
    yield f"{ready} of {len(servers)} services ready; {url}"
    yield from aligned([COLUMNS, *map(_row, servers)])
    models = [server for server in servers if "waiting" in (server.get("metrics") or {})]
    if models:
        yield ""
        yield from aligned([OF_MODELS, *map(_of_model, models)])
    failed = [line for server in servers if (line := _failures(server))]
    if failed:
        yield ""
        yield "failed since the start, by class and by HTTP status:"
        yield from failed


def _row(server: dict[str, Any]) -> tuple[str, ...]:
    status = server["status"] + (f" ({harmless(server['detail'])})" if server["detail"] else "")
    urls = server.get("urls") or [server["url"]]
    pids = ",".join(str(pid) for pid in server["pids"] if pid) or "external"
    up = duration(server["uptime_seconds"]) if server["started_at"] else ""
    memory = f"{server['memory_bytes'] / 2**20:.0f} MiB" if server.get("memory_bytes") else ""
    measured = server.get("metrics")
    work = ("", "", "", "", "")
    if measured:
        latencies = (_latency(measured.get("p50_s")), _latency(measured.get("p95_s")))
        errors = str(sum(measured["errors"].values()))
        work = (f"{measured['requests_per_s']:.1f}", *latencies, str(measured["in_flight"]), errors)
    known = (server["name"], server["kind"], status, pids, up, str(server["restarts"]), memory)
    return (*known, *work, " ".join(urls))


def _of_model(server: dict[str, Any]) -> tuple[str, ...]:
    measured = server["metrics"]
    tokens = [f"{measured[f'{way}_tokens_per_s']:.0f}" for way in ("input", "output")]
    return (server["name"], *tokens, str(measured["waiting"]), str(measured.get("policy_version", "")))


def _failures(server: dict[str, Any]) -> str:
    measured = server.get("metrics") or {}
    bad = {status: count for status, count in measured.get("statuses", {}).items() if status >= "400"}
    if not bad and not measured.get("errors"):
        return ""
    told = [f"{name} {count}" for counts in (measured["errors"], bad) for name, count in counts.items()]
    return f"  {server['name']}: {', '.join(told)} ({measured['errors_per_s']:.1f}/s)"


def _latency(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
