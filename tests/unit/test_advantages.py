"""Advantages: values by hand and of other libraries, and properties for any group and any gap in a rollout."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import DATA

from ngym.trainer.losses import advantages, gae
from ngym.trainer.recipe import objective

PEERS = json.loads((DATA / "peer_advantages.json").read_text("utf-8"))
OF_A_GROUP = ["group_std", "group_mean", "leave_one_out", "leave_one_out_std"]


def compute_advantages(
    estimator: str, rewards: list[float | None], groups: list[Any] | None = None, **options: Any
) -> list[float]:
    advantage = objective.Advantage(estimator=estimator, **options)
    values: list[float] = advantages.advantages(advantage, rewards, groups or [0] * len(rewards))
    return values


@pytest.mark.parametrize(
    ("estimator", "rewards", "expected"),
    [
        ("group_std", [1, 0, 0, 1, 0], [1.0954, -0.7303, -0.7303, 1.0954, -0.7303]),
        ("leave_one_out_std", [1, 0, 0, 1, 0], [1.5, -0.8660, -0.8660, 1.5, -0.8660]),
        ("leave_one_out", [1, 0, 0, 1, 0], [0.75, -0.5, -0.5, 0.75, -0.5]),
        ("group_mean", [1, 0, 0, 1, 0], [0.6, -0.4, -0.4, 0.6, -0.4]),
        ("leave_one_out", [1, 2, 3], [1 - 2.5, 2 - 2.0, 3 - 1.5]),
        ("leave_one_out_std", [1, 2, 3], [-1.5 / 0.7071, 0.0, 1.5 / 0.7071]),
        ("leave_one_out_std", [1, 0, 0], [1.0, -0.7071, -0.7071]),  # the others of the first are equal: not divided
        ("reward", [1, 0, 0.5], [1, 0, 0.5]),
    ],
)
def test_advantages_by_hand(estimator: str, rewards: list[float | None], expected: list[float]) -> None:
    assert compute_advantages(estimator, rewards) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("case", PEERS["cases"], ids=lambda case: case["source"])
def test_advantages_are_those_of_other_libraries(case: dict[str, Any]) -> None:
    groups = [index // case["group_size"] for index in range(len(case["rewards"]))]
    advantage = objective.Advantage.model_validate(case["advantage"])
    ours = advantages.advantages(advantage, case["rewards"], groups)
    assert ours == pytest.approx(case["advantages"], abs=2e-6)


def test_gdpo_is_trls() -> None:
    case = PEERS["gdpo"]
    groups = [index // case["group_size"] for index in range(len(case["rewards"]))]
    advantage = objective.Advantage.model_validate(case["advantage"])
    ours = advantages.component_advantages(advantage, case["rewards"], case["weights"], groups)
    assert ours == pytest.approx(case["advantages"], abs=2e-6)
    assert ours[-1] == 0.0  # it has no component at all


def test_gdpo_keeps_rewards_apart_that_a_sum_would_merge() -> None:
    advantage = objective.Advantage(components="normalise_then_sum")
    # both rewards of the last two are worth 1 in sum; the second reward is rarer
    components = [[1, 0], [1, 0], [1, 0], [0, 1]]
    ours = advantages.component_advantages(advantage, components, [1.0, 1.0], [0, 0, 0, 0])
    assert ours == pytest.approx([0.0] * 4, abs=1e-6)
    weighted = advantages.component_advantages(advantage, components, [1.0, 2.0], [0, 0, 0, 0])
    assert weighted[3] > 0 > weighted[0]


@pytest.mark.parametrize("estimator", OF_A_GROUP)
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, -7.3, 1e-12, 1e12])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 16])
def test_one_rollout_and_equal_rewards_teach_exactly_nothing(estimator: str, reward: float, size: int) -> None:
    assert compute_advantages(estimator, [reward] * size) == [0.0] * size


@pytest.mark.parametrize("estimator", OF_A_GROUP)
def test_rewards_that_differ_by_rounding_alone_are_equal(estimator: str) -> None:
    assert compute_advantages(estimator, [0.1 + 0.2, 0.3, 0.3]) == [0.0] * 3
    as_float32 = torch.tensor([0.1, 0.1, 0.1]).tolist()
    assert compute_advantages(estimator, [0.1, *as_float32]) == [0.0] * 4
    assert max(compute_advantages("group_mean", [0.0, 1e-9])) > 0  # small is not equal


rewards_st = st.lists(st.integers(-3, 3).map(lambda n: n / 2), min_size=1, max_size=8)


@settings(max_examples=100)
@given(rewards=rewards_st, estimator=st.sampled_from(OF_A_GROUP), seed=st.integers(0, 99))
def test_a_group_is_who_is_in_it(rewards: list[float], estimator: str, seed: int) -> None:
    """Unscored rollouts, other groups and the order of rollouts change nothing; only the differences of rewards count."""
    alone = compute_advantages(estimator, list(rewards))
    assert sum(alone) == pytest.approx(0.0, abs=1e-6) or estimator == "leave_one_out_std"
    assert compute_advantages(estimator, [reward + 5 for reward in rewards]) == pytest.approx(alone, abs=1e-6)

    rng = random.Random(seed)
    mixed: list[tuple[float | None, str, int | None]] = [(reward, "a", place) for place, reward in enumerate(rewards)]
    mixed += [(None, "a", None)] * rng.randint(0, 3) + [(rng.random(), "b", None) for _ in range(rng.randint(0, 4))]
    rng.shuffle(mixed)
    together = compute_advantages(estimator, [reward for reward, _, _ in mixed], [group for _, group, _ in mixed])
    for value, (reward, _, place) in zip(together, mixed, strict=True):
        if place is not None:
            assert value == pytest.approx(alone[place], abs=1e-9)
        if reward is None:
            assert value == 0.0


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_advantages_know_no_scale(scale: float) -> None:
    """Rewards may be any number."""
    options = objective.Advantage(estimator="group_std", eps=0)
    rewards = [1 * scale, 0.0, 0.0, 1 * scale, 0.0]
    expected = [1.0954451, -0.7302967, -0.7302967, 1.0954451, -0.7302967]
    assert advantages.advantages(options, rewards, [0] * 5) == pytest.approx(expected)


def test_kl_can_be_taken_from_the_reward_before_the_baseline() -> None:
    rewards = advantages.subtract_kl([1.0, 0.0, None], [2.0, 1.0, 5.0], 0.1)
    assert rewards == [pytest.approx(0.8), pytest.approx(-0.1), None]


# --- token by token --------------------------------------------------------------------------------------------------


def test_gae_steps_over_a_tools_answer() -> None:
    """Sampled, sampled, two tokens of a tool, sampled, sampled: only the sampled ones are there."""
    values = torch.tensor([0.1, 0.2, 0.3, 0.4])
    rewards = gae.token_rewards([1.0], [4], torch.zeros(4), 0.0)
    estimates = gae.gae(rewards, values, [4], gamma=0.99, lam=0.95)
    assert estimates.advantages_N.tolist() == pytest.approx([0.7733, 0.7180, 0.6603, 0.6], abs=1e-4)
    assert estimates.returns_N.tolist() == pytest.approx([0.8733, 0.9180, 0.9603, 1.0], abs=1e-4)


def reference_gae(rewards: list[float], values: list[float], mask: list[bool], gamma: float, lam: float) -> list[float]:
    """GAE over all tokens of a context, backwards; a tool's tokens hand on what they are given."""
    out = [0.0] * len(mask)
    next_value = next_advantage = 0.0
    for t in reversed(range(len(mask))):
        if mask[t]:
            delta = rewards[t] + gamma * next_value - values[t]
            next_advantage = delta + gamma * lam * next_advantage
            next_value = values[t]
            out[t] = next_advantage
    return out


@settings(max_examples=100)
@given(
    masks=st.lists(st.lists(st.booleans(), min_size=1, max_size=12).filter(any), min_size=1, max_size=4),
    gamma=st.sampled_from([1.0, 0.99, 0.5]),
    lam=st.sampled_from([1.0, 0.95, 0.0]),
    seed=st.integers(0, 10**6),
)
def test_gae_is_exact_across_any_gaps(masks: list[list[bool]], gamma: float, lam: float, seed: int) -> None:
    rng = random.Random(seed)
    rewards = [[rng.gauss(0, 1) for _ in mask] for mask in masks]
    values = [[rng.gauss(0, 1) for _ in mask] for mask in masks]

    def select_sampled(grid: list[list[float]]) -> torch.Tensor:
        values_on = [x for row, mask in zip(grid, masks, strict=True) for x, on in zip(row, mask, strict=True) if on]
        return torch.tensor(values_on, dtype=torch.float64)

    expected = select_sampled(
        [reference_gae(r, v, m, gamma, lam) for r, v, m in zip(rewards, values, masks, strict=True)]
    )
    ours = gae.gae(select_sampled(rewards), select_sampled(values), [sum(mask) for mask in masks], gamma, lam)
    assert ours.advantages_N.tolist() == pytest.approx(expected.tolist(), abs=1e-12)
    assert ours.returns_N.tolist() == pytest.approx((expected + select_sampled(values)).tolist(), abs=1e-12)


def test_every_turn_sees_the_reward_at_the_end() -> None:
    rewards = gae.token_rewards([1.0, 5.0, -2.0], [3, 0, 2], torch.zeros(5), 0.0)
    assert rewards.tolist() == [0, 0, 1, 0, -2]  # the second rollout has no tokens, and its reward goes nowhere
    assert gae.returns_to_go(rewards, [3, 0, 2], 1.0).tolist() == [1, 1, 1, -2, -2]
    assert gae.returns_to_go(rewards, [3, 0, 2], 0.5).tolist() == [0.25, 0.5, 1, -1, -2]


@pytest.mark.parametrize("case", PEERS["tokens"]["cases"], ids=lambda case: case["source"])
def test_token_advantages_are_openrlhfs(case: dict[str, Any]) -> None:
    data = PEERS["tokens"]
    lengths, advantage = data["lengths"], objective.Advantage.model_validate(case["advantage"])
    groups = [index // data["group_size"] for index in range(len(lengths))]
    of_rollouts = advantages.advantages(advantage, data["rewards"], groups)
    rewards = gae.token_rewards(of_rollouts, lengths, torch.tensor(data["kl"]), data["kl_coef"])
    if advantage.estimator == "gae":
        estimates = gae.gae(rewards, torch.tensor(data["values"]), lengths, advantage.gamma, advantage.lam)
        values = estimates.advantages_N
        assert estimates.returns_N.tolist() == pytest.approx(case["returns"], abs=2e-6)
    else:
        values = gae.returns_to_go(rewards, lengths, advantage.gamma)
    assert gae.whiten(values, gae.Moments.of(values)).tolist() == pytest.approx(case["advantages"], abs=5e-6)


def test_whitening_by_the_sums_of_all_ranks_is_whitening_the_whole() -> None:
    torch.manual_seed(0)
    values = torch.randn(50) * 3 + 100
    whitened = gae.whiten(values, gae.Moments.of(values))
    assert whitened.mean().item() == pytest.approx(0, abs=1e-4)
    assert whitened.std(unbiased=False).item() == pytest.approx(1, abs=1e-4)
    pieces = values.split([7, 0, 20, 23])
    step = gae.Moments(*(sum(each) for each in zip(*map(gae.Moments.of, pieces), strict=True)))
    in_pieces = torch.cat([gae.whiten(piece, step) for piece in pieces])
    assert in_pieces.tolist() == pytest.approx(whitened.tolist(), abs=1e-5)


@pytest.mark.parametrize("value", [0.0, 0.1, -3.3, 1e-6])
def test_whitening_equal_values_gives_exactly_zero(value: float) -> None:
    values = torch.full((1000,), value)
    assert gae.whiten(values, gae.Moments.of(values)).abs().max() == 0


def test_whitening_does_not_blow_up_rounding() -> None:
    values = torch.tensor([1e6, 1e6 + 0.0625])  # neighbours in float32
    assert gae.whiten(values, gae.Moments.of(values)).tolist() == [0.0, 0.0]


# --- DAPO ------------------------------------------------------------------------------------------------------------


def test_soft_overlong_falls_linearly_to_minus_one_and_no_further() -> None:
    lengths = [0, 80, 85, 90, 100, 1000]
    assert [advantages.soft_overlong(n, 100, 20) for n in lengths] == [0, 0, -0.25, -0.5, -1, -1]


def test_a_group_is_informative_if_two_scored_rollouts_differ() -> None:
    assert advantages.informative([0.0, 1.0, None])
    assert not advantages.informative([0.1, 0.1, 0.1])
    assert not advantages.informative([1.0, None, None])
    assert not advantages.informative([None])
    assert not advantages.informative([])
    assert all(math.isfinite(x) for x in compute_advantages("group_std", [0.0, 1.0, None]))
