"""gpt-oss copies its experts and sinks straight into their tensors, which vLLM's reloading does not see: it is shown them here.

Reloading puts tensors without memory in the place of a layer's, and waits until their loaders have been called for all of
them. Experts that are copied past the loaders would stay what they were, without a word; so would sinks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from vllm.model_executor.model_loader.reload import inplace
from vllm.model_executor.model_loader.reload.layerwise import make_online_process_loader
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.gpt_oss import GptOssForCausalLM

EXPERTS = ("w13_weight", "w13_bias", "w2_weight", "w2_bias")


@contextmanager
def copies_seen(model: nn.Module) -> Iterator[None]:
    """While it lasts, vLLM's reloading of a gpt-oss sees what is copied into its experts."""
    vllms = inplace.initialize_layerwise_reload
    if isinstance(model, GptOssForCausalLM):
        inplace.initialize_layerwise_reload = partial(_begin, vllms)
    try:
        yield
    finally:
        inplace.initialize_layerwise_reload = vllms


def load_sinks(model: nn.Module, folder: Path) -> None:
    """Those of a checkpoint, into a gpt-oss; nothing, into another model."""
    if not isinstance(model, GptOssForCausalLM):
        return
    parameters = dict(model.named_parameters())
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors, torch.no_grad():
            for name in (name for name in tensors.keys() if name.endswith(".sinks")):  # noqa: SIM118  (no mapping)
                parameters[name.replace(".self_attn.", ".attn.")].copy_(tensors.get_tensor(name))


def _begin(vllms: object, model: nn.Module) -> None:
    vllms(model)  # type: ignore[operator]
    for layer in model.modules():
        for name in EXPERTS:
            tensor = layer._parameters.get(name)
            if tensor is not None:
                tensor.weight_loader = default_weight_loader  # the copy is already cut and turned for this worker
                tensor.weight_loader = make_online_process_loader(layer, name)
                tensor.copy_ = partial(tensor.weight_loader, tensor)
