"""What is trained: the weights of a model, new ones of some shape, or an adapter beside weights."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator

from .base import ModelName, Positive, Record, Share


class Qwen3Shape(Record):
    """A new Qwen3 network. The vocabulary is the tokenizer's.

    hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim, max_position_embeddings,
    tie_word_embeddings, rope_theta: as in its Hugging Face config.
    """

    hidden_size: Positive
    intermediate_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    head_dim: Positive
    max_position_embeddings: Positive
    tie_word_embeddings: bool = True
    rope_theta: float = Field(default=10000.0, gt=0)
    initializer_range: float = Field(default=0.02, gt=0, description="Standard deviation of the first weights.")


class LoraOptions(Record):
    """A low-rank adapter is trained instead of the weights.

    rank: of its matrices.
    alpha: what the adapter adds is multiplied by alpha / rank.
    targets: the last words of the names of linear layers; null: all of the decoder.
    dropout: on the adapter's input; none in reinforcement learning.
    """

    rank: Positive = 16
    alpha: Positive = 32
    targets: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    dropout: Share = 0.0


class ModelOptions(Record):
    """What is trained: the weights of `path`, or new ones of the shape `from_scratch`.

    path: a Hugging Face folder, or owner/name of the hub.
    """

    path: ModelName | None = None
    from_scratch: Qwen3Shape | None = None
    lora: LoraOptions | None = None
    tokenizer: ModelName | None = Field(default=None, validate_default=True, description="Default: that of `path`.")

    @field_validator("from_scratch")
    @classmethod
    def _one_origin(cls, value: Qwen3Shape | None, info: ValidationInfo) -> Qwen3Shape | None:
        if value is not None and info.data.get("path") is not None:
            raise ValueError("model.path is given too; keep one of the two")
        return value

    @field_validator("lora")
    @classmethod
    def _beside_learned_weights(cls, value: LoraOptions | None, info: ValidationInfo) -> LoraOptions | None:
        if value is not None and info.data.get("from_scratch") is not None:
            raise ValueError("an adapter stands beside weights that have learned something; name them with model.path")
        return value

    @field_validator("tokenizer")
    @classmethod
    def _some_origin(cls, value: str | None, info: ValidationInfo) -> str | None:
        if "path" not in info.data or "from_scratch" not in info.data:
            return value  # they have an error of their own
        if info.data["path"] is None and info.data["from_scratch"] is None:
            raise ValueError("name a model: model.path=FOLDER, or model.from_scratch with a shape")
        if info.data["from_scratch"] is not None and value is None:
            raise ValueError("a model from scratch needs a tokenizer, such as data/tiny_policy/tokenizer")
        return value
