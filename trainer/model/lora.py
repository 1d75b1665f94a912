"""Low-rank adapters (LoRA, arXiv 2106.09685) through PEFT: small trained matrices next to frozen linear layers.

add(network, options)              # before the engine: only lora_A and lora_B of each target have gradients
with off(network): ...             # the network before training: the reference of KL
checkpoint_tensors(network)        # W + alpha / rank * B A under the name of W: a checkpoint like any other
adapter_tensors(network)           # A and B under PEFT's names
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ngym.did_you_mean import did_you_mean
from ngym.errors import ConfigError

from ..recipe.recipe import LoraOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "default"  # of the only adapter; PEFT omits it from the names in a file
PREFIX = "base_model.model."
BASE = ".base_layer."
MATRICES = (".lora_A.", ".lora_B.")
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's names


class Made(NamedTuple):
    """One tensor of a checkpoint. parameters: those it is computed from (ZeRO-3 must gather them first)."""

    name: str
    parameters: list[nn.Parameter]
    compute: Callable[[], Tensor]


def add(network: PreTrainedModel, options: LoraOptions) -> None:
    """Add an adapter to each target and freeze everything else. The network's outputs do not change.

    Raises:
        ConfigError: a target is not a linear layer of the decoder.
    """
    import peft

    known = _linear_layers(network)
    targets = list(options.targets or known)
    for target in targets:
        if target not in known:
            where = f"model.lora.targets: the decoder has no linear layer {target!r}"
            raise ConfigError(f"{where}{did_you_mean(target, known)}; it has {', '.join(known)}")
    peft.inject_adapter_in_model(
        peft.LoraConfig(
            r=options.rank, lora_alpha=options.alpha, lora_dropout=options.dropout, target_modules=targets, bias="none"
        ),
        network,
        NAME,
    )


@contextmanager
def off(network: nn.Module) -> Iterator[None]:
    """Within this block the network computes without its adapter."""
    layers = list(_adapted(network).values())
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def checkpoint_tensors(network: nn.Module) -> Iterator[Made]:
    """The network's tensors by their names in transformers, with adapters merged into copies; a tied tensor comes once."""
    adapted = _adapted(network)
    seen = set()
    for name, tensor in network.state_dict(keep_vars=True).items():
        if id(tensor) in seen or any(matrix in name for matrix in MATRICES):
            continue
        seen.add(id(tensor))
        layer_name, base, field = name.rpartition(BASE)
        if not base or field != "weight":
            yield Made(name.replace(BASE, "."), _gathered(tensor), tensor.detach)
            continue
        layer = adapted[layer_name]
        parameters = [tensor, layer.lora_A[NAME].weight, layer.lora_B[NAME].weight]
        yield Made(f"{layer_name}.{field}", parameters, lambda layer=layer: _merged(layer))  # type: ignore[misc]


def adapter_tensors(network: nn.Module) -> Iterator[Made]:
    """The adapter's own tensors, by PEFT's names in a file."""
    for name, layer in _adapted(network).items():
        for matrix, weight in (("lora_A", layer.lora_A[NAME].weight), ("lora_B", layer.lora_B[NAME].weight)):
            yield Made(f"{PREFIX}{name}.{matrix}.weight", [weight], weight.detach)


def write(folder: Path, tensors: dict[str, Tensor], options: LoraOptions, base: str | None) -> None:
    """Write an adapter in the format of `peft.PeftModel.from_pretrained` and vLLM.

    base: the model that it belongs to.
    """
    from safetensors.torch import save_file

    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
    described = {**_described(tensors, options), "base_model_name_or_path": base}
    (folder / CONFIG).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def _described(tensors: dict[str, Tensor], options: LoraOptions) -> dict[str, Any]:
    layers = {name.removeprefix(PREFIX).rsplit(".", 2)[0] for name in tensors}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": options.rank,
        "lora_alpha": options.alpha,
        "lora_dropout": options.dropout,
        "target_modules": sorted({layer.rpartition(".")[2] for layer in layers}),
        "bias": "none",
    }


def _merged(layer: Any) -> Tensor:
    """The merged weight, computed in float32 and rounded once; the layer's own weights do not change."""
    weight = layer.get_base_layer().weight.detach()
    low_rank = layer.lora_B[NAME].weight.detach().float() @ layer.lora_A[NAME].weight.detach().float()
    return torch.add(weight.float(), low_rank, alpha=layer.scaling[NAME]).to(weight.dtype)


def _adapted(network: nn.Module) -> dict[str, Any]:
    """The layers that have an adapter, by name."""
    return {name: module for name, module in network.named_modules() if hasattr(module, "lora_A")}


def _linear_layers(network: PreTrainedModel) -> list[str]:
    """The last parts of the names of the decoder's linear layers, in order."""
    linear = (name for name, module in network.get_decoder().named_modules() if isinstance(module, nn.Linear))
    return list(dict.fromkeys(name.rpartition(".")[2] for name in linear))


def _gathered(tensor: Tensor) -> list[nn.Parameter]:
    return [tensor] if isinstance(tensor, nn.Parameter) else []  # buffers are never sharded
