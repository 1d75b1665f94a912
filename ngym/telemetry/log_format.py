"""Formats of a service's log lines (time, level, service, rollout, message): text, or JSON objects."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal

from ngym.net import request_context

Form = Literal["text", "json"]


def begin(service: str, form: Form) -> None:
    """Send all log records of this process to stderr in this format, with warnings, library logs and fatal exceptions."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(service) if form == "json" else TextLines(service))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)
    sys.excepthook = _uncaught


def say(text: str, service: str, form: Form) -> None:
    """Print a line for a user at a terminal, unchanged."""
    print(text if form == "text" else from_text(text, service, "ERROR"), file=sys.stderr, flush=True)


class TextLines(logging.Formatter):
    """`2026-01-31 12:00:00,000 WARNING policy ngym.services [ROLLOUT] MESSAGE`"""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def formatMessage(self, record: logging.LogRecord) -> str:
        rollout_id = request_context.current.get().rollout_id
        of = f"[{rollout_id}] " if rollout_id else ""
        return f"{self.formatTime(record)} {record.levelname} {self._service} {record.name} {of}{record.getMessage()}"


class JsonLines(logging.Formatter):
    """A JSON object: time (UTC), level, service, logger, message; rollout_id and exception where there is one."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC)
        line = _line(time, record.levelname, self._service) | {"logger": record.name, "message": record.getMessage()}
        if rollout_id := request_context.current.get().rollout_id:
            line["rollout_id"] = rollout_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def from_text(text: str, service: str, level: str = "INFO") -> str:
    """A printed line as a JSON object."""
    return json.dumps({**_line(datetime.now(UTC), level, service), "message": text})


def to_text(line: str) -> str:
    """The text of a line in either format."""
    if not line.startswith("{"):
        return line
    try:
        told = json.loads(line)
        return "\n".join([told["message"], *filter(None, [told.get("exception")])])
    except (ValueError, KeyError, TypeError):
        return line


def is_json(line: str) -> bool:
    """Whether the line is a JSON object already."""
    try:
        return line.startswith("{") and isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _line(time: datetime, level: str, service: str) -> dict[str, Any]:
    return {"time": time.isoformat(timespec="milliseconds"), "level": level, "service": service}


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    logging.getLogger("ngym").critical("the process ends: %s", error, exc_info=(kind, error, trace))
