"""Checks around the first step: the samples match the policy, and every parameter learns. A failed check ends the run.

1. The policy reproduces its own logprobs with and without a graph (ratio 1). Dropout would break this.
2. The sampler's logprobs are the policy's: mean of exp |log p - log p of the sampler| is near 1. Another policy,
   temperature or precision would break this.
3. Every trainable parameter gets a gradient in the first optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ngym.errors import NgymError

from .data.samples import Batch, Sample
from .engine.engine import Engine
from .model.packing import Packed, pack

OWN_RATIO = 1e-3
EXPONENT = 20.0


class CheckFailed(NgymError):
    """Training would go wrong from its first step."""


def checked(
    batches: Iterable[Batch], engine: Engine, budget: int, sampler_N: Callable[[Packed], Tensor] | None, bound: float
) -> Iterator[Batch]:
    """The batches; the first one that trains something is checked before and after. Every rank iterates.

    Args:
        sampler_N: the sampler's logprobs of a micro-batch; None if another policy sampled.
        bound: on the mean of exp |log p - log p of the sampler|.

    Raises:
        CheckFailed: with what is wrong and what to do.
    """
    first = True
    for batch in batches:
        if not first or not batch.updates:
            yield batch
            continue
        first = False
        samples = batch.updates[0]
        _repeats_itself(engine, samples, budget)
        if sampler_N is not None:
            _is_the_sampler(engine, samples, budget, sampler_N, bound)
        with engine.gradients_seen() as seen:
            yield batch
        _all_learn(engine, seen)


def _repeats_itself(engine: Engine, samples: Sequence[Sample], budget: int) -> None:
    packed = pack(engine.micro_batches(samples, budget)[0] or samples[:1], engine.device)
    with torch.no_grad():
        before_N = engine.logprobs(packed)
    ratio = float(((engine.logprobs(packed).detach() - before_N).exp() - 1).abs().max())
    if not ratio < OWN_RATIO:
        raise CheckFailed(
            f"the policy does not reproduce its own logprobs: two passes over the same tokens differ by a ratio of "
            f"{ratio:.3g}. Something in the model draws random numbers (dropout?)"
        )


def _is_the_sampler(
    engine: Engine, samples: Sequence[Sample], budget: int, sampler_N: Callable[[Packed], Tensor], bound: float
) -> None:
    total = count = 0.0
    for mine in engine.micro_batches(samples, budget):
        packed = pack(mine or samples[:1], engine.device)
        with torch.no_grad():
            difference_N = (engine.logprobs(packed) - sampler_N(packed)).clamp(-EXPONENT, EXPONENT)
        if mine:
            total += float(difference_N.abs().exp().sum())
            count += len(difference_N)
    total, count = engine.add_up([total, count])
    error = total / max(count, 1)
    if not error < bound:
        raise CheckFailed(
            f"token_mult_prob_error is {error:.3f} before the first step: the sampler's logprobs are not those of this policy "
            f"(bound: algorithm.max_mismatch = {bound:g}). Is model.path the policy that sampled, at algorithm.temperature? "
            "To learn from another policy's rollouts on purpose, raise the bound"
        )


def _all_learn(engine: Engine, seen: set[str]) -> None:
    trainable = [name for name, parameter in engine.policy.named_parameters() if parameter.requires_grad]
    without = [name for name in trainable if name not in seen]
    if without:
        raise CheckFailed(
            f"{len(without)} of {len(trainable)} trainable parameters got no gradient in the first step, among them "
            f"{without[0]}; they would stay as they are while the run seems to train"
        )
