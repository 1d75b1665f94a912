"""Log format, and redaction of secrets in it."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal

from ngym.errors import printable
from ngym.net import request_context

STATUS_PREFIX = "ngym-status: "  # of a line that a service prints: the supervisor shows the rest as its status
REFUSED = "cannot be started:"  # a status of a service that ends; the lines after it are the reason
REDACTED = "<redacted>"
MIN_LITERAL = 8  # shorter values also occur in ordinary words
SECRET_WORDS = frozenset([
    "authorization", "bearer", "cookie", "cookies", "credential", "credentials", "passphrase", "passwd", "password",
    "passwords", "pat", "pwd", "secret", "secrets", "sk", "token",
])  # fmt: skip
SECRET_NAMES = ("api_key", "api_keys", "apikey", "apikeys", "access_key", "access_keys", "private_key", "secret_key", "auth_key",
                "account_key", "access_token", "auth_token", "x_auth")  # fmt: skip
FOLDERS = ("PWD", "OLDPWD")  # variables with the shell's working directory, not with a password
SECRET_MAPS = ("env", "environment", "environment_variables", "headers", "default_headers", "extra_headers")
"""Options whose values are all secret: the arguments of a program or the headers of an external server."""
_CREDENTIALS = re.compile(r"(?<=://)[^/?#\s\"'@]*:[^/?#\s\"']*@")  # user:password@ in a URL
_PASSWORD = re.compile(r"://[^/?#\s\"'@:]*:([^/?#\s\"']+)@")
_QUERY = re.compile(r"(?<=[?&])([\w.-]+)=([^&#\s\"']+)")  # name=value in a URL
SIGNATURES = frozenset(["key", "sig", "signature"])  # names of secrets in a URL, beside `is_secret`
_ARGUMENT = re.compile(r"(-{0,2}([A-Za-z][\w-]*)(?:=|:\s*))(.+)", re.DOTALL)  # --name=value, NAME=value, Name: value
_BEFORE = r"(?<![^\s\"';&|(])"
_VALUE = r"[\"']?)([^\s\"'-][^\s\"']*)"
_IN_COMMAND = (  # parts of a shell command; each has the text before the value, the name and the value
    re.compile(rf"{_BEFORE}(--?([A-Za-z][\w-]*)(?:=|\s+){_VALUE}"),  # --name value, --name=value
    re.compile(rf"{_BEFORE}(([A-Z][A-Z0-9_]*)={_VALUE}"),  # NAME=value
    re.compile(rf"{_BEFORE}((authorization):\s*(?:\w+\s+)?{_VALUE}", re.IGNORECASE),  # Authorization: Bearer value
)
Form = Literal["text", "json"]


def redact(value: Any, key: str = "") -> Any:
    """The value with every secret leaf replaced. A name that ends in `_env` holds a variable's name and is shown."""
    if isinstance(value, dict):
        if is_map_of_secrets(key):
            return {name: REDACTED if item else item for name, item in value.items()}
        return {name: redact(item, str(name)) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [REDACTED if hidden else redact(item, key) for item, hidden in _arguments(value)]
    if not isinstance(value, str) or not value:
        return value
    return REDACTED if is_secret(key) else _without_secrets(value)


def _without_secrets(text: str) -> str:
    """The text of an option without the credentials of a URL, and without the value of `--token=value`."""
    argument = _ARGUMENT.fullmatch(text)
    if argument and is_secret(argument[2]):
        return argument[1] + REDACTED
    text = _CREDENTIALS.sub(f"{REDACTED}@", text)
    for part in _IN_COMMAND:
        text = part.sub(lambda match: match[1] + REDACTED if _is_secret_part(match) else match[0], text)
    return _QUERY.sub(lambda match: f"{match[1]}={REDACTED}" if _is_secret_in_url(match[1]) else match[0], text)


def _is_secret_part(match: re.Match[str]) -> bool:
    return is_secret(match[2]) and match[2] not in FOLDERS and match[3] != REDACTED


def _is_secret_in_url(name: str) -> bool:
    return is_secret(name) or name.lower() in SIGNATURES


def _arguments(items: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Each item of a list, and whether it is a secret because the item before it is a flag like `--token`."""
    hidden = False
    for item in items:
        is_flag = isinstance(item, str) and item.startswith("-")
        yield item, hidden and isinstance(item, str) and not is_flag
        hidden = is_flag and is_secret(item.lstrip("-"))


def is_secret(key: str) -> bool:
    """Whether a key of this name holds a secret: matches whole words, so that `max_tokens` and `primary_key` do not
    match.
    """
    name = key.lower().replace("-", "_")
    return name.endswith(SECRET_NAMES) or name.rpartition("_")[2] in SECRET_WORDS


def is_map_of_secrets(key: str) -> bool:
    """Whether an option of this name maps names to secrets."""
    return key.lower().replace("-", "_") in SECRET_MAPS


class Redactor:
    """Replaces these values anywhere in a log line.

    Args:
        values: secrets; values of fewer than 8 characters are ignored.
    """

    def __init__(self, values: Iterable[str]) -> None:
        longest_first = sorted({value for value in values if len(value) >= MIN_LITERAL}, key=len, reverse=True)
        self._pattern = re.compile(b"|".join(re.escape(value.encode()) for value in longest_first) or b"(?!)")

    def __call__(self, line: bytes) -> bytes:
        return self._pattern.sub(REDACTED.encode(), line)

    def text(self, text: str) -> str:
        return self(text.encode(errors="surrogatepass")).decode(errors="surrogatepass")


def secrets_in(options: Mapping[str, Any]) -> Iterator[str]:
    """Values of options, and of this process's environment variables, whose names mark them as secret."""
    for name, value in os.environ.items():
        if is_secret(name) and name not in FOLDERS:
            yield value
    yield from _secret_leaves(dict(options))


def _secret_leaves(value: Any, key: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from [str(item)] if is_map_of_secrets(key) else _secret_leaves(item, str(name))
    elif isinstance(value, (list, tuple)):
        for item, hidden in _arguments(value):
            yield from [item] if hidden else _secret_leaves(item, key)
    elif isinstance(value, str) and key.endswith("_env"):
        yield os.environ.get(value, "")
    elif isinstance(value, str):
        yield from [value] if is_secret(key) else _secrets_of(value)


def _secrets_of(text: str) -> Iterator[str]:
    """The values that `_without_secrets` hides."""
    argument = _ARGUMENT.fullmatch(text)
    if argument and is_secret(argument[2]):
        yield argument[3]
    yield from _PASSWORD.findall(text)
    yield from (match[3] for part in _IN_COMMAND for match in part.finditer(text) if _is_secret_part(match))
    yield from (value for name, value in _QUERY.findall(text) if _is_secret_in_url(name))


def configure_logging(service: str, form: Form) -> None:
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
    """`2026-01-31 12:00:00,000 WARNING policy ngym.services [ROLLOUT] MESSAGE`

    A record may quote untrusted text, which can neither control the terminal nor begin a line: further lines are
    indented.
    """

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record).replace("\r\n", "\n").expandtabs()
        return printable(text).replace("\n", "\n  ")

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
        entry = json.loads(line)
        return "\n".join([entry["message"], *filter(None, [entry.get("exception")])])
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
