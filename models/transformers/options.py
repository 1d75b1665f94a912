"""The options of the service: apart from app.py, because engine.py needs them, too."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ngym.services.models.server import TrainableModelOptions


class Options(TrainableModelOptions):
    model: str = Field(description="A Hugging Face folder (relative to the config file), or a name on the hub.")
    served_name: str | None = Field(
        default=None, description="The model's name in answers; default: the service's name."
    )
    device: str = Field(default="auto", description="As torch names it; auto: a GPU if torch finds one, else the CPU.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(default="float32", description="Of the weights.")
    threads: int | None = Field(
        default=None,
        ge=1,
        description="CPU only; default: one, and another for every 10 million parameters, up to the cores.",
    )
    context: int | None = Field(default=None, ge=1, description="In tokens; default: the model's own.")
    batch: int = Field(
        default=256, ge=1, description="The most answers that are sampled at once; more requests wait for them."
    )
    kv_cache_mb: int | None = Field(
        default=None,
        ge=1,
        description="Limit of the KV cache of all answers and of kept prefixes; one answer alone may exceed it. Default: "
        "4,096, on a CPU at most a quarter of the free memory; all replicas together at most half.",
    )
    routed_experts: bool = Field(
        default=False,
        description="Record the experts of each token of a mixture of experts, for `algorithm.routing_replay` of a trainer.",
    )
    trust_remote_code: bool = Field(default=False, description="Run code that comes with the model.")
