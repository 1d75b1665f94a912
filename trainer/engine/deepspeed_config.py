"""DeepSpeed's config, and the offload of states to CPU memory.

Without ZeRO there is nothing that moves them, and ZeRO-3 moves only those of DeepSpeed's fused Adam.
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
    """Which of a DeepSpeed engine's states are away, and how they come back."""

    def __init__(self, engine: Any, device: torch.device) -> None:
        self._engine = engine
        self._device = device
        self._frozen = [one for one in engine.module.parameters() if not one.requires_grad]  # ZeRO has no part in these

    def away(self, *, weights: bool) -> None:
        """Everything but the weights goes, or stays away; these go, too, or are here.

        weights: those that compute; the optimiser's own copies are no part of them.
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
        """All of it is where it is computed."""
        self._engine.reload_states()
        self._move_frozen(self._device)

    def _move_frozen(self, device: torch.device) -> None:
        for one in self._frozen:
            one.data = one.data.to(device)


def imported() -> Any:
    """deepspeed, quiet, and on a machine without a GPU told so: it would look for a compiler otherwise."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # DeepSpeed's to mend
    # On a CPU it would compile an operator now, and a build that was once killed leaves a lock at which this hangs for
    # ever. Through sys.modules, because the attribute `deepspeed.comm.torch` is torch itself.
    backend: Any = sys.modules["deepspeed.comm.torch"]
    backend.build_shm_op = lambda: None
    return deepspeed


def settings(options: EngineOptions, optimizing: OptimizerOptions) -> dict[str, Any]:
    """DeepSpeed's config. Micro-batches and their weights are ours: to DeepSpeed each is a batch of its own."""
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
        # without the check a bf16 step would be taken on a gradient that is no number
        "bf16": {"enabled": options.precision == "bf16", "check_grad_overflow": options.precision == "bf16"},
        "gradient_clipping": (optimizing.max_grad_norm or 0.0) if clips_itself else 0.0,
        "steps_per_print": 1 << 30,
    }
