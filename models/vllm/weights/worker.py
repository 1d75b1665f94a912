"""The extension of vLLM's workers that loads pushed weights; the expert layout of gpt-oss.

Reloading puts tensors without memory in the place of a layer's, and waits until their loaders have been called for all of
them. Experts that are copied past the loaders would stay what they were, without a word; so would sinks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.model_loader.reload import inplace
from vllm.model_executor.model_loader.reload.layerwise import make_online_process_loader
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.gpt_oss import GptOssForCausalLM

if TYPE_CHECKING:
    from vllm.v1.worker.cpu_worker import CPUWorker


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


def _begin(vllms: Callable[[nn.Module], None], model: nn.Module) -> None:
    vllms(model)
    for layer in model.modules():
        for name in EXPERTS:
            tensor: Any = layer._parameters.get(name)  # vLLM hangs its loaders on parameters
            if tensor is not None:
                tensor.weight_loader = default_weight_loader  # the copy is already cut and turned for this worker
                tensor.weight_loader = make_online_process_loader(layer, name)
                tensor.copy_ = partial(tensor.weight_loader, tensor)


class Repacking:
    """Methods that vLLM adds to its worker class (`worker_extension_cls`)."""

    def reload_packed_weights(self: CPUWorker, weights_path: str) -> None:
        """Reload so that every kernel multiplies with the new weights; without this, logprobs are off by nats."""
        model = self.model_runner.get_model()
        _have_experts_packed(model)
        with copies_seen(model):
            self.reload_weights(weights_path=weights_path)
        load_sinks(model, Path(weights_path))
        with set_current_vllm_config(self.vllm_config):
            _pack_tied_heads(model)

    def start_packed_update(self: CPUWorker) -> None:
        """vLLM's start_weight_update, for a weight transfer that a plugin brings to a CPU."""
        _have_experts_packed(self.model_runner.get_model())
        self.start_weight_update()

    def finish_packed_update(self: CPUWorker) -> None:
        """vLLM's finish_weight_update, after which every kernel multiplies with the new weights."""
        self.finish_weight_update()
        with set_current_vllm_config(self.vllm_config):
            _pack_tied_heads(self.model_runner.get_model())


def _have_experts_packed(model: nn.Module) -> None:
    """Experts that have a kernel would be reloaded without being packed for it."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


def _pack_tied_heads(model: nn.Module) -> None:
    """No tensor of a checkpoint belongs to a head that shares the embedding's: vLLM would keep its packed copy."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and weight is not None and weight.numel() > 0:
            method: Any = module.quant_method
            method.process_weights_after_loading(module)
