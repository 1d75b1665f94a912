"""AdamW with 8-bit states, by bitsandbytes (arXiv 2110.02861). A module of its own, because the package is optional.

A weight has two bytes of states instead of eight, and each 256 weights have two float32 scales. Embeddings keep float32
states, as the paper advises; so do output heads, often the same weights, and tensors with fewer than 4,096 values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..model.quantized import bitsandbytes


class AdamW8bit(bitsandbytes.optim.AdamW8bit):
    """AdamW with 8-bit states. The updates are those of torch's AdamW on the dequantized states.

    Args:
        whole: the ids of the parameters whose states stay in float32.
        paged: on a GPU, the states are in memory that CUDA moves to the host when the GPU is full.
    """

    def __init__(self, groups: list[dict[str, Any]], *, whole: set[int], paged: bool, **adamw: Any) -> None:
        super().__init__(groups, is_paged=paged and torch.cuda.is_available(), **adamw)
        self._full_precision = whole

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        config: dict[str, Any] = super().get_config(gindex, pindex, group)
        return config | {"optim_bits": 32 if id(group["params"][pindex]) in self._full_precision else 8}

    def make_room(self, steps: Mapping[nn.Parameter, int]) -> None:
        """Empty states of these parameters after that many steps, to write stored ones into."""
        for index, group in enumerate(self.param_groups):
            for place, parameter in enumerate(group["params"]):
                if parameter in steps:
                    self.init_state(group, parameter, index, place)
                    self.state[parameter]["step"] = steps[parameter]
