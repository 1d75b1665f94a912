"""Metrics of the services of a run: memory, scrapes of /metrics, Prometheus discovery, and their polling."""

from __future__ import annotations

import asyncio
import json
import math
import resource
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from ngym.supervise.head_file import http_get
from ngym.supervise.scaling import ReplicaLoad
from ngym.supervise.service import ReplicaState

PROC = Path("/proc")
PAGE_BYTES = resource.getpagesize()
# Our own requests, which are not the service's work.
PROBES = frozenset({"/", "/health", "/ready", "/metrics", "/running", "/running/{rollout_id}"})
SCRAPE_INTERVAL_S = 5.0
TIMEOUT_S = 2.0
RETRY_INTERVAL_S = 1.0
WAITING = ("ngym_calls_waiting", "ngym_answers_waiting", "vllm:num_requests_waiting")
LOAD_METRICS = ("ngym_requests_in_flight", *WAITING)
WANTED = ("ngym_requests_total", "ngym_errors_total")  # an engine's page has thousands of lines

SESSION, RESIDENT = 3, 21  # fields of /proc/PID/stat after the name


def resident_bytes(leaders: Collection[int]) -> dict[int, int]:
    """Resident bytes by session leader, which every service process is; shared pages count in each process."""
    totals = dict.fromkeys(leaders, 0)
    if not totals:
        return {}
    for stat in PROC.glob("[0-9]*/stat"):
        with suppress(OSError, IndexError, ValueError):  # it has just ended
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            session = int(fields[SESSION])
            if session in totals:
                totals[session] += int(fields[RESIDENT]) * PAGE_BYTES
    return {leader: size for leader, size in totals.items() if size}


@dataclass(frozen=True)
class ServiceTraffic:
    """The current traffic of a service process. errors: since its start."""

    requests_per_s: float
    errors: int


@dataclass(frozen=True)
class Scrape:
    """The counters of one service, or of all its replicas. at: seconds on any clock.

    buckets: upper bound in seconds -> requests that took no longer. errors: failure class -> count.
    """

    at: float
    statuses: Counter[str] = field(default_factory=Counter)
    buckets: dict[float, int] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    in_flight: int = 0
    waiting: int | None = None
    policy_version: int | None = None


@dataclass(frozen=True)
class ServiceMetrics:
    """A service's current numbers. p50_s, p95_s: over the interval's requests, or over all since its start if there
    were none.

    statuses, errors: since its start. tokens_per_s and the following fields: of model servers; waiting: calls in its
    queue.
    """

    requests: int
    requests_per_s: float
    p50_s: float | None
    p95_s: float | None
    in_flight: int
    statuses: dict[str, int]
    errors: dict[str, int]
    errors_per_s: float
    input_tokens_per_s: float | None = None
    output_tokens_per_s: float | None = None
    waiting: int | None = None
    policy_version: int | None = None

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


def read(text: str, at: float) -> Scrape:
    """Parse a scrape in Prometheus' text format. ValueError for invalid text."""
    from prometheus_client.parser import text_string_to_metric_families

    scrape, waiting, version = Scrape(at), [], []
    in_flight = 0
    for family in text_string_to_metric_families(text):
        for name, labels, value, *_ in family.samples:
            if labels.get("route") in PROBES:
                continue
            match name:
                case "ngym_requests_total":
                    scrape.statuses[labels["status"]] += int(value)
                case "ngym_request_seconds_bucket":
                    bound = float(labels["le"])
                    scrape.buckets[bound] = scrape.buckets.get(bound, 0) + int(value)
                case "ngym_errors_total":
                    scrape.errors[labels["class"]] += int(value)
                case "ngym_model_tokens_total":
                    scrape.tokens[labels["way"]] += int(value)
                case "ngym_requests_in_flight":
                    in_flight = max(0, int(value) - 1)  # without the scrape itself
                case _ if name in WAITING:
                    waiting.append(int(value))
                case "ngym_policy_version":
                    version.append(int(value))
    facts = {"waiting": sum(waiting) if waiting else None, "policy_version": max(version, default=None)}
    return Scrape(at, scrape.statuses, scrape.buckets, scrape.errors, scrape.tokens, in_flight, **facts)


def together(replicas: Iterable[Scrape]) -> Scrape:
    """The replicas of a service combined; at least one. The policy version is the oldest of theirs."""
    first, *others = replicas
    for other in others:
        first = Scrape(
            first.at,
            first.statuses + other.statuses,
            _add_buckets(first.buckets, other.buckets, 1),
            first.errors + other.errors,
            first.tokens + other.tokens,
            first.in_flight + other.in_flight,
            _combine(sum, first.waiting, other.waiting),
            _combine(min, first.policy_version, other.policy_version),
        )
    return first


def numbers(before: Scrape, now: Scrape) -> ServiceMetrics:
    """The numbers between two scrapes; a service that restarted in between has counted from 0."""
    seconds = max(now.at - before.at, 1e-9)
    if now.statuses.total() < before.statuses.total():
        before = Scrape(before.at)
    recent = _add_buckets(now.buckets, before.buckets, -1)
    buckets = recent if any(recent.values()) else now.buckets
    is_model = now.waiting is not None
    return ServiceMetrics(
        requests=now.statuses.total(),
        requests_per_s=(now.statuses.total() - before.statuses.total()) / seconds,
        p50_s=quantile(0.5, buckets),
        p95_s=quantile(0.95, buckets),
        in_flight=now.in_flight,
        statuses=dict(sorted(now.statuses.items())),
        errors=dict(sorted(now.errors.items())),
        errors_per_s=max(0, now.errors.total() - before.errors.total()) / seconds,
        input_tokens_per_s=(now.tokens["input"] - before.tokens["input"]) / seconds if is_model else None,
        output_tokens_per_s=(now.tokens["output"] - before.tokens["output"]) / seconds if is_model else None,
        waiting=now.waiting,
        policy_version=now.policy_version,
    )


def quantile(share: float, buckets: Mapping[float, int]) -> float | None:
    """As Prometheus' histogram_quantile: linear within the bucket, the largest bound above all of them; None without
    data.
    """
    bounds = sorted(buckets)
    if not bounds or not buckets[bounds[-1]]:
        return None
    rank, below, lower = share * buckets[bounds[-1]], 0, 0.0
    for bound in bounds:
        if buckets[bound] >= rank:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * (rank - below) / (buckets[bound] - below)
        below, lower = buckets[bound], bound
    return lower


def _add_buckets(some: Mapping[float, int], others: Mapping[float, int], sign: int) -> dict[float, int]:
    """Add buckets, keeping empty ones: their bounds are the lower bounds of the next."""
    return {bound: some.get(bound, 0) + sign * others.get(bound, 0) for bound in some.keys() | others.keys()}


def _combine(how: Callable[[list[int]], int], one: int | None, other: int | None) -> int | None:
    known = [value for value in (one, other) if value is not None]
    return how(known) if known else None


def targets(states: Sequence[ReplicaState], head_url: str) -> list[dict[str, Any]]:
    """Prometheus' http_sd format: the head, and every service process of ours. External services may have no metrics."""
    services = [state for state in states if state.app is not None]
    described = [
        (state.url, {"service": state.name, "kind": state.kind, "replica": str(state.replica)}) for state in services
    ]
    return [_target(url, labels) for url, labels in [(head_url, {"service": "head", "kind": "head"}), *described]]


def _target(url: str, labels: dict[str, str]) -> dict[str, Any]:
    parts = urlsplit(url)
    all_labels = {"__scheme__": parts.scheme, **labels}
    if path := parts.path.rstrip("/"):
        all_labels["__metrics_path__"] = f"{path}/metrics"
    return {"targets": [parts.netloc], "labels": all_labels}


def exposition(states: Sequence[ReplicaState]) -> bytes:
    """Whether each process is ready, its restarts, and the memory that it and its child processes take."""
    registry = CollectorRegistry()
    registry.register(_Services(states))
    return generate_latest(registry)


class _Services:
    def __init__(self, states: Sequence[ReplicaState]) -> None:
        self._states = states

    def collect(self) -> Iterator[Metric]:
        names = ["service", "replica"]
        ready = GaugeMetricFamily("ngym_service_ready", "1 while the service is ready", labels=names)
        restarts = CounterMetricFamily("ngym_service_restarts", "Number of restarts", labels=names)
        memory = GaugeMetricFamily(
            "ngym_service_resident_memory_bytes", "Resident memory of the service and its child processes", labels=names
        )
        version = GaugeMetricFamily(
            "ngym_service_policy_version", "The policy version that a trainer has proved there", labels=names
        )
        sizes = resident_bytes([state.pid for state in self._states if state.pid and not state.node])
        for state in self._states:
            labels = [state.name, str(state.replica)]
            ready.add_metric(labels, float(state.status == "ready"))
            restarts.add_metric(labels, state.restarts)
            if state.pid in sizes and not state.node:
                memory.add_metric(labels, sizes[state.pid])
            if state.version is not None:
                version.add_metric(labels, state.version)
        yield from (ready, restarts, memory, version)


async def scrape_forever(
    states: Callable[[], Iterable[ReplicaState]],
    token: str | None,
    tell: Callable[[Mapping[str, ServiceTraffic]], None],
) -> None:
    """Report the traffic of each process of ours at each interval, forever. token: the run's."""
    before: dict[str, Scrape] = {}
    while True:
        services = [state for state in states() if state.app and state.status == "ready"]
        results = await asyncio.gather(*(scrape(state.url, token, TIMEOUT_S, WANTED) for state in services))
        now = {state.label: scrape for state, scrape in zip(services, results, strict=True) if scrape is not None}
        tell({label: _traffic(before[label], scrape) for label, scrape in now.items() if label in before})
        before = now
        await asyncio.sleep(SCRAPE_INTERVAL_S)


def _traffic(before: Scrape, now: Scrape) -> ServiceTraffic:
    numbers_now = numbers(before, now)
    return ServiceTraffic(numbers_now.requests_per_s, sum(numbers_now.errors.values()))


async def scrapes(servers: Sequence[Mapping[str, Any]], token: str | None, timeout_s: float) -> dict[str, Scrape]:
    """Metrics by service; services that report none are left out. servers: records of the head."""
    by_name: dict[str, Scrape] = {}
    all_urls = [server.get("urls") or [server["url"]] for server in servers]
    # The token belongs to the run: external services do not receive it.
    tokens = [token if server["app"] else None for server in servers]
    requests = [
        asyncio.gather(*(scrape(url, opener, timeout_s) for url in urls))
        for urls, opener in zip(all_urls, tokens, strict=True)
    ]
    for server, replicas in zip(servers, await asyncio.gather(*requests), strict=True):
        if present := [scrape for scrape in replicas if scrape is not None]:
            by_name[server["name"]] = together(present)
    return by_name


async def load_of(urls: Sequence[str], changing: int, token: str | None) -> ReplicaLoad | None:
    """The load of these replicas of a model; None if one does not answer. changing: further replicas."""
    results = await asyncio.gather(*(scrape(url, token, TIMEOUT_S, LOAD_METRICS) for url in urls))
    known = [each for each in results if each is not None]
    if not known or len(known) < len(results):
        return None
    return ReplicaLoad(
        len(urls), changing, sum(each.waiting or 0 for each in known), sum(each.in_flight for each in known)
    )


class MetricsSnapshots:
    """The metrics of all services since the last look. Looks of several clients within RETRY_INTERVAL_S share one answer."""

    def __init__(self, token: str | None) -> None:
        self._token = token
        self._before: dict[str, Scrape] | None = None
        self._at = -math.inf
        self._latest: dict[str, dict[str, Any]] = {}
        self._one_at_a_time = asyncio.Lock()

    async def now(self, servers: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """The numbers of each service that reports them, by name."""
        async with self._one_at_a_time:
            if time.monotonic() - self._at < RETRY_INTERVAL_S:
                return self._latest
            if self._before is None:
                self._before = await scrapes(servers, self._token, TIMEOUT_S)
                await asyncio.sleep(RETRY_INTERVAL_S)
            now = await scrapes(servers, self._token, TIMEOUT_S)
            self._latest = {
                name: numbers(self._before[name], scrape).as_json()
                for name, scrape in now.items()
                if name in self._before
            }
            self._before, self._at = now, time.monotonic()
            return self._latest


async def running(servers: Sequence[Mapping[str, Any]], token: str | None) -> list[dict[str, Any]]:
    """The rollouts that run now, oldest first: what the agents' /running lists, with the agent's name and address."""
    agents = [
        (server["name"], url)
        for server in servers
        if server["kind"] == "agent" and server["app"] and server["status"] == "ready"
        for url in server.get("urls") or [server["url"]]
    ]

    async def ask(name: str, url: str) -> list[dict[str, Any]]:
        try:
            reply = await http_get(f"{url.rstrip('/')}/running", TIMEOUT_S, token)
            rollouts = json.loads(reply.body)["rollouts"] if reply.status == 200 else []
            return [{"agent": name, "at": url, **rollout} for rollout in rollouts]
        except (OSError, ValueError, LookupError, TypeError):  # it is busy, or another program
            return []

    results = await asyncio.gather(*(ask(name, url) for name, url in agents))
    return sorted((rollout for each in results for rollout in each), key=lambda rollout: -rollout["seconds"])


async def scrape(url: str, token: str | None, timeout_s: float, prefixes: tuple[str, ...] = ("",)) -> Scrape | None:
    """The metrics of a service; None if it does not answer in time, or has other metrics. prefixes: first words of lines."""
    try:
        reply = await http_get(f"{url.rstrip('/')}/metrics", timeout_s, token)
        if reply.status != 200:
            return None
        lines = reply.body.decode().splitlines()
        return read("\n".join(line for line in lines if line.startswith(prefixes)) + "\n", time.monotonic())
    except (OSError, ValueError):  # it is busy, or a third-party service
        return None
