"""After which failures is a call made again, how often, and after which pause?"""

from __future__ import annotations

import random

from ngym.client import Reply

BROKEN_S = (0.05, 0.4, 2.0)  # pauses after a connection that broke or was refused, and after a 504
REFUSED_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)  # ... after another answer that may be a different one next time
MAX_RETRY_AFTER_S = 30.0
RETRY_RATIO = 0.5  # a third of all calls may fail for long, and still be repeated until they succeed
NOT_PROCESSED = frozenset({429, 503})
MAYBE_PROCESSED = frozenset({500, 502, 504})


def spread(pause: float) -> float:
    return random.uniform(0.5, 1.0) * pause


def retry_after(reply: Reply) -> float | None:
    """What it says, and up to a quarter more, so that those who were refused together do not come back together."""
    value = reply.headers.get("retry-after", "")
    if not (value.isascii() and value.replace(".", "", 1).isdigit()):
        return None
    return random.uniform(1.0, 1.25) * min(float(value), MAX_RETRY_AFTER_S)
