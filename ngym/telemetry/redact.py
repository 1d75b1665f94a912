"""Redaction: replaces secrets in values and log lines, and changes nothing else."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

REDACTED = "<redacted>"
MIN_LITERAL = 8  # shorter values also occur in ordinary words
SECRET_WORDS = frozenset(
    [
        "authorization",
        "bearer",
        "cookie",
        "cookies",
        "credential",
        "credentials",
        "passphrase",
        "passwd",
        "password",
        "passwords",
        "pat",
        "pwd",
        "secret",
        "secrets",
        "sk",
        "token",
    ]
)
SECRET_NAMES = ("api_key", "api_keys", "apikey", "apikeys", "access_key", "access_keys", "private_key", "secret_key", "auth_key",
                "account_key", "access_token", "auth_token", "x_auth")  # fmt: skip
SECRET_MAPS = ("env", "environment", "environment_variables", "headers", "default_headers", "extra_headers")
"""Options whose values are all secret: the arguments of a program or the headers of an external server."""
_CREDENTIALS = re.compile(r"(?<=://)[^/?#\s\"'@]*:[^/?#\s\"']*@")  # user:password@ in a URL
_PASSWORD = re.compile(r"://[^/?#\s\"'@:]*:([^/?#\s\"']+)@")


def redacted(value: Any, key: str = "") -> Any:
    """The value with every secret leaf replaced. A name that ends in `_env` holds a variable's name and is shown."""
    if isinstance(value, dict):
        if is_map_of_secrets(key):
            return {name: REDACTED if item else item for name, item in value.items()}
        return {name: redacted(item, str(name)) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted(item, key) for item in value]
    if not isinstance(value, str) or not value:
        return value
    return REDACTED if is_secret(key) else _CREDENTIALS.sub(f"{REDACTED}@", value)


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
        self._found = re.compile(b"|".join(re.escape(value.encode()) for value in longest_first) or b"(?!)")

    def __call__(self, line: bytes) -> bytes:
        return self._found.sub(REDACTED.encode(), line)

    def text(self, text: str) -> str:
        return self(text.encode(errors="surrogatepass")).decode(errors="surrogatepass")


def secrets_in(options: Mapping[str, Any]) -> Iterator[str]:
    """Values of options, and of this process's environment variables, whose names mark them as secret."""
    for name, value in os.environ.items():
        if is_secret(name):
            yield value
    yield from _secret_leaves(dict(options))


def _secret_leaves(value: Any, key: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from [str(item)] if is_map_of_secrets(key) else _secret_leaves(item, str(name))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _secret_leaves(item, key)
    elif isinstance(value, str) and key.endswith("_env"):
        yield os.environ.get(value, "")
    elif isinstance(value, str):
        yield from [value] if is_secret(key) else _PASSWORD.findall(value)
