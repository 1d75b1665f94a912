"""DeepSpeed's config, and the offload of states to CPU memory.

Offloading needs ZeRO; ZeRO-3 offloads only the states of DeepSpeed's fused Adam.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import Any

import torch

from ..recipe.recipe import EngineOptions, OptimizerOptions
from . import tensor_parallel


class Offloaded:
    """Tracks which of a DeepSpeed engine's states are offloaded, and loads them back."""

    def __init__(self, engine: Any, device: torch.device) -> None:
        self._engine = engine
        self._device = device
        self._frozen = [
            one for one in engine.module.parameters() if not one.requires_grad
        ]  # ZeRO does not manage these

    def away(self, *, weights: bool) -> None:
        """Offload everything except the weights; these are offloaded or loaded as asked.

        weights: offload the compute weights too; the optimizer's own copies are not among them.
        """
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State

        if not weights:
            self.back()
        wanted = [state for state in State if weights or state is not State.lp_params]
        on_gpu = self._device.type == "cuda"
        self._engine.offload_states(include=wanted, pin_memory=on_gpu)
        if weights:
            self._move_frozen(torch.device("cpu"))
        if on_gpu:
            torch.cuda.empty_cache()

    def back(self) -> None:
        """Load everything back to where it is computed."""
        self._engine.reload_states()
        self._move_frozen(self._device)

    def _move_frozen(self, device: torch.device) -> None:
        for one in self._frozen:
            one.data = one.data.to(device)


def imported() -> Any:
    """deepspeed with less logging. Without a GPU this is set explicitly; otherwise it would look for a compiler."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # a bug in DeepSpeed
    # On a CPU it would compile an operator here, and a killed build leaves a lock that blocks it forever. Through
    # sys.modules, because the attribute `deepspeed.comm.torch` is torch itself.
    backend: Any = sys.modules["deepspeed.comm.torch"]
    backend.build_shm_op = lambda: None
    return deepspeed


def settings(options: EngineOptions, optimizing: OptimizerOptions) -> dict[str, Any]:
    """DeepSpeed's config. We handle micro-batches and their weights: for DeepSpeed each micro-batch is a batch."""
    clips_itself = options.zero_stage > 0
    pinned = torch.cuda.is_available()
    zero: dict[str, Any] = {"stage": options.zero_stage, "overlap_comm": torch.cuda.is_available()}
    if options.offload.optimizer is not None:
        zero["offload_optimizer"] = {"device": options.offload.optimizer, "pin_memory": pinned}
    if options.offload.parameters is not None:
        zero["offload_param"] = {"device": options.offload.parameters, "pin_memory": pinned}
    parallel = {"tensor_parallel": tensor_parallel.settings(options.tensor_parallel)}
    return {
        **(parallel if options.tensor_parallel > 1 else {}),
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,  # torch's own fused AdamW is as fast, and needs no compiler
        # without the check, a bf16 step would use a gradient that is not finite
        "bf16": {"enabled": options.precision == "bf16", "check_grad_overflow": options.precision == "bf16"},
        "gradient_clipping": (optimizing.max_grad_norm or 0.0) if clips_itself else 0.0,
        "steps_per_print": 1 << 30,
    }
