"""When may we ask again? What the headers of a refusal say, in any of the ways that servers say it."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

MAX_WAIT_S = 24 * 3600.0
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_EPOCH_S = 1e9  # a number beyond is a point in time, in seconds or milliseconds
_REMAINING = re.compile(r"(?:x|anthropic)-ratelimit-(.*-)?remaining(-.*)?")


def wait_s(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """Seconds to wait, from the headers (lower case) of a 429, 503 or 529; None where they say nothing.

    In this order: `retry-after-ms`; `retry-after` (seconds or an HTTP date); the reset of each limit of which nothing
    remains (`x-ratelimit-reset-requests: 6m0s`, `x-ratelimit-reset: 1760000000`, `anthropic-ratelimit-tokens-reset:`
    an RFC 3339 time). Never below 0 or above a day.

    Args:
        now: seconds since 1970; the clock's where left out.
    """
    now = time.time() if now is None else now
    milliseconds = _number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return _bounded(milliseconds / 1000)
    if "retry-after" in headers:
        waited = _moment(headers["retry-after"], now)
        if waited is not None:
            return _bounded(waited)
    resets = []
    for name, value in headers.items():
        if _REMAINING.fullmatch(name) and _number(value) == 0:
            waited = _moment(headers.get(name.replace("remaining", "reset"), ""), now)
            resets += [] if waited is None else [waited]
    return _bounded(max(resets)) if resets else None


def _moment(text: str, now: float) -> float | None:
    """Seconds from now on: from a number, a duration such as 6m0.5s, a date, or a point in time."""
    text = text.strip()
    number = _number(text)
    if number is not None:
        if number > _EPOCH_S * 1000:
            return number / 1000 - now
        return number - now if number > _EPOCH_S else number
    if text and not _DURATION.sub("", text):
        return sum(float(count) * _UNIT_S[unit] for count, unit in _DURATION.findall(text))
    for read in (parsedate_to_datetime, datetime.fromisoformat):
        try:
            moment = read(text)
        except ValueError:
            continue
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() - now
    return None


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if 0 <= number < float("inf") else None


def _bounded(seconds: float) -> float:
    return min(max(seconds, 0.0), MAX_WAIT_S)
