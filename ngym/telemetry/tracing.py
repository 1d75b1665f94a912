"""Spans for the parts of a rollout: `with span("verify"):` exports one to an OpenTelemetry collector, if configured.

A rollout is one trace. Its id follows from the rollout's id (`request_context.trace_ids`), so a row identifies its trace,
and a call that carries only the rollout's id, as those of SDKs do, still belongs to it.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

log = logging.getLogger("ngym.tracing")

SpanKind = Literal["internal", "server", "client"]
Value = str | bool | int | float | Sequence[str]

EXPORTER = "ngym.telemetry.otel_exporter"  # imported only where traces are configured


class Destination(NamedTuple):
    """The destination of spans. endpoint: of OTLP over HTTP; /v1/traces is added.

    sample: the share of traces to export. contents: include the texts to and from models and tools.
    """

    endpoint: str
    sample: float = 1.0
    contents: bool = False


class Span:
    """One part of a rollout. This base class exports nothing and costs nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    @property
    def is_recording(self) -> bool:
        """Whether the span is exported; callers can skip expensive attributes otherwise."""
        return False

    def set(self, name: str, value: Value | None) -> None:
        """Set an attribute; None sets nothing."""

    def set_content(self, name: str, value: Any) -> None:
        """Set an attribute with contents, as JSON; only with `contents`."""

    def fail(self, kind: str, message: str) -> None:
        """Mark the span as failed. kind: one of a few words."""


OFF = Span()
_start: Callable[[str, SpanKind, bool], Span] | None = None
_end: Callable[[], None] | None = None


def span(name: str, kind: SpanKind = "internal", *, is_rollout: bool = False) -> Span:
    """A span under the one in `correlation.current`; calls to other services within it become its children.

    is_rollout: the span is the rollout's own, the root of its trace.
    """
    return OFF if _start is None else _start(name, kind, is_rollout)


def begin(destination: Destination | None, service: str, replica: int = 0) -> None:
    """Export this process's spans from now on; call once, after forking. Without the extra `otel` it logs that and does
    nothing.
    """
    global _start, _end
    if destination is None or _start is not None:
        return
    try:
        exporter = importlib.import_module(EXPORTER)
    except ImportError as error:
        log.warning("no traces from here: %s cannot be imported; install the extra ngym[otel]", error.name)
        return
    span_exporter = exporter.SpanExporter(destination, service, replica)
    _start, _end = span_exporter.start, span_exporter.end


def end() -> None:
    """Send the rest within a second; spans that a collector has not accepted by then are lost."""
    global _start, _end
    if _end is not None:
        _end()
    _start = _end = None
