"""The pace, the retries and what was used up, as Prometheus metrics of the service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ngym.remote.upstream import Upstream


class UpstreamMetrics(Collector):
    """Reads them when they are asked for; nothing is counted twice on the way of a request."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    def collect(self) -> Iterator[Metric]:
        pace, budget, caps = self._upstream.pace, self._upstream.budget, self._upstream.caps
        yield _gauge("ngym_upstream_limit", "How many requests may be in flight now", pace.limit)
        yield _gauge("ngym_upstream_in_flight", "Requests in flight", pace.in_flight)
        yield _gauge("ngym_upstream_waiting", "Requests that wait for their turn", pace.waiting)
        yield _gauge("ngym_upstream_paused_seconds", "How long nothing is asked, as told by 429", pace.paused_s())
        yield _count("ngym_upstream_refused", "Requests refused for the rate (429, 503, 529)", pace.counts.refused)
        yield _count("ngym_upstream_limit_halved", "How often the limit was halved", pace.counts.cuts)
        yield _count("ngym_upstream_retries", "Retries after failures", budget.spent)
        yield _count("ngym_upstream_retries_refused", "Retries that the budget did not allow", budget.refused)
        tokens = CounterMetricFamily("ngym_upstream_tokens", "Tokens, as the usage of answers tells", labels=["way"])
        tokens.add_metric(["input"], caps.used.input)
        tokens.add_metric(["output"], caps.used.output)
        yield tokens
        yield _count("ngym_upstream_spend", "Money spent, by price_input and price_output", caps.spend)


@asynccontextmanager
async def watched(upstream: Upstream, registry: CollectorRegistry) -> AsyncIterator[Upstream]:
    """An upstream whose metrics stand in the service's registry as long as the block lasts; it is closed at its end."""
    metrics = UpstreamMetrics(upstream)
    registry.register(metrics)
    try:
        yield upstream
    finally:
        registry.unregister(metrics)
        await upstream.close()


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(name, what, value=value)


def _count(name: str, what: str, value: float) -> Metric:
    return CounterMetricFamily(name, what, value=value)
