"""What a recipe says about where it is computed: precision, ZeRO, what lives on the CPU, and what ranks share."""

from __future__ import annotations

from typing import Literal

from pydantic import ValidationInfo, field_validator

from .base import Positive, Record


class OffloadOptions(Record):
    """What lives in the memory of the CPU instead of the GPU's, and is slower there.

    optimizer: its states, the float32 weights and the gradients; the step is taken on the CPU.
    parameters: the weights too, as long as no layer needs them.
    """

    optimizer: Literal["cpu"] | None = None
    parameters: Literal["cpu"] | None = None

    @field_validator("parameters")
    @classmethod
    def _optimizer_too(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("optimizer") is None:
            raise ValueError("the optimizer's states are several times larger; set engine.offload.optimizer, too")
        return value


class EngineOptions(Record):
    """How DeepSpeed runs it.

    zero_stage: what ranks share out: 1 the optimizer's states, 2 gradients too, 3 weights too.
    precision: of weights and arithmetic; bf16 keeps float32 master weights.
    activation_checkpointing: layers keep their inputs only, and are computed again for the backward: less memory, more time.
    compile: layers through torch.compile; it takes its time in the first step, and pays in runs of more than a few minutes.
    sequence_parallel: so many ranks share each micro-batch: its tokens, and in attention its heads.
    tensor_parallel: so many ranks share each layer.
    """

    zero_stage: Literal[0, 1, 2, 3] = 0
    precision: Literal["fp32", "bf16"] = "fp32"
    activation_checkpointing: bool = False
    compile: bool = False
    offload: OffloadOptions = OffloadOptions()
    sequence_parallel: Positive = 1
    tensor_parallel: Positive = 1

    @field_validator("precision")
    @classmethod
    def _master_weights(cls, value: str, info: ValidationInfo) -> str:
        if value == "bf16" and info.data.get("zero_stage") == 0:
            raise ValueError("the float32 master weights of bf16 live in ZeRO; set engine.zero_stage to 1, 2 or 3")
        return value

    @property
    def together(self) -> int:
        """The ranks that compute the same samples."""
        return self.sequence_parallel * self.tensor_parallel

    @field_validator("tensor_parallel")
    @classmethod
    def _one_way_to_share(cls, value: int, info: ValidationInfo) -> int:
        if value > 1 and info.data.get("zero_stage") not in (1, 2):
            raise ValueError("it trains with ZeRO 1 and 2 only; set engine.zero_stage to 1 or 2")
        if value > 1 and info.data.get("sequence_parallel", 1) > 1:
            raise ValueError("engine.sequence_parallel is given too; keep one of the two")
        if value > 1 and info.data.get("compile"):
            raise ValueError("engine.compile is given too, and it exchanges layers; keep one of the two")
        if value > 1 and info.data.get("offload") != OffloadOptions():
            raise ValueError("engine.offload is given too; keep one of the two")
        return value

    @field_validator("compile")
    @classmethod
    def _whole_layers(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("zero_stage") == 3:
            raise ValueError("ZeRO-3 gathers weights while a layer runs; set engine.zero_stage to 0, 1 or 2")
        return value

    @field_validator("offload")
    @classmethod
    def _of_zero(cls, value: OffloadOptions, info: ValidationInfo) -> OffloadOptions:
        stage = info.data.get("zero_stage")
        if value.optimizer is not None and stage == 0:
            raise ValueError("ZeRO moves them; set engine.zero_stage to 1, 2 or 3")
        if value.parameters is not None and stage != 3:
            raise ValueError("parameters are moved by ZeRO-3 only; set engine.zero_stage to 3")
        return value
