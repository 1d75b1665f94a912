"""Which part of a rollout took how long? `with span("verify"):` tells a collector of OpenTelemetry's, where one is configured.

A rollout is one trace. Its id follows from the rollout's (`correlation.trace_ids`), so whoever has a row knows its trace,
and a call that carries nothing but the rollout's id, as those of SDKs do, still belongs to it.
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
    """Where spans go. endpoint: of OTLP over HTTP, to which /v1/traces is added.

    sample: the share of traces that are told. contents: with what was said to and by models and tools.
    """

    endpoint: str
    sample: float = 1.0
    contents: bool = False


class Span:
    """One part of a rollout. This one is told to nobody, and costs nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    @property
    def is_told(self) -> bool:
        """Whether anybody is told what is set; what costs something to find out need not be found out otherwise."""
        return False

    def set(self, name: str, value: Value | None) -> None:
        """An attribute; None is none."""

    def say(self, name: str, value: Any) -> None:
        """An attribute that tells what was said, as JSON; only with `contents`."""

    def fail(self, kind: str, message: str) -> None:
        """What the span is about failed. kind: one of few words."""


OFF = Span()
_start: Callable[[str, SpanKind, bool], Span] | None = None
_end: Callable[[], None] | None = None


def span(name: str, kind: SpanKind = "internal", *, is_rollout: bool = False) -> Span:
    """A span under the one that `correlation.current` names; calls of other services made within it are its children.

    is_rollout: it is the rollout's own span, the root of its trace.
    """
    return OFF if _start is None else _start(name, kind, is_rollout)


def begin(destination: Destination | None, service: str, replica: int = 0) -> None:
    """From now on this process tells its spans; once, and after it was forked. Without the extra `otel` it says so and does not."""
    global _start, _end
    if destination is None or _start is not None:
        return
    try:
        exporter = importlib.import_module(EXPORTER)
    except ImportError as error:
        log.warning("no traces from here: %s cannot be imported; install the extra ngym[otel]", error.name)
        return
    telling = exporter.Telling(destination, service, replica)
    _start, _end = telling.start, telling.end


def end() -> None:
    """Tell what is left, within a second; what a collector does not take by then is lost."""
    global _start, _end
    if _end is not None:
        _end()
    _start = _end = None
