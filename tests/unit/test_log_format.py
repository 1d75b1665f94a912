"""The text format of logs: untrusted text in a record stays within the lines of that record."""

from __future__ import annotations

import logging
import sys

from ngym.telemetry.log_format import STATUS_PREFIX, TextLines

HOSTILE = f"\x1b]0;title\x07\x9b2J\r\n{STATUS_PREFIX}ready\n2026-12-01 00:00:00,000 INFO policy ngym another record"


def text_of(message: str) -> list[str]:
    """The lines of a record with this message, whose exception has the same text."""
    try:
        raise ValueError(message)
    except ValueError:
        record = logging.LogRecord("ngym", logging.WARNING, "app.py", 1, "%s", (message,), sys.exc_info())
    return TextLines("policy").format(record).split("\n")


def test_untrusted_text_begins_no_line_of_a_log() -> None:
    first, *others = text_of(HOSTILE)
    assert " WARNING policy ngym " in first and f"  {STATUS_PREFIX}ready" in others
    assert "  Traceback (most recent call last):" in others and all(line.startswith("  ") for line in others)


def test_untrusted_text_has_no_control_characters_in_a_log() -> None:
    lines = text_of(HOSTILE)
    assert all(line.isprintable() for line in lines)
    assert lines[0].endswith(r"\x1b]0;title\x07\x9b2J")
