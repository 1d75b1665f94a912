"""One POST to the endpoint through the official client (openai 2 or 3), and what each of its errors means to us."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import orjson

from ngym import correlation
from ngym.convert import is_context_overflow
from ngym.errors import BadRequest, ConfigError, Overloaded, PeerTimeout, ServiceError, Unreachable, UpstreamError

if TYPE_CHECKING:
    import openai

    from .app import Options

log = logging.getLogger("ngym.models.openai")

_NO_SUCH_PATH = frozenset({404, 405})
_PASSING = frozenset({408, 409})


class NotOffered(UpstreamError):
    """The endpoint does not have this path (or, with 404, perhaps not this model)."""


class ContextOverflow(BadRequest):
    """The input does not fit the model's context."""


def make_client(options: Options, key: str | None) -> openai.AsyncOpenAI:
    """The official client, over aiohttp where that extra is there: a third of the CPU, no wall at 1,000 requests."""
    try:
        import openai
    except ImportError:
        raise ConfigError("models/openai needs the openai package: pip install 'ngym[openai]'") from None
    for chatty in ("httpx", "httpx2"):  # they log a line for each request
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        http = openai.DefaultAioHttpClient()
    except RuntimeError:
        http = None
        log.warning(
            "openai's aiohttp transport is missing (pip install 'openai[aiohttp]'): requests will cost more CPU"
        )
    common: dict[str, Any] = {
        "api_key": key or "none",
        "timeout": options.timeout_s,
        "max_retries": options.max_retries,
        "http_client": http,
    }
    if options.azure:
        return openai.AsyncAzureOpenAI(azure_endpoint=options.base_url, api_version=options.azure.api_version, **common)
    return openai.AsyncOpenAI(base_url=options.base_url, **common)


class Upstream:
    """The endpoint: one client with its connections, and at most `max_concurrency` requests in flight."""

    def __init__(self, options: Options, client: openai.AsyncOpenAI) -> None:
        self._options = options
        self._client = client
        self._slots = asyncio.Semaphore(options.max_concurrency)

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """JSON to a path below base_url, JSON back. The client retries 429, 5xx and broken connections by itself.

        Raises:
            NotOffered: 404 or 405. ContextOverflow: the input is too long. BadRequest: any other fault of the request.
            Overloaded: still 429 after all retries. Unreachable, PeerTimeout, UpstreamError: as their names say.
        """
        import openai

        url = self._options.base_url.rstrip("/") + path
        try:
            async with asyncio.timeout(correlation.current.get().remaining_s()), self._slots:
                async with asyncio.timeout(self._options.timeout_s):
                    raw = await self._client.post(path, body=body, cast_to=bytes)
        except TimeoutError:
            raise self._too_slow(url) from None
        except openai.APIConnectionError as error:
            # httpx-aiohttp calls a refused or broken connection a ConnectTimeout, and openai calls that a timeout.
            if isinstance(error, openai.APITimeoutError) and type(error.__cause__).__name__ != "ConnectTimeout":
                raise self._too_slow(url) from None
            detail = f"{url} cannot be reached: {error.__cause__ or error}; is base_url right, and the endpoint up?"
            raise Unreachable(detail, upstream=self._peer(url)) from None
        except openai.APIStatusError as error:
            raise self._translated(error.status_code, error.body, url) from None
        return self._parsed(raw, url)

    def _too_slow(self, url: str) -> PeerTimeout:
        detail = f"{url} did not answer within {self._options.timeout_s:g} s (timeout_s) or the caller's deadline"
        return PeerTimeout(detail, upstream=self._peer(url))

    def _parsed(self, raw: bytes, url: str) -> dict[str, Any]:
        try:
            answer = orjson.loads(raw)
        except orjson.JSONDecodeError:
            answer = None
        if not isinstance(answer, dict):
            detail = f"{url} answered with no JSON object; does base_url end as it should (often in /v1)?"
            raise UpstreamError(detail, failure="model_error", upstream=self._peer(url, 200))
        return answer

    def _translated(self, status: int, body: object, url: str) -> ServiceError:
        """The endpoint's error as ours; for a refused key its own words are left out, they may quote it."""
        message, code = _words(body)
        peer = self._peer(url, status)
        if status in (401, 403):
            key = f"the key in {self._options.api_key_env}" if self._options.api_key_env else "a request without a key"
            detail = (
                f"{url} refused {key} ({status}); put a valid key into the environment variable named by api_key_env"
            )
            return UpstreamError(detail, failure="model_error", upstream=peer, retryable=False)
        if status in _NO_SUCH_PATH:
            detail = f"{url} answered {status} for model {self._options.model!r}: {message}"
            return NotOffered(detail, failure="model_error", upstream=peer)
        if status == 429:
            return Overloaded(f"{url} is still over its limit: {message}", failure="model_error", upstream=peer)
        if is_context_overflow(status, code, message):
            return ContextOverflow(message, failure="context_length", upstream=peer)
        if status < 500 and status not in _PASSING:
            return BadRequest(f"{url} refused the request: {message}", failure="model_error", upstream=peer)
        detail = f"{url} answered {status}: {message}"
        return UpstreamError(detail, failure="model_error", upstream=peer, retryable=True)

    def _peer(self, url: str, status: int | None = None) -> dict[str, Any]:
        return {"service": urlsplit(url).hostname, "url": url, "status": status}


def _words(body: object) -> tuple[str, str | None]:
    """An error body's message and code, in any of the shapes that servers use."""
    if isinstance(body, dict):
        inner = body.get("error", body)
        inner = inner if isinstance(inner, dict) else {"message": inner}
        text = inner.get("message") or inner.get("detail") or "no reason given"
        return _line(str(text)), str(inner["code"]) if inner.get("code") else None
    return _line(str(body or "no reason given")), None


def _line(text: str) -> str:
    return " ".join(text.split())[:300]
