"""URLs and credentials of an endpoint: an API key, or a token of Microsoft Entra."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import orjson
from pydantic import BaseModel, ConfigDict, Field, model_validator

from ngym.errors import ConfigError, UpstreamError
from ngym.remote import Headers

log = logging.getLogger("ngym.access")

SCOPE = "https://cognitiveservices.azure.com/.default"
COMMAND_S = 60.0
RETRY_INTERVAL_S = 30.0  # retry interval of a failed command while the last token is valid
RENEW_BEFORE_S = 300.0  # before a token expires, or half its time; one without an expiry is renewed after this time


class Azure(BaseModel):
    """Options of Azure OpenAI; the endpoint is `base_url`. Without entra and token_*: the key of api_key_env."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    api_version: str | None = Field(
        default=None, description="Such as 2025-04-01-preview; default: the v1 API, which needs none."
    )
    deployment: str | None = Field(default=None, description="The deployment's name, if it differs from the model's.")
    entra: bool = Field(default=False, description="Use tokens of azure-identity's DefaultAzureCredential.")
    token_env: str | None = Field(default=None, description="The environment variable that holds a token.")
    token_command: tuple[str, ...] = Field(
        default=(),
        description="A program and its arguments that print a token; it runs again before the token expires.",
    )

    @model_validator(mode="after")
    def _check_one_key(self) -> Azure:
        if sum((self.entra, self.token_env is not None, bool(self.token_command))) > 1:
            raise ValueError("give one of entra, token_env and token_command")
        if self.token_env and not os.environ.get(self.token_env):
            raise ValueError(f"the environment variable {self.token_env} is not set; export it")
        return self


def address(base_url: str, azure: Azure | None) -> Callable[[str], str] | None:
    """A function from path to Azure URL (Chat is below its deployment, Responses is not); None for other endpoints."""
    if azure is None:
        return None
    root = base_url.rstrip("/").removesuffix("/openai/v1").removesuffix("/openai") + "/openai"
    if azure.api_version is None:
        return lambda path: f"{root}/v1{path}"
    deployment = f"/deployments/{azure.deployment}" if azure.deployment else ""
    query = f"?api-version={azure.api_version}"
    return lambda path: f"{root}{deployment if path == '/chat/completions' else ''}{path}{query}"


@asynccontextmanager
async def headers(azure: Azure | None, key: str | None) -> AsyncIterator[Headers]:
    """The authentication headers of each request. Raises ConfigError: azure-identity is needed but not installed."""
    if azure is not None and azure.entra:
        async with _entra() as token:
            yield _bearer(token)
    elif azure is not None and azure.token_command:
        yield _bearer(_Command(azure.token_command).token)
    elif azure is not None and azure.token_env:
        yield _always({"authorization": f"Bearer {os.environ[azure.token_env]}"})
    elif azure is not None:
        yield _always({"api-key": key or "none"})
    else:
        yield _always({"authorization": f"Bearer {key}"} if key else {})


def _always(fixed: dict[str, str]) -> Headers:
    async def headers() -> dict[str, str]:
        return fixed

    return headers


def _bearer(token: Callable[[], Awaitable[str]]) -> Headers:
    async def headers() -> dict[str, str]:
        return {"authorization": f"Bearer {await token()}"}

    return headers


@asynccontextmanager
async def _entra() -> AsyncIterator[Callable[[], Awaitable[str]]]:
    """A token from azure-identity, which caches and renews it."""
    try:
        from azure.core.exceptions import AzureError, ClientAuthenticationError
        from azure.identity.aio import DefaultAzureCredential, get_bearer_token_provider

        credential = DefaultAzureCredential()  # without aiohttp it cannot be made
    except ImportError:
        raise ConfigError(
            "azure.entra needs azure-identity: pip install azure-identity aiohttp; or give azure.token_command,"
            " such as [az, account, get-access-token, --resource, https://cognitiveservices.azure.com,"
            " --query, accessToken, --output, tsv]"
        ) from None
    async with credential:
        provided = get_bearer_token_provider(credential, SCOPE)

        async def token() -> str:
            try:
                provided_token: str = await provided()
                return provided_token
            except AzureError as error:
                message = " ".join(str(error.message).split())[:300]
                retryable = not isinstance(error, ClientAuthenticationError)  # a renewal met a broken network
                detail = f"azure.entra: no token from azure-identity: {message}"
                raise UpstreamError(detail, failure="config", retryable=retryable) from None

        yield token


class _Command:
    """A token that a program prints; concurrent requests share one run."""

    def __init__(self, command: tuple[str, ...]) -> None:
        self._command = command
        self._token = ""
        self._renewed_at = 0.0
        self._valid_until = 0.0
        self._running = asyncio.Lock()

    async def token(self) -> str:
        async with self._running:
            if time.time() >= self._renewed_at:
                await self._renew()
            return self._token

    async def _renew(self) -> None:
        """Renew the token. If that fails, keep using the old one while it is valid."""
        try:
            self._token = await self._run()
        except UpstreamError as error:
            if time.time() >= self._valid_until:
                raise
            log.warning("%s; the current token is valid for %.0f s more", error.detail, self._valid_until - time.time())
            self._renewed_at = min(time.time() + RETRY_INTERVAL_S, self._valid_until)
            return
        self._valid_until = _expires(self._token)
        remaining = self._valid_until - time.time()
        self._renewed_at = self._valid_until - min(RENEW_BEFORE_S, remaining / 2)

    async def _run(self) -> str:
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(*self._command, stdout=pipe, stderr=pipe)
        except OSError as error:
            raise UpstreamError(f"azure.token_command: {self._command[0]}: {error}", failure="config") from None
        try:
            async with asyncio.timeout(COMMAND_S):
                printed, complaint = await process.communicate()
        except TimeoutError:
            detail = f"azure.token_command {self._command[0]!r} printed no token within {COMMAND_S:g} s"
            raise UpstreamError(detail, failure="config", retryable=True) from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        token = printed.decode(errors="replace").strip()
        if process.returncode or not token or not token.isascii() or any(c.isspace() for c in token):
            last = complaint.decode(errors="replace").strip().rpartition("\n")[2][:200] or "it printed no token"
            detail = f"azure.token_command {self._command[0]!r} ended with {process.returncode}: {last}"
            raise UpstreamError(detail, failure="config")
        return token


def _expires(token: str) -> float:
    """The time when a JSON web token expires, in seconds since 1970; the signature is not checked."""
    try:
        payload = token.split(".")[1]
        return float(orjson.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))["exp"])
    except (IndexError, KeyError, TypeError, ValueError, binascii.Error):
        return time.time() + 2 * RENEW_BEFORE_S
