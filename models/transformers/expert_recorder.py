"""Records the experts to which the routers of a mixture of experts send each token (`ngym/routed_experts.py`).

The chosen experts are the integers among the outputs of a router. Families that choose elsewhere are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ngym.routed_experts import ExpertRows, is_router

from .batch import Row, RowExperts
from .prefix_cache import PrefixMatch

LAYER = re.compile(r"\.(\d+)\.")  # the first number in a module's name, as in vLLM
ONE_BYTE = 256  # experts


class ExpertRecorder:
    """Hooks in the routers of a network, and the experts that they chose in its last pass.

    Raises:
        ValueError: the network has no experts, or routers that cannot be recorded.
    """

    def __init__(self, network: Any) -> None:
        config = network.config.get_text_config()
        routers = _routers(network, config.model_type)
        self._of_layer: dict[int, Tensor] = {}  # [B * T, K]
        for layer, router in routers.items():
            router.register_forward_hook(partial(self._keep, layer))
        device = next(network.parameters()).device
        with torch.inference_mode():
            network(input_ids=torch.zeros((1, 2), dtype=torch.long, device=device), use_cache=False)
        counts = {(one.dtype, one.shape) for one in self._of_layer.values()}
        if self._of_layer.keys() != routers.keys() or len(counts) > 1 or next(iter(counts))[0] != torch.long:
            raise ValueError(_unknown_router(config.model_type))
        experts = max(int(router.num_experts) for router in routers.values())  # type: ignore[arg-type]
        dtype = "uint8" if experts <= ONE_BYTE else "uint16"
        self._none = ExpertRows(config.num_hidden_layers, next(iter(counts))[1][-1], dtype)

    def _keep(self, layer: int, router: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        self._of_layer[layer] = next((one for one in output if one.dtype == torch.long), output[0])

    def after_prefill(self, rows: Sequence[Row], places: Sequence[int], prefixes: Mapping[int, PrefixMatch]) -> None:
        """Add the experts of each row's ids but the last.

        Args:
            places: of the rows in the pass. prefixes: those that were not computed, by the number of a row.
        """
        matches = [prefixes.get(row.number) for row in rows]
        common = [0 if match is None else match[1] for match in matches]
        is_computed = any(len(row.ids) - 1 > length for row, length in zip(rows, common, strict=True))
        chosen_BTLK = self._take(max(places) + 1) if is_computed else None
        for row, place, match, length in zip(rows, places, matches, common, strict=True):
            experts = self._of(row)
            experts.add(0, b"" if match is None else match[0].experts[: length * self._none.row_bytes])
            if chosen_BTLK is not None:
                experts.add(length, chosen_BTLK[place, : len(row.ids) - 1 - length].tobytes())

    def after_step(self, rows: Sequence[Row], count: int) -> None:
        """Add the experts of the last so many ids of each row that goes on."""
        chosen_BTLK = self._take(len(rows))
        for row, chosen_TLK in zip(rows, chosen_BTLK, strict=True):
            if not row.is_ended:
                self._of(row).add(len(row.ids) - count, chosen_TLK.tobytes())

    def _of(self, row: Row) -> RowExperts:
        if row.experts is None:
            row.experts = RowExperts(replace(self._none, raw=bytearray()))
        return row.experts

    def _take(self, rows: int) -> np.ndarray[Any, Any]:
        """The experts of the last pass, [B, T, L, K]. rows: B."""
        chosen_MNK = torch.stack([one.reshape(-1, self._none.chosen) for one in self._of_layer.values()])
        # A signed type has the same bytes, and all of torch's operations.
        chosen_MNK = chosen_MNK.to(torch.uint8 if self._none.dtype == "uint8" else torch.int16)
        if list(self._of_layer) == list(range(self._none.layers)):
            chosen_LNK = chosen_MNK
        else:
            chosen_LNK = chosen_MNK.new_zeros((self._none.layers, *chosen_MNK.shape[1:]))
            chosen_LNK[list(self._of_layer)] = chosen_MNK
        chosen_BTLK = chosen_LNK.unflatten(1, (rows, -1)).permute(1, 2, 0, 3).contiguous()
        experts: np.ndarray[Any, Any] = chosen_BTLK.cpu().numpy()
        return experts


def _routers(network: nn.Module, family: str) -> dict[int, nn.Module]:
    """The router of each layer that has experts. Raises ValueError."""
    routers: dict[int, nn.Module] = {}
    with_experts: set[int] = set()
    for name, module in network.named_modules():
        if (match := LAYER.search(name)) is None:
            continue
        layer = int(match[1])
        if is_router(module):
            routers[layer] = module
        if name.endswith(".experts"):
            with_experts.add(layer)
    if not routers and not with_experts:
        raise ValueError("routed_experts: the model has no experts; leave out this option")
    if not with_experts <= routers.keys():
        raise ValueError(_unknown_router(family))
    return routers


def _unknown_router(family: str) -> str:
    return (
        f"routed_experts: the routers of the family {family!r} cannot be recorded here; leave out this option, or serve "
        "the model with models/vllm on a GPU"
    )
