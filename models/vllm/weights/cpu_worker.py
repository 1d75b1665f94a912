"""The extension of vLLM's CPU worker that loads pushed weights, with fixes for gpt-oss.

Reloading replaces a layer's tensors by ones without memory, and waits until all their loaders have been called.
gpt-oss copies experts and sinks without their loaders, so they would silently keep the old values.
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
def track_copies(model: nn.Module) -> Iterator[None]:
    """A context in which vLLM's reloading notices the copies into the experts of a gpt-oss."""
    original = inplace.initialize_layerwise_reload
    if isinstance(model, GptOssForCausalLM):
        inplace.initialize_layerwise_reload = partial(_begin, original)
    try:
        yield
    finally:
        inplace.initialize_layerwise_reload = original


def load_sinks(model: nn.Module, folder: Path) -> None:
    """Load the sinks of a checkpoint into a gpt-oss; does nothing for other models."""
    if not isinstance(model, GptOssForCausalLM):
        return
    parameters = dict(model.named_parameters())
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors, torch.no_grad():
            for name in (name for name in tensors.keys() if name.endswith(".sinks")):  # noqa: SIM118  (not a mapping)
                parameters[name.replace(".self_attn.", ".attn.")].copy_(tensors.get_tensor(name))


def _begin(original: Callable[[nn.Module], None], model: nn.Module) -> None:
    original(model)
    for layer in model.modules():
        for name in EXPERTS:
            tensor: Any = layer._parameters.get(name)  # vLLM attaches its loaders to parameters
            if tensor is not None:
                # The copy is already sliced and transposed for this worker.
                tensor.weight_loader = default_weight_loader
                tensor.weight_loader = make_online_process_loader(layer, name)
                tensor.copy_ = partial(tensor.weight_loader, tensor)


class Repacking:
    """Methods that vLLM adds to its worker class (`worker_extension_cls`)."""

    def reload_packed_weights(self: CPUWorker, weights_path: str) -> None:
        """Reload the weights and pack them for the CPU kernels; without packing, logprobs are wrong by nats."""
        model = self.model_runner.get_model()
        _reset_expert_kernels(model)
        with track_copies(model):
            self.reload_weights(weights_path=weights_path)
        load_sinks(model, Path(weights_path))
        with set_current_vllm_config(self.vllm_config):
            _pack_tied_heads(model)

    def start_packed_update(self: CPUWorker) -> None:
        """vLLM's start_weight_update, for a weight transfer on a CPU by a plugin."""
        _reset_expert_kernels(self.model_runner.get_model())
        self.start_weight_update()

    def finish_packed_update(self: CPUWorker) -> None:
        """vLLM's finish_weight_update, then packing for the CPU kernels."""
        self.finish_weight_update()
        with set_current_vllm_config(self.vllm_config):
            _pack_tied_heads(self.model_runner.get_model())


def _reset_expert_kernels(model: nn.Module) -> None:
    """Remove the kernels of experts, so that reloading packs the experts again."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


def _pack_tied_heads(model: nn.Module) -> None:
    """Pack heads that share the embedding's tensor: no tensor of a checkpoint updates their packed copy."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and weight is not None and weight.numel() > 0:
            method: Any = module.quant_method
            method.process_weights_after_loading(module)
