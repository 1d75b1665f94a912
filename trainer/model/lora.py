"""Low-rank adapters (LoRA, arXiv 2106.09685) from PEFT: small trained matrices next to frozen linear layers; and the
tensors of a checkpoint.

add_adapter(network, options)      # before the engine: only lora_A and lora_B of each target have gradients
with adapter_off(network): ...     # the network before training: the reference of KL
checkpoint_tensors(network)        # W + alpha / rank * B A under the name of W: a checkpoint like any other
adapter_tensors(network)           # A and B under PEFT's names
write_base(folder, network, ...)   # of a 4-bit base: the dequantized weights, for servers that get only the adapter
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ngym.did_you_mean import did_you_mean
from ngym.errors import ConfigError
from ngym.files.atomic import whole_folder
from ngym.runtime.lean_imports import name_dtensor

from ..recipe.recipe import LoraOptions
from .images import copy_processor, has_vision

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ADAPTER = "default"  # of the only adapter; PEFT omits it from the names in a file
PEFT_PREFIX = "base_model.model."
BASE_LAYER = ".base_layer."
LORA_MATRICES = (".lora_A.", ".lora_B.")
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's names


class CheckpointTensor(NamedTuple):
    """One tensor of a checkpoint. parameters: those it is computed from (ZeRO-3 must gather them first)."""

    name: str
    parameters: list[nn.Parameter]
    compute: Callable[[], Tensor]


def add_adapter(network: PreTrainedModel, options: LoraOptions) -> None:
    """Add an adapter to each target and freeze everything else. The network's outputs do not change.

    Raises:
        ConfigError: a target is not a linear layer of the decoder.
    """
    linear = [name for name, module in network.get_decoder().named_modules() if isinstance(module, nn.Linear)]
    names = list(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    targets = list(options.targets or names)
    for target in targets:
        if target not in names:
            problem = f"model.lora.targets: the decoder has no linear layer {target!r}"
            raise ConfigError(f"{problem}{did_you_mean(target, names)}; it has {', '.join(names)}")
    if has_vision(network):  # whose layers may have the same names
        modules = {id(module) for module in network.get_decoder().modules()}
        targets = [
            name
            for name, module in network.named_modules()
            if id(module) in modules and isinstance(module, nn.Linear) and name.rpartition(".")[2] in targets
        ]
    sizes = {"r": options.rank, "lora_alpha": options.alpha, "lora_dropout": options.dropout}
    with _import_peft() as peft:
        peft.inject_adapter_in_model(peft.LoraConfig(**sizes, target_modules=targets, bias="none"), network, ADAPTER)


@contextmanager
def _import_peft() -> Iterator[Any]:
    """peft, which does not see an installed bitsandbytes within this block, unless that is imported already: its import
    takes a second of CPU time, and PEFT's layers for it are not used.
    """
    hides = not {"peft", "bitsandbytes"} & sys.modules.keys()
    if hides:
        sys.modules["bitsandbytes"] = None  # type: ignore[assignment]
    try:
        import peft

        name_dtensor()
        yield peft
    finally:
        if hides:
            del sys.modules["bitsandbytes"]
            from peft import import_utils

            import_utils.is_bnb_available.cache_clear()
            import_utils.is_bnb_4bit_available.cache_clear()


@contextmanager
def adapter_off(network: nn.Module) -> Iterator[None]:
    """Within this block the network computes without its adapter."""
    layers = list(_adapted_layers(network).values())
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def checkpoint_tensors(network: nn.Module) -> Iterator[CheckpointTensor]:
    """The network's tensors by their names in transformers, with adapters merged into copies; a tied tensor comes once.

    4-bit weights come dequantized, on the CPU: whole ones might not fit where they are.
    """
    adapted_layers = _adapted_layers(network)
    packed = {name: module for name, module in network.named_modules() if hasattr(module, "dequantized")}
    tensor_ids = set()
    for name, tensor in network.state_dict(keep_vars=True).items():
        if id(tensor) in tensor_ids or any(matrix in name for matrix in LORA_MATRICES):
            continue
        tensor_ids.add(id(tensor))
        layer_name, base, field = name.rpartition(BASE_LAYER)
        if not base and name.removesuffix(".weight") in packed:
            layer, dtype = packed[name.removesuffix(".weight")], network.dtype
            yield CheckpointTensor(name, [tensor], lambda layer=layer, dtype=dtype: layer.dequantized(dtype).cpu())  # type: ignore[misc]
            continue
        if not base or field != "weight":
            gathered = [tensor] if isinstance(tensor, nn.Parameter) else []  # buffers are never sharded
            yield CheckpointTensor(name.replace(BASE_LAYER, "."), gathered, tensor.detach)
            continue
        layer = adapted_layers[layer_name]
        parameters = [tensor, layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight]
        yield CheckpointTensor(f"{layer_name}.{field}", parameters, lambda layer=layer: _merge(layer))  # type: ignore[misc]


def adapter_tensors(network: nn.Module) -> Iterator[CheckpointTensor]:
    """The adapter's own tensors, by PEFT's names in a file."""
    for name, layer in _adapted_layers(network).items():
        for matrix, weight in (("lora_A", layer.lora_A[ADAPTER].weight), ("lora_B", layer.lora_B[ADAPTER].weight)):
            yield CheckpointTensor(f"{PEFT_PREFIX}{name}.{matrix}.weight", [weight], weight.detach)


def write_adapter(
    folder: Path, tensors: dict[str, Tensor], options: LoraOptions, base: str | None, *, whole_names: bool = False
) -> None:
    """Write an adapter in the format of `peft.PeftModel.from_pretrained` and vLLM.

    base: the model that it belongs to. whole_names: for a network in which other layers have the same last names.
    """
    from safetensors.torch import save_file

    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder / ADAPTER_WEIGHTS)
    layers = {name.removeprefix(PEFT_PREFIX).rsplit(".", 2)[0] for name in tensors}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": options.rank,
        "lora_alpha": options.alpha,
        "lora_dropout": options.dropout,
        "target_modules": sorted(layers if whole_names else {layer.rpartition(".")[2] for layer in layers}),
        "bias": "none",
        "base_model_name_or_path": base,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _merge(layer: Any) -> Tensor:
    """The merged weight, computed in float32 and rounded once; the layer's own weights do not change. With a 4-bit base
    on the CPU.
    """
    base, up, down = (
        layer.get_base_layer(),
        layer.lora_B[ADAPTER].weight.detach(),
        layer.lora_A[ADAPTER].weight.detach(),
    )
    quantized = hasattr(base, "dequantized")
    weight = base.dequantized(up.dtype) if quantized else base.weight.detach()
    merged = torch.add(weight.float(), up.float() @ down.float(), alpha=layer.scaling[ADAPTER]).to(weight.dtype)
    return merged.cpu() if quantized else merged


def write_base(folder: Path, network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, dtype: str) -> None:
    """Commit a Hugging Face folder of a network with a new adapter, dequantized: for servers that will get the adapter.

    dtype: of the trainer's arithmetic, in torch's name, so that both compute with the same weights.
    """
    from transformers.core_model_loading import revert_weight_conversion

    # A new adapter adds exact zeros.
    tensors = {name: compute().to("cpu", getattr(torch, dtype)) for name, _, compute in checkpoint_tensors(network)}
    with whole_folder(folder) as temporary:
        network.save_pretrained(
            temporary, state_dict=revert_weight_conversion(network, tensors), save_original_format=False
        )
        tokenizer.save_pretrained(temporary)
        copy_processor(network, temporary)
        config = temporary / "config.json"  # with the dtype of the network, which is still float32
        settings = json.loads(config.read_bytes()) | {"dtype": dtype}
        config.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _adapted_layers(network: nn.Module) -> dict[str, Any]:
    """The layers that have an adapter, by name."""
    return {name: module for name, module in network.named_modules() if hasattr(module, "lora_A")}
