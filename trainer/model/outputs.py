"""What the network says of each trained token, and which of it an algorithm asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Asks(NamedTuple):
    """Each costs something: entropy a pass over the logits, values a pass through the critic.

    logprobs: False when values alone are wanted.
    """

    logprobs: bool = True
    entropy: bool = False
    values: bool = False


class Scores(NamedTuple):
    """Of the trained tokens of a micro-batch, float32, in the order of its segments; None where it was not asked for.

    logprobs_N: log p of each token given what stands before it ([0] if not asked for). entropy_N: of the whole
    distribution that it was drawn from. values_N: the critic's, of the state in which it was chosen.
    """

    logprobs_N: Tensor
    entropy_N: Tensor | None = None
    values_N: Tensor | None = None
