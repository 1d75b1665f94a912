"""The adapter of an engine with `lora_rank`: at first one without effect, then the one that was pushed last.

It always has the same id, so a generation that began before a push continues with the pushed adapter.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from vllm.lora.request import LoRARequest

from ngym.errors import ConfigError, ServiceError
from ngym.weight_push.stage import PEFT_ENDS, PEFT_PREFIX, AdapterFiles, AdapterShape, PrivateFolder, Shapes

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM

NAME, ID = "pushed", 1
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's names, which vLLM reads


def linear_layers(config: VllmConfig, service: str) -> list[str]:
    """The decoder's linear layers, which an adapter may change, by the last part of their names, as in the trainer.

    Not the head, which vLLM would include: on a CPU, the logprobs of a prompt would then end the engine process.

    Raises:
        ConfigError: transformers does not know such a model, or it has no linear layers.
    """
    try:
        with torch.device("meta"):
            decoder = AutoModelForCausalLM.from_config(config.model_config.hf_config).get_decoder()
    except (OSError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(f"service {service!r}: lora_rank: no adapters for this model: {reason}") from error
    names = [name.rpartition(".")[2] for name, module in decoder.named_modules() if isinstance(module, torch.nn.Linear)]
    if not names:
        raise ConfigError(f"service {service!r}: lora_rank: this model has no linear layers for adapters")
    return sorted(set(names))


def adapted_matrices(layers: Sequence[str], shapes: Shapes) -> Shapes:
    """The weight matrices [out, in] of our checkpoint in these layers."""
    return {
        name: shape
        for name, shape in shapes.items()
        if len(shape) == 2 and name.endswith(".weight") and name.split(".")[-2] in layers
    }


class Adapter:
    """The engine's only adapter.

    Attributes:
        request: identifies the adapter in a call to the engine.
    """

    def __init__(self, engine: AsyncLLM, nothing: PrivateFolder) -> None:
        self._engine = engine
        self._empty_adapter = self._served_adapter = nothing
        self.request = _request(nothing)

    @classmethod
    async def of(cls, engine: AsyncLLM, matrices: Shapes) -> Self:
        """Load an adapter without effect.

        matrices: those that an adapter may change.
        """
        # vLLM refuses an adapter without tensors.
        name, (rows, columns) = next(iter(matrices.items()))
        ends = zip(PEFT_ENDS, ((1, columns), (rows, 1)), strict=True)
        nothing = {f"{PEFT_PREFIX}{name.removesuffix('.weight')}{end}": torch.zeros(size) for end, size in ends}
        adapter = cls(engine, _as_peft(nothing, AdapterShape(rank=1, alpha=1)))
        await adapter.clear()
        return adapter

    async def clear(self) -> None:
        """Load the adapter without effect."""
        await self._engine.add_lora(_request(self._empty_adapter, replace=True))
        self._keep(self._empty_adapter)

    async def replace(self, files: AdapterFiles) -> None:
        """Replace the adapter by this one. Raises ServiceError: vLLM refuses it; the old one is loaded again."""
        tensors = {
            name: tensor
            for file in sorted(files.folder.glob("*.safetensors"))
            for name, tensor in load_file(file).items()
        }
        new = _as_peft(tensors, files.shape)
        try:
            await self._engine.add_lora(_request(new, replace=True))
        except Exception as error:
            # Some of several workers may have loaded it.
            await self._engine.add_lora(_request(self._served_adapter, replace=True))
            new.remove()
            raise ServiceError(f"vLLM refuses this adapter: {error}", status=422) from error
        self._keep(new)

    def _keep(self, served: PrivateFolder) -> None:
        if self._served_adapter not in (served, self._empty_adapter):
            self._served_adapter.remove()
        self._served_adapter = served


def _request(folder: PrivateFolder, *, replace: bool = False) -> LoRARequest:
    """replace: only to load; in the request of a generation it would read the adapter from disk at every token."""
    return LoRARequest(NAME, ID, str(folder.path), load_inplace=replace)


def _as_peft(tensors: dict[str, Tensor], shape: AdapterShape) -> PrivateFolder:
    folder = PrivateFolder(sum(tensor.nbytes for tensor in tensors.values()) + (1 << 20))
    layers = {name.removeprefix(PEFT_PREFIX).rsplit(".", 2)[0] for name in tensors}
    described = {
        "peft_type": "LORA",
        "r": shape.rank,
        "lora_alpha": shape.alpha,
        "target_modules": sorted({layer.rpartition(".")[2] for layer in layers}),
        "bias": "none",
    }
    save_file(tensors, folder.path / WEIGHTS)
    (folder.path / CONFIG).write_text(json.dumps(described), encoding="utf-8")
    return folder
