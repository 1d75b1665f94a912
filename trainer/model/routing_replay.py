"""Routing replay: in training, each token goes to the experts to which the engine sent it (R3, arXiv 2510.11370).

The routers of a mixture of experts choose discretely, so small differences between an engine and a trainer send some
tokens to other experts, and their probabilities differ by much more than rounding. With replay, the weights of the
experts are still those of the trained router, and have its gradient; only the choice is that of the engine.
"""

from __future__ import annotations

import re
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.return_types import topk as TopK

from ngym.errors import ConfigError
from ngym.routed_experts import is_router

from ..data.samples import Routers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEYWORD = "routed_experts_TLK"  # of a decoder's forward, which passes it to its layers
LAYER = re.compile(r".*?layers\.(\d+)(?=\.)")  # of a module's name
CHOOSES = frozenset([torch.topk, Tensor.topk])
PROBES = 3


def replay_routing(network: PreTrainedModel) -> Routers:
    """Make the routers of a decoder choose the experts of the keyword `routed_experts_TLK` [T, L, K] of its forward: int,
    of L layers (those of others are ignored), -1 where a router chooses itself.

    Raises:
        ConfigError: it has no routers, or some choose in another way than by the top-k of all their experts.
    """
    decoder = network.get_decoder()
    kind, layers = network.config.model_type, int(network.config.get_text_config().num_hidden_layers)
    found: list[tuple[re.Match[str], Any]] = []
    for name, module in decoder.named_modules():
        if is_router(module) and (place := LAYER.match(name)) is not None:
            found.append((place, module))
    if not found:
        raise ConfigError(f"algorithm.routing_replay: {kind} has no routers of experts; set it to false")
    sizes = {(router.num_experts, router.top_k) for _, router in found}
    if len(sizes) > 1:
        raise ConfigError(
            f"algorithm.routing_replay: the layers of {kind} have routers of several sizes; set it to false"
        )
    ((experts, chosen),) = sizes
    for place, router in found:
        kind_of_router: Any = type(router)
        router.__class__ = _replaying_class(kind_of_router)
        router.replayed = None
        if not _follows(router):
            raise ConfigError(f"algorithm.routing_replay: the routers of {kind} cannot be replayed; set it to false")
        layer = decoder.get_submodule(place[0])
        layer.register_forward_pre_hook(partial(_give, int(place[1]), router), with_kwargs=True)
    return Routers(layers, chosen, experts)


def _give(layer: int, router: Any, _: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
    """Before a layer, also when the backward computes it again: its experts of the micro-batch."""
    experts_TLK = keywords.get(KEYWORD)
    router.replayed = None if experts_TLK is None else experts_TLK[:, layer]


@cache
def _replaying_class(kind: Any) -> Any:
    """The same class of routers, which choose the `replayed` experts."""

    def forward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if self.replayed is None:
            return kind.forward(self, *arguments, **keywords)
        with _Replay(self.replayed, self.num_experts):
            return kind.forward(self, *arguments, **keywords)

    return type(kind.__name__, (kind,), {"forward": forward})


class _Replay(TorchFunctionMode):
    """The top-k of all experts returns the given ones, with their values."""

    def __init__(self, chosen_TK: Tensor, experts: int) -> None:
        super().__init__()
        self._chosen_TK = chosen_TK
        self._experts = experts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in CHOOSES or args[0].shape != (len(self._chosen_TK), self._experts):
            return result
        own_TK = result[1]
        chosen_TK = torch.where(self._chosen_TK < 0, own_TK, self._chosen_TK.to(own_TK.dtype))
        return TopK((args[0].gather(-1, chosen_TK), chosen_TK))


@torch.no_grad()
def _follows(router: Any) -> bool:
    """Whether a router's answer has the replayed experts."""
    size = next(router.parameters()).shape[-1]
    probe = torch.linspace(-1, 1, PROBES * size).view(PROBES, size).to(next(router.parameters()))
    chosen_TK = torch.arange(router.top_k, device=probe.device).flip(0).repeat(PROBES, 1)
    router.replayed = chosen_TK
    try:
        outputs = router(probe)
    except TypeError:  # it needs more than the hidden states
        return False
    finally:
        router.replayed = None
    return any(isinstance(one, Tensor) and torch.equal(one, chosen_TK) for one in outputs)
