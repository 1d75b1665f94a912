"""What teaches nothing, and what runs too long: DAPO (arXiv 2503.14476), sections 3.2 and 3.4. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .advantages import Reward, all_equal


def informative(rewards: Sequence[Reward]) -> bool:
    """Dynamic sampling: whether a group has a gradient, so two scored rollouts that differ. Ask before shaping."""
    scored = [reward for reward in rewards if reward is not None]
    return len(scored) > 1 and not all_equal(scored)


def informative_components(components: Sequence[Mapping[str, Reward]]) -> bool:
    """The same of a group whose components are normalised each on its own: one that differs is enough."""
    names = {name for of_rollout in components for name in of_rollout}
    return any(informative([of_rollout.get(name) for of_rollout in components]) for name in names)


def soft_overlong(length: int, limit: int, buffer: int) -> float:
    """A penalty to add to the reward: 0 up to limit - buffer tokens, then linear down to -1 at the limit and beyond.

    length: all tokens that the rollout sampled, over all its turns.
    """
    return min(0.0, max(-1.0, (limit - buffer - length) / buffer))
