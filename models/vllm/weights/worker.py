"""What vLLM's own reloading leaves out on a CPU, where it packs weights anew for its kernels only at the first load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from . import gptoss

if TYPE_CHECKING:
    from vllm.v1.worker.cpu_worker import CPUWorker


class Repacking:
    """Methods that vLLM adds to its worker class (`worker_extension_cls`)."""

    def reload_packed_weights(self: CPUWorker, weights_path: str) -> None:  # type: ignore[misc]
        """Reload so that every kernel multiplies with the new weights; without this, logprobs are off by nats."""
        model = self.model_runner.get_model()
        _have_experts_packed(model)
        with gptoss.copies_seen(model):
            self.reload_weights(weights_path=weights_path)
        gptoss.load_sinks(model, Path(weights_path))
        with set_current_vllm_config(self.vllm_config):
            _pack_tied_heads(model)

    def start_packed_update(self: CPUWorker) -> None:  # type: ignore[misc]
        """vLLM's start_weight_update, for a weight transfer that a plugin brings to a CPU."""
        _have_experts_packed(self.model_runner.get_model())
        self.start_weight_update()

    def finish_packed_update(self: CPUWorker) -> None:  # type: ignore[misc]
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
            module.quant_method.process_weights_after_loading(module)
