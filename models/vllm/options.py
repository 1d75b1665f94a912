"""The options of the service."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ngym.services.models.server import TrainableModelOptions


class Node(BaseModel):
    """One node of a replica that runs on several, as `ngym/supervise/node_group.py` writes it."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    rank: int = Field(ge=0, description="0 serves; the others compute a part of the model.")
    count: int = Field(ge=2, description="The nodes of the replica.")
    address: str = Field(description="Of this node, for the others.")
    master_addr: str = Field(description="Of rank 0.")
    master_port: int = Field(description="Of rank 0, for torch.distributed.")
    seed: int = Field(description="Common to all: each node samples the same tokens for itself.")

    @property
    def arguments(self) -> dict[str, Any]:
        """vLLM's arguments of this node."""
        return {
            "nnodes": self.count,
            "node_rank": self.rank,
            "master_addr": self.master_addr,
            "master_port": self.master_port,
        }


KV_TOKENS = 16_384
KV_MIN, KV_MAX = 64 << 20, 4096 << 20  # bytes


class Options(TrainableModelOptions):
    model: str = Field(description="A Hugging Face folder (relative to the config file), or a name on the hub.")
    served_name: str | None = Field(
        default=None, description="The model's name in the API; default: the service's name."
    )
    tool_call_parser: str | None = Field(
        default="auto",
        description="A parser of vLLM, such as hermes; auto: that of the model's family; null: no tools.",
    )
    reasoning_parser: str | None = Field(
        default="auto", description="A parser of vLLM, such as qwen3; auto: that of the model's family; null: none."
    )
    engine: dict[str, Any] = Field(default_factory=dict, description="Any argument of `vllm serve`, by its name there.")
    node: Node | None = Field(default=None, description="Set by ng_run for a stanza with `nodes`.")
    kv_cache_mb: int | None = Field(
        default=None,
        ge=1,
        description="CPU only: the size of the KV cache, allocated at the start; default: room for 16,384 tokens or one "
        "context, from 64 to 4,096 MB and at most a quarter of the free memory; all replicas together at most half.",
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        description="CPU only; default: one, and another for every 10 million parameters, up to the cores.",
    )
    bundle_tokens: bool | Literal["auto"] = Field(
        default=False,
        description="CPU only, vLLM 0.32: send the tokens of an answer in bundles, for more tokens/s of a tiny model; "
        "auto: unless this is another vLLM.",
    )
    lora_rank: int | None = Field(
        default=None,
        ge=1,
        le=512,
        description="Adapters of up to this rank can be pushed (transport lora); null: none.",
    )


def kv_cache_bytes(per_token: int, context: int, share: int) -> int:
    """The default size of the KV cache on a CPU.

    Args:
        per_token: bytes of a token in all layers.
        context: the most tokens of a conversation.
        share: bytes of memory that a KV cache of this process may take.
    """
    return max(KV_MIN, min(max(KV_TOKENS, context) * per_token, KV_MAX, share))
