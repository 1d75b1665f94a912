"""Exports spans with OpenTelemetry, in batches over OTLP/HTTP. The only module that imports its packages; see
tracing.py.

Nothing here waits for the collector: spans that it does not accept are dropped, with a warning once a minute.
"""

from __future__ import annotations

import logging
import threading
import time
from contextvars import ContextVar
from importlib.metadata import version
from types import TracebackType
from typing import Any, Self

import orjson
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import SpanKind, Status, StatusCode, format_span_id, format_trace_id
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ngym.errors import ServiceError
from ngym.net import request_context
from ngym.telemetry import tracing

PATH = "/v1/traces"
PROPAGATOR = TraceContextTextMapPropagator()
KINDS = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER, "client": SpanKind.CLIENT}
EXPORT_S = 10.0
END_S = 1.0
LOG_INTERVAL_S = 60.0
EXPORTER_LOGGERS = ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.sdk._shared_internal")

_own: ContextVar[request_context.TraceIds | None] = ContextVar("ngym_own_ids", default=None)


class SpanExporter:
    """Exports the spans of one process to the collector."""

    def __init__(self, destination: tracing.Destination, service: str, replica: int) -> None:
        url = destination.endpoint.rstrip("/")
        exporter = OTLPSpanExporter(url if url.endswith(PATH) else url + PATH, timeout=EXPORT_S)
        share = TraceIdRatioBased(destination.sample)
        self._contents = destination.contents
        self._provider = TracerProvider(
            # The decision follows from the trace id, so every service decides alike, even if the trace began elsewhere.
            sampler=ParentBased(root=share, remote_parent_sampled=share),
            resource=Resource.create(
                {
                    "service.name": service,
                    "service.namespace": "ngym",
                    "service.instance.id": f"{service}-{replica}",
                    "service.version": version("ngym"),
                }
            ),
            id_generator=_Ids(),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("ngym", version("ngym"))
        for name in EXPORTER_LOGGERS:
            logging.getLogger(name).addFilter(_RateLimitFilter())

    def start(self, name: str, kind: tracing.SpanKind, is_rollout: bool) -> tracing.Span:
        """Start a span now. Its parent: the caller's span, else the rollout's own span, else none."""
        here = request_context.current.get()
        ids = request_context.trace_ids(here.rollout_id) if here.rollout_id else None
        token = _own.set(ids if is_rollout else None)
        parent = "" if is_rollout else here.traceparent or (ids.traceparent if ids else "")
        try:
            context = PROPAGATOR.extract({"traceparent": parent}, Context())
            span = self._tracer.start_span(name, context, KINDS[kind])
        finally:
            _own.reset(token)
        if here.rollout_id:
            span.set_attribute("ngym.rollout.id", here.rollout_id)
        return ExportedSpan(span, self._contents)

    def end(self) -> None:
        """Send the rest; returns after END_S at the latest."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(END_S)


class ExportedSpan(tracing.Span):
    """A span that is exported."""

    def __init__(self, span: OtelSpan, contents: bool) -> None:
        self._span = span
        self._contents = contents
        self._before = request_context.current.get()

    def __enter__(self) -> Self:
        ids = self._span.get_span_context()
        trace, span = format_trace_id(ids.trace_id), format_span_id(ids.span_id)
        request_context.current.set(self._before._replace(traceparent=f"00-{trace}-{span}-{ids.trace_flags:02x}"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A stream ends in another context than it began in, where the context token is invalid.
        request_context.current.set(self._before)
        if isinstance(error, ServiceError):
            self.fail(error.failure or type(error).__name__, error.detail)
        elif isinstance(error, Exception):
            self.fail(type(error).__name__, str(error))
        elif error is not None:
            self._span.set_attribute("error.type", type(error).__name__)  # cancelled
        self._span.end()

    @property
    def is_recording(self) -> bool:
        return self._span.is_recording()

    def set(self, name: str, value: tracing.Value | None) -> None:
        if value is not None:
            self._span.set_attribute(name, value)

    def set_content(self, name: str, value: Any) -> None:
        if self._contents and self._span.is_recording():
            self._span.set_attribute(name, orjson.dumps(value, default=str).decode())

    def fail(self, kind: str, message: str) -> None:
        self._span.set_attribute("error.type", kind)
        # An error's message may quote a model.
        self._span.set_status(Status(StatusCode.ERROR, message if self._contents else None))


class _Ids(RandomIdGenerator):
    """Derives the ids of a rollout's own span from its rollout's id."""

    def generate_trace_id(self) -> int:
        own = _own.get()
        return super().generate_trace_id() if own is None else int(own.trace, 16)

    def generate_span_id(self) -> int:
        own = _own.get()
        return super().generate_span_id() if own is None else int(own.span, 16)


class _RateLimitFilter(logging.Filter):
    """At most one line in LOG_INTERVAL_S."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + LOG_INTERVAL_S
        return True
