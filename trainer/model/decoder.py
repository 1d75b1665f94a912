"""The decoder: transformers' layers between packed token ids and hidden states, and its output head."""

from __future__ import annotations

from typing import NamedTuple

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


class Asks(NamedTuple):
    """The outputs to compute. Each costs time: entropy a pass over the logits, values a pass through the critic.

    logprobs: False if only values are needed.
    """

    logprobs: bool = True
    entropy: bool = False
    values: bool = False


class Scores(NamedTuple):
    """Outputs for the trained tokens of a micro-batch, float32, in the order of its segments; None if not requested.

    logprobs_N: log p of each token given the tokens before it ([0] if not requested). entropy_N: of the whole
    distribution that it was sampled from. values_N: the critic's value of the state in which it was chosen.
    """

    logprobs_N: Tensor
    entropy_N: Tensor | None = None
    values_N: Tensor | None = None
