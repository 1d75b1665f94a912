"""The critic: a network of its own that says, at each token, how much reward is still to come.

It starts as a copy of the policy's decoder, with a scalar head of zeros: a new critic says 0. The policy is untouched by
its loss, and neither shares a weight with the other.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from torch import Tensor, nn

from .decoder import states
from .packing import Packed
from .sequence_parallel import Group

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class CriticNetwork(nn.Module):
    """A decoder with a scalar head.

    Args:
        network: the policy's, as it is now; an adapter in it is copied, too, and then trained as the policy's is.
        lr: the full learning rate; None is that of the policy.
    """

    def __init__(self, network: PreTrainedModel, lr: float | None) -> None:
        super().__init__()
        self.backbone = copy.deepcopy(network.get_decoder())
        self.head = nn.Linear(network.get_output_embeddings().in_features, 1, bias=False)
        nn.init.zeros_(self.head.weight)
        self.lr = lr

    def forward(self, packed: Packed, group: Group | None = None) -> Tensor:
        """The value of the state in which each trained token was chosen, float32 [N]."""
        values_N: Tensor = self.head(states(self.backbone, packed, group)).squeeze(1).float()
        return values_N if group is None else group.told(values_N, packed)
