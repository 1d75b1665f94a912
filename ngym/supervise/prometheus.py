"""What a Prometheus asks the head: where everything is (http_sd), and how the services themselves do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from ngym.supervise.resident_memory import resident_bytes
from ngym.supervise.service import State


def targets(states: Sequence[State], head_url: str) -> list[dict[str, Any]]:
    """Prometheus' http_sd format: the head, and every service process of ours. Somebody else's may have no metrics."""
    ours = [state for state in states if state.app is not None]
    described = [
        (state.url, {"service": state.name, "kind": state.kind, "replica": str(state.replica)}) for state in ours
    ]
    return [_target(url, labels) for url, labels in [(head_url, {"service": "head", "kind": "head"}), *described]]


def _target(url: str, labels: dict[str, str]) -> dict[str, Any]:
    parts = urlsplit(url)
    told = {"__scheme__": parts.scheme, **labels}
    if path := parts.path.rstrip("/"):
        told["__metrics_path__"] = f"{path}/metrics"
    return {"targets": [parts.netloc], "labels": told}


def exposition(states: Sequence[State]) -> bytes:
    """Whether each process is ready, how often it was started again, and what memory it takes with those it started."""
    registry = CollectorRegistry()
    registry.register(_Services(states))
    return generate_latest(registry)


class _Services:
    def __init__(self, states: Sequence[State]) -> None:
        self._states = states

    def collect(self) -> Iterator[Metric]:
        names = ["service", "replica"]
        ready = GaugeMetricFamily("ngym_service_ready", "1 while the service is ready", labels=names)
        restarts = CounterMetricFamily("ngym_service_restarts", "How often it was started again", labels=names)
        memory = GaugeMetricFamily(
            "ngym_service_resident_memory_bytes", "Of the service and the processes that it started", labels=names
        )
        sizes = resident_bytes([state.pid for state in self._states if state.pid])
        for state in self._states:
            labels = [state.name, str(state.replica)]
            ready.add_metric(labels, float(state.status == "ready"))
            restarts.add_metric(labels, state.restarts)
            if state.pid in sizes:
                memory.add_metric(labels, sizes[state.pid])
        yield from (ready, restarts, memory)
