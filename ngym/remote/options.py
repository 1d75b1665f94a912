"""The options of every remote model: its URL and key, and limits of rate and spending."""

from __future__ import annotations

import os
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ngym.net.auth import wrong_url
from ngym.remote.pace import Caps


class RemoteOptions(BaseModel):
    """A base class next to ModelOptions; subclasses give `base_url` and `api_key_env` the vendor's defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    base_url: str = Field(pattern="^https?://", description="The URL of the API.")
    api_key_env: str | None = Field(
        default=None,
        description="The variable that holds the key (never the key itself); null if no key is needed.",
    )
    timeout_s: float = Field(
        default=600, gt=0, description="Limit of one answer, from its start; each retry has its own."
    )
    max_concurrency: int = Field(
        default=256,
        ge=1,
        le=4096,
        description="The upper bound of requests in flight; the actual limit adapts to refusals.",
    )
    max_retries: int = Field(
        default=4, ge=0, le=20, description="Retries of one request: after 429, 5xx, broken connections."
    )
    retry_ratio: float = Field(
        default=0.2, ge=0, le=1, description="The share of a minute's requests that may be retried after a failure."
    )
    max_tokens_total: int | None = Field(
        default=None, ge=1, description="Limit of input and output tokens for this key; then all requests are refused."
    )
    max_spend: float | None = Field(default=None, gt=0, description="The same limit in money, by the prices below.")
    price_input: float | None = Field(default=None, ge=0, description="Per million tokens of input.")
    price_output: float | None = Field(default=None, ge=0, description="Per million tokens of output.")
    proxy: str | None = Field(
        default=None,
        pattern="^http://",
        description="A proxy for https; default: that of HTTPS_PROXY and NO_PROXY.",
    )

    @field_validator("base_url")
    @classmethod
    def _is_a_service(cls, url: str) -> str:
        if problem := wrong_url(url):
            raise ValueError(problem)
        return url

    @field_validator("api_key_env")
    @classmethod
    def _is_set(cls, name: str | None) -> str | None:
        if name and not os.environ.get(name):
            raise ValueError(
                f"the environment variable {name} is not set; export it, or write null if no key is needed"
            )
        return name

    @model_validator(mode="after")
    def _is_priced(self) -> RemoteOptions:
        if self.max_spend is not None and (self.price_input is None or self.price_output is None):
            raise ValueError("max_spend needs price_input and price_output, the price per million tokens")
        return self

    @property
    def key(self) -> str | None:
        return os.environ.get(self.api_key_env) if self.api_key_env else None

    def proxy_for_https(self) -> str | None:
        if self.proxy or proxy_bypass(urlsplit(self.base_url).hostname or ""):
            return self.proxy
        return getproxies().get("https")

    def caps(self) -> Caps:
        return Caps(self.max_tokens_total, self.max_spend, self.price_input or 0.0, self.price_output or 0.0)
