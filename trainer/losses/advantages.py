"""Advantage estimators over groups of rollouts, and the groups that have no learning signal. Imports no torch.

A group of one and a group of equal rewards have advantages of exactly 0. So does a reward of None (could not be
scored), which is also left out of its group's statistics. Rewards are equal up to rounding, as 0.1 + 0.2 and 0.3 are.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from numbers import Real
from statistics import fmean

from ngym.config.import_path import import_function
from ngym.errors import UsageError
from ngym.stats import all_equal

from ..recipe.extensions import AdvantageEstimator
from ..recipe.objective import Advantage

Reward = float | None


def advantages(options: Advantage, rewards_B: Sequence[Reward], groups_B: Sequence[Hashable]) -> list[float]:
    """One advantage for each rollout of the step, over all ranks.

    An estimator of the user's gets all scored rollouts at once, not group by group.

    Args:
        rewards_B: None where a rollout could not be scored.
        groups_B: each rollout's group. Only the rollouts given here count; failed ones do not.

    Returns:
        [B]; with estimators `reward` and `gae` the rewards themselves, which are spread over the tokens later.

    Raises:
        UsageError: an estimator of the user's did not return one finite number for each scored rollout.
    """
    if options.is_custom:
        return _custom_advantages(options.estimator, rewards_B, groups_B)
    of_group = _ESTIMATORS[options.estimator]
    result_B = [0.0] * len(rewards_B)
    for members in _scored_groups(rewards_B, groups_B):
        values = of_group([reward for _, reward in members], options.eps)
        for (index, _), value in zip(members, values, strict=True):
            result_B[index] = value
    return result_B


def _custom_advantages(path: str, rewards_B: Sequence[Reward], groups_B: Sequence[Hashable]) -> list[float]:
    """The advantages of the function at this import path; 0 for rollouts without a reward."""
    indices = [index for index, reward in enumerate(rewards_B) if reward is not None]
    if not indices:
        return [0.0] * len(rewards_B)
    estimator: AdvantageEstimator = import_function(path)
    returned = estimator([reward for reward in rewards_B if reward is not None], [groups_B[index] for index in indices])
    values = list(returned) if isinstance(returned, Sequence) else None
    if values is None or len(values) != len(indices):
        kind = type(returned).__name__ if values is None else f"{len(values):,} values"
        raise UsageError(
            f"algorithm.advantage.estimator: {path} returned {kind} for {len(indices):,} rollouts; return a list with "
            "one number for each reward"
        )
    for index, value in enumerate(values):
        if not isinstance(value, Real) or not math.isfinite(value):
            raise UsageError(
                f"algorithm.advantage.estimator: {path} returned {value!r} for rollout {index} of {len(indices):,}; "
                "return finite numbers"
            )
    result_B = [0.0] * len(rewards_B)
    for index, value in zip(indices, values, strict=True):
        result_B[index] = float(value)
    return result_B


def component_advantages(
    options: Advantage,
    components_BK: Sequence[Sequence[Reward]],
    weights_K: Sequence[float],
    groups_B: Sequence[Hashable],
) -> list[float]:
    """GDPO (arXiv 2601.05242): normalize each reward within its group, add up, normalize over the step, [B, K] -> [B].

    A component of None adds nothing; a rollout without any component has advantage 0 and is left out of the statistics.
    """
    normalised_KB = [advantages(options, component_B, groups_B) for component_B in zip(*components_BK, strict=True)]
    sums_B: list[Reward] = []
    for index, rewards_K in enumerate(components_BK):
        terms = [weight * value_B[index] for weight, value_B in zip(weights_K, normalised_KB, strict=True)]
        sums_B.append(None if all(reward is None for reward in rewards_K) else math.fsum(terms))
    return advantages(options, sums_B, [0] * len(sums_B))


def subtract_kl(rewards_B: Sequence[Reward], kl_B: Sequence[float], coef: float) -> list[Reward]:
    """Rewards minus coef x each rollout's KL summed over its tokens (RLOO), before the baseline is subtracted."""
    pairs = zip(rewards_B, kl_B, strict=True)
    return [None if reward is None else reward - coef * kl for reward, kl in pairs]


def _scored_groups(rewards_B: Sequence[Reward], groups_B: Sequence[Hashable]) -> list[list[tuple[int, float]]]:
    """The groups, as (index, reward) of each scored member."""
    groups: defaultdict[Hashable, list[tuple[int, float]]] = defaultdict(list)
    for index, (reward, group) in enumerate(zip(rewards_B, groups_B, strict=True)):
        if reward is not None:
            groups[group].append((index, reward))
    return list(groups.values())


def _reward(rewards: list[float], eps: float) -> list[float]:
    return rewards


def _group_mean(rewards: list[float], eps: float) -> list[float]:
    """r - mean. Dr. GRPO (arXiv 2503.20783), eq. 3."""
    if all_equal(rewards):
        return [0.0] * len(rewards)
    mean = fmean(rewards)
    return [reward - mean for reward in rewards]


def _group_std(rewards: list[float], eps: float) -> list[float]:
    """(r - mean) / (std + eps), the unbiased std. GRPO (arXiv 2402.03300), section 4.1.2."""
    if all_equal(rewards):
        return [0.0] * len(rewards)
    mean, std = fmean(rewards), _std(rewards)
    return [(reward - mean) / (std + eps) for reward in rewards]


def _leave_one_out(rewards: list[float], eps: float) -> list[float]:
    """r - mean of the others = k / (k - 1) (r - mean). RLOO (arXiv 2402.14740)."""
    if all_equal(rewards):
        return [0.0] * len(rewards)
    factor = len(rewards) / (len(rewards) - 1)
    return [factor * value for value in _group_mean(rewards, eps)]


def _leave_one_out_std(rewards: list[float], eps: float) -> list[float]:
    """(r - mean of the others) / (std of the others + eps); undivided if the others are equal. NeMo RL's default."""
    values = _leave_one_out(rewards, eps)
    others = [rewards[:index] + rewards[index + 1 :] for index in range(len(rewards))]
    return [
        value if not rest or all_equal(rest) else value / (_std(rest) + eps)
        for value, rest in zip(values, others, strict=True)
    ]


def _std(values: Sequence[float]) -> float:
    mean = fmean(values)
    # hypot instead of a sum of squares, which may overflow where the deviation does not
    return math.hypot(*(value - mean for value in values)) / math.sqrt(len(values) - 1)


_ESTIMATORS: dict[str, Callable[[list[float], float], list[float]]] = {
    "group_std": _group_std,
    "group_mean": _group_mean,
    "leave_one_out": _leave_one_out,
    "leave_one_out_std": _leave_one_out_std,
    "reward": _reward,
    "gae": _reward,
}


def informative(rewards: Sequence[Reward]) -> bool:
    """Dynamic sampling: whether a group has a gradient, that is, two scored rollouts that differ. Call before shaping."""
    known_rewards = [reward for reward in rewards if reward is not None]
    return len(known_rewards) > 1 and not all_equal(known_rewards)


def informative_components(components: Sequence[Mapping[str, Reward]]) -> bool:
    """The same for a group whose components are normalized separately: one that differs is enough."""
    names = {name for of_rollout in components for name in of_rollout}
    return any(informative([of_rollout.get(name) for of_rollout in components]) for name in names)


def soft_overlong(length: int, limit: int, buffer: int) -> float:
    """A penalty to add to the reward: 0 up to limit - buffer tokens, then linear to -1 at the limit and beyond.

    length: all sampled tokens of the rollout, over all its turns.
    """
    return min(0.0, max(-1.0, (limit - buffer - length) / buffer))
