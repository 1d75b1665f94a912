"""The trainer's states in the host's memory, while somebody else uses the GPU's: DeepSpeed's own moving of ZeRO 1 and 2.

Without ZeRO there is nothing that moves them, and ZeRO-3 moves only those of DeepSpeed's fused Adam.
"""

from __future__ import annotations

from typing import Any

import torch


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
