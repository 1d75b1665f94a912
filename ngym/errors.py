"""The tree of errors; every error's message is one line that says what is wrong, where, and how to fix it.

NgymError
├── UsageError            the user's command, config or data is wrong     -> exit code 2, never retried
│   └── ConfigError       ... in a config file
└── ServiceError          something failed while serving a request        -> a problem document (RFC 9457)
    ├── BadRequest        the caller's body is wrong                      422
    │   └── ToolError     ... of a tool call by the model, which reads why; the rollout continues
    ├── NotFound          no such tool, session or model                  404
    ├── Unauthorized      a token is missing or wrong                     401
    ├── Overloaded        a bound was reached; try later                  429
    ├── NotReady          the service cannot serve yet                    503
    ├── Unreachable       a peer could not be connected to                502
    ├── PeerTimeout       a peer did not answer before the deadline       504
    └── UpstreamError     a peer answered with an error                   502
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from http.client import responses
from itertools import islice
from pathlib import Path
from traceback import walk_tb
from types import TracebackType
from typing import Any, Literal, NamedTuple

LIBRARY_PATHS = (
    str(Path(__file__).parent),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    "<",
)

MAX_DETAIL = 4000  # limit of characters of an error's line, which may quote arguments
MAX_PROBLEMS = 8  # limit of named problems per request
MAX_NAME, MAX_MESSAGE = 100, 400  # limits of characters of a problem's field and of its message

FailureClass = Literal[
    "config",  # the row, the config or the environment is wrong; retrying would not help
    "connect",  # a service could not be reached
    "timeout",  # a service did not answer before the deadline
    "model_error",  # the model server failed, or refused the request
    "context_length",  # the conversation does not fit the model's context
    "tool_error",  # a tool, a reset or a step crashed, or a tool did not answer; mistakes of the model are not failures
    "agent_error",  # the agent failed, or its answer is not a rollout
    "verify_error",  # the verifier failed, or its answer is not a reward
    "judge_error",  # the judge model returned no verdict
    "cancelled",  # the caller has gone, or the rollout was stopped
]


class NgymError(Exception):
    """Base of every error that ngym raises on purpose."""


class UsageError(NgymError):
    """The user's command, config or data is wrong; the message says how to fix it."""


class ConfigError(UsageError):
    """A config file is wrong: `path:line: what is wrong (did you mean ...?)`."""


class ServiceError(NgymError):
    """A failure while serving a request; crosses the wire as a problem document.

    Args:
        detail: one line for the reader; of an exception, its message. Without one, it is the title.
        failure: the failure class that a rollout gets when this error ends it; None lets the
            stage decide (an error in `/verify` is a `verify_error`, and so on).
        upstream: `{"service", "url", "status"}` of the peer that caused it.
        extra: members added to the problem document (for example `errors` with field names).
        retry_after_s: when a retry may succeed; sent with a 429 or 503.
    """

    status = 500
    title = "Internal error"
    retryable = False
    failure: FailureClass | None = None
    is_for_the_model = False  # of a tool call: the model reads it and may do better; else the rollout fails

    def __init__(
        self,
        detail: str | Exception,
        *,
        failure: FailureClass | None = None,
        upstream: dict[str, Any] | None = None,
        retryable: bool | None = None,
        status: int | None = None,
        extra: dict[str, Any] | None = None,
        retry_after_s: float = 1.0,
    ) -> None:
        detail = shorten(str(detail), MAX_DETAIL) or self.title
        super().__init__(detail)
        self.detail = detail
        self.failure = failure or type(self).failure
        self.upstream = upstream
        self.retryable = type(self).retryable if retryable is None else retryable
        self.status = type(self).status if status is None else status
        if self.status != type(self).status and type(self) is ServiceError:
            self.title = responses.get(self.status, self.title)
        self.extra = extra or {}
        self.retry_after_s = retry_after_s

    def problem(self, service: str | None = None, rollout_id: str | None = None) -> dict[str, Any]:
        """This error as an RFC 9457 problem document (reference/wire.md)."""
        return {
            "type": f"urn:ngym:{self.failure or type(self).__name__}",
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            "service": service,
            "upstream": self.upstream,
            "rollout_id": rollout_id,
            "retryable": self.retryable,
            "failure": self.failure,
            **self.extra,
        }


def openai_refusal(error: ServiceError) -> dict[str, Any]:
    """An error for OpenAI's clients, which show only `error.message`."""
    wrong = error.extra.get("errors") or [{"field": None}]
    code = error.extra.get("code", error.failure)
    return {"error": {"message": error.detail, "type": error.title, "param": wrong[0]["field"], "code": code}}


class BadRequest(ServiceError):
    """The caller's body is wrong."""

    status = 422
    title = "The request is not valid"


class ToolError(BadRequest):
    """The reason why a tool call cannot be done, for the model; the rollout continues.

    Any other exception of a tool is a failure of the environment and ends the rollout without a reward.
    """

    title = "The tool cannot do this"
    is_for_the_model = True


class Problem(NamedTuple):
    """A field, and what is wrong with it."""

    field: str
    message: str


def bad_request(problems: Iterable[Problem], what: str = "") -> BadRequest:
    """A BadRequest with the first of these problems; the rest are not computed.

    Args:
        what: the object that is wrong, such as "row 3".
    """
    texts = [
        Problem(shorten(each.field, MAX_NAME), shorten(each.message, MAX_MESSAGE))
        for each in islice(problems, MAX_PROBLEMS + 1)
    ]
    reported = texts[:MAX_PROBLEMS]
    text = "; ".join(f"field {each.field!r}: {each.message}" if each.field else each.message for each in reported)
    more = "; and more" if len(texts) > len(reported) else ""
    return BadRequest(
        f"{what}: {text}{more}" if what else text + more, extra={"errors": [each._asdict() for each in reported]}
    )


def printable(text: str) -> str:
    """Escape control characters: model text is untrusted, and an escape sequence must not reach the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def shorten(text: str, most: int) -> str:
    """The text; a longer one is cut to `most` characters and its length is added."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


class NotFound(ServiceError):
    """There is no such tool, session or model."""

    status = 404
    title = "Not found"


class Unauthorized(ServiceError):
    status = 401
    title = "Not authorized"


class Overloaded(ServiceError):
    status = 429
    title = "Too many requests"
    retryable = True


class NotReady(ServiceError):
    status = 503
    title = "Not ready"
    retryable = True


class Unreachable(ServiceError):
    status = 502
    title = "A service could not be reached"
    retryable = True
    failure = "connect"


class PeerTimeout(ServiceError):
    status = 504
    title = "A service did not answer in time"
    retryable = True
    failure = "timeout"


class UpstreamError(ServiceError):
    """A peer answered with an error. `upstream["status"]` is its HTTP status."""

    status = 502
    title = "A service answered with an error"

    def __init__(self, detail: str, *, is_for_the_model: bool = False, **kwargs: Any) -> None:
        super().__init__(detail, **kwargs)
        self.is_for_the_model = is_for_the_model


class Boundary:
    """`with Boundary(...):` gives an error that passes it its failure class, unless it has one; other exceptions become
    a ServiceError with their cause.

    Args:
        places: the block calls an author's function: add the line of its files where the bug is. SystemExit and
            KeyboardInterrupt, which would end the service, are errors too.
        retryable: whether a retry may help, as after a database timeout.
    """

    __slots__ = ("_caught", "_failure", "_places", "_retryable", "_what")

    def __init__(self, failure: FailureClass, what: str, *, places: bool = False, retryable: bool = False) -> None:
        self._caught = (Exception, SystemExit, KeyboardInterrupt) if places else (Exception, SystemExit)
        self._failure = failure
        self._what = what
        self._places = places
        self._retryable = retryable

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        if isinstance(error, ServiceError):
            error.failure = error.failure or self._failure
        elif isinstance(error, self._caught) and not isinstance(error, UsageError):
            where = source_location(error) if self._places else ""
            detail = f"{self._what}: {_describe(error)}{_cause(error)}{where}"
            raise ServiceError(detail, failure=self._failure, retryable=self._retryable) from error


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _cause(error: BaseException) -> str:
    """` (caused by ...)` for the exception that `raise ... from` names. Empty without one, and if the message has its text.

    Libraries put the reason there: the message of OpenAI's APIConnectionError is always "Connection error."
    """
    cause = error.__cause__
    if cause is None or (str(cause) and str(cause) in str(error)):
        return ""
    return f" (caused by {shorten(' '.join(_describe(cause).split()), MAX_MESSAGE)})"


def source_location(error: BaseException) -> str:
    """` (app.py:31)`: the innermost line that is neither in ngym nor in a library; "" if there is no such line."""
    lines = [(frame.f_code.co_filename, number) for frame, number in walk_tb(error.__traceback__)]
    own = [(file, number) for file, number in lines if not file.startswith(LIBRARY_PATHS)]
    return f" ({Path(own[-1][0]).name}:{own[-1][1]})" if own else ""
