"""Clients of remote model APIs: what all back ends over HTTP share, independent of the API.

Each service has one `Upstream`: one limiter (an adaptive concurrency limit, and pauses for all callers), one retry budget,
one account of tokens and money. The back end defines paths and bodies, and interprets answers.
"""

from ngym.remote.upstream import (
    ContextOverflow,
    Headers,
    NotSupported,
    OutcomeUnknown,
    RemoteOptions,
    RequestTarget,
    Upstream,
    watch_upstream,
)

__all__ = [
    "ContextOverflow",
    "Headers",
    "NotSupported",
    "OutcomeUnknown",
    "RemoteOptions",
    "RequestTarget",
    "Upstream",
    "watch_upstream",
]
