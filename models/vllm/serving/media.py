"""Images, audio and video in requests: vLLM loads them; a file that cannot be read is the caller's fault."""

from __future__ import annotations

from typing import Any

from aiohttp import ClientError
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector

from .environment import MEDIA_CONNECTOR

SHOWN = 40  # characters of a URL
FETCH_FAILED = (ClientError, OSError)  # another host does not answer, or not in time; it may do so later
REMEDIES = {
    "one of the allowed domains": "this server does not fetch it; send a data: URL, or add its host to "
    "engine.allowed_media_domains in the service's stanza",
    "Cannot load local files": "this server reads no files; send a data: URL, or set engine.allowed_local_media_path in "
    "the service's stanza",
}
"""What to do, by a part of vLLM's message, which names an option of its command line or our default."""


def register_media_connector() -> None:
    """Make it the connector of this process, if VLLM_MEDIA_CONNECTOR names it, as prepare_environment does."""
    MEDIA_CONNECTOR_REGISTRY.register(MEDIA_CONNECTOR)(CheckedMediaConnector)


class CheckedMediaConnector(MediaConnector):
    """Answers 400 to every file that cannot be read, so no client repeats the request.

    vLLM alone answers 500 to some of them, such as an image with too many pixels.
    """

    async def load_from_url_async(self, url: str, media_io: Any, *, fetch_timeout: int | None = None) -> Any:
        try:
            return await super().load_from_url_async(url, media_io, fetch_timeout=fetch_timeout)
        except (VLLMClientError, MemoryError):
            raise
        except Exception as error:
            if isinstance(error, FETCH_FAILED) and url[:5].lower() not in ("data:", "file:"):
                raise
            raise VLLMValidationError(_problem(url, error)) from error


def _problem(url: str, error: Exception) -> str:
    shown = url if len(url) <= SHOWN else f"{url[:SHOWN]}..."
    said = str(error) or type(error).__name__
    reason = next((remedy for part, remedy in REMEDIES.items() if part in said), said)
    return f"{shown!r} cannot be read: {reason}"
