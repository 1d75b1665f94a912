"""A micro-batch -> the state of a decoder in which each trained token is chosen."""

from __future__ import annotations

from torch import Tensor, nn

from .packing import Packed
from .sequence_parallel import Group


def states(decoder: nn.Module, packed: Packed, group: Group | None = None) -> Tensor:
    """The last hidden states one place before each trained token, [N, H].

    decoder: a Hugging Face model without its head, with the attention of attention.py.
    group: the ranks that share the micro-batch; the states are then those of `group.mine`.
    """
    places_N, token_ids_T, positions_T = packed.trained_N - 1, packed.token_ids_T, packed.positions_T
    if group is not None:
        places_N = places_N[group.mine(packed)] - group.first(len(token_ids_T))
        token_ids_T, positions_T = group.share(token_ids_T), group.share(positions_T)
    hidden_TH: Tensor = decoder(
        input_ids=token_ids_T.unsqueeze(0),
        position_ids=positions_T.unsqueeze(0),
        use_cache=False,
        layout=packed.layout,
        group=group,
    ).last_hidden_state[0]
    return hidden_TH[places_N]
