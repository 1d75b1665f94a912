"""The options of the service, and those of the weight push that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from ngym.services.models.server import ModelOptions


class Options(ModelOptions):
    model: str = Field(description="A Hugging Face folder (relative to the config file), or a name on the hub.")
    model_within_s: float = Field(
        default=0, ge=0, description="The folder may still be written for so long; it must come whole, by a rename."
    )
    served_name: str | None = Field(default=None, description="What requests call it; default: the service's name.")
    tool_call_parser: str | None = Field(
        default="auto", description="vLLM's, such as hermes; auto: that of the model's family; null: no tools."
    )
    reasoning_parser: str | None = Field(
        default="auto", description="vLLM's, such as qwen3; auto: that of the model's family; null: none."
    )
    engine: dict[str, Any] = Field(default_factory=dict, description="Any argument of `vllm serve`, by its name there.")
    kv_cache_mb: int = Field(default=64, ge=1, description="CPU only: the KV cache; all of it is used at once.")
    threads: int = Field(default=1, ge=1, description="CPU only: more help a large model, and ruin a tiny one.")
    lora_rank: int | None = Field(
        default=None,
        ge=1,
        le=512,
        description="Adapters of up to this rank can be pushed (transport lora); null: none.",
    )
    push_token: str | None = Field(
        default=None, min_length=16, description="Opens the weight push; default: ng_run's own, in .ngym/head.json."
    )
    push_lease_s: float = Field(default=60.0, gt=0, description="A pusher that is silent for so long is given up.")
    weights_root: Path | None = Field(
        default=None, description="A folder (relative to the config file) that a push may name files in; null: none."
    )


@dataclass(frozen=True)
class PushOptions:
    """token: None closes the push. root: the real folder of the filesystem transport; None: there is none.

    lora_rank: of adapters, at most; None: there are none.
    """

    token: str | None
    root: Path | None
    lease_s: float
    lora_rank: int | None
