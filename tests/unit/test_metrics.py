"""Means, pass@k and intervals: values by hand, known formulas, and coverage."""

from __future__ import annotations

import math
import random
from itertools import combinations, permutations
from statistics import fmean

import pytest

from ngym.stats import Rewards, Scores, best_at_k, bootstrap, displayed_ks, student_t


@pytest.mark.parametrize("successes", range(9))
def test_pass_at_k_is_the_unbiased_estimate(successes: int) -> None:
    rewards = [1.0] * successes + [0.0] * (8 - successes)
    for k in range(1, 9):
        assert best_at_k(rewards, k) == pytest.approx(1 - math.comb(8 - successes, k) / math.comb(8, k))


def test_best_at_k_of_equal_rewards_is_that_reward() -> None:
    for n in range(1, 65):
        for k in range(1, n + 1):
            assert best_at_k([0.1] * n, k) == 0.1
            assert best_at_k([0.0] * (k - 1) + [1.0] * (n - k + 1), k) == 1.0


def test_best_at_k_of_graded_rewards_is_the_mean_over_all_choices() -> None:
    rewards = [0.25, -1.0, 0.5, 0.5, 3.0]
    for k in range(1, 6):
        assert best_at_k(rewards, k) == pytest.approx(fmean(max(chosen) for chosen in combinations(rewards, k)))


def test_best_at_k_does_not_depend_on_the_order() -> None:
    assert len({best_at_k(order, 2) for order in permutations([0.0, 0.5, 1.0, 0.25])}) == 1


def test_best_at_k_survives_many_rollouts() -> None:
    rewards = [1.0] * 3 + [0.0] * 9997
    assert best_at_k(rewards, 5000) == pytest.approx(1 - 0.5**3, rel=1e-3)


def test_best_at_k_needs_k_rollouts() -> None:
    with pytest.raises(ValueError, match="between 1 and the number of rollouts"):
        best_at_k([1.0], 2)


def test_the_ks_worth_showing() -> None:
    assert [displayed_ks(n) for n in (0, 1, 2, 3, 8, 10)] == [
        [],
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4, 8],
        [1, 2, 4, 8, 10],
    ]


def test_tasks_without_a_reward_are_counted_and_are_in_no_mean() -> None:
    scores = Scores()
    for task, reward in ((0, 1.0), (0, None), (1, None), (1, None)):
        scores.add(task, {"reward": reward})
    assert (scores.tasks, scores.rewards.tasks, scores.rollouts, scores.unscored, scores.rewards.mean) == (
        2,
        1,
        4,
        3,
        1.0,
    )


def test_students_t() -> None:
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 10: 2.228, 30: 2.042, 1000: 1.962}
    for freedom, value in table.items():
        assert student_t(freedom) == pytest.approx(value, rel=2e-3)


def test_a_mean_without_tasks_has_no_interval() -> None:
    rewards = Rewards()
    assert (rewards.mean, rewards.interval, rewards.best_of()) == (None, None, [])
    rewards.add(0, 1.0)
    assert (rewards.mean, rewards.interval) == (1.0, None)


def test_the_running_interval_is_the_clustered_one() -> None:
    draw = random.Random(1)
    data = [(task, draw.random() + task / 10) for task in range(7) for _ in range(1 + task)]
    draw.shuffle(data)
    rewards = Rewards()
    for task, reward in data:
        rewards.add(task, reward)
    mean = fmean(reward for _, reward in data)
    deviations = [sum(reward - mean for task, reward in data if task == index) for index in range(7)]
    error = math.sqrt(7 / 6 * sum(value**2 for value in deviations)) / len(data)
    assert rewards.mean == pytest.approx(mean)
    assert rewards.interval is not None
    assert rewards.interval.high - mean == pytest.approx(student_t(6) * error)
    assert mean - rewards.interval.low == pytest.approx(student_t(6) * error)


def test_the_interval_of_large_rewards_is_that_of_their_differences() -> None:
    small, large = Rewards(), Rewards()
    for task in range(10):
        for _ in range(4):
            small.add(task, task % 2 * 0.5)
            large.add(task, 2.0**30 + task % 2 * 0.5)
    assert small.interval is not None and large.interval is not None
    widths = [each.interval.high - each.interval.low for each in (small, large) if each.interval]
    assert widths[1] == pytest.approx(widths[0], rel=1e-5)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Tasks of differing difficulty, 4 rollouts each: an interval that took rollouts as independent would cover 80 %."""
    draw = random.Random(2)
    covered = 0
    for _ in range(400):
        rewards = Rewards()
        for task in range(30):
            difficulty = draw.betavariate(0.5, 0.5)  # mean 0.5
            for _ in range(4):
                rewards.add(task, float(draw.random() < difficulty))
        interval = rewards.interval
        assert interval is not None
        covered += interval.low <= 0.5 <= interval.high
    assert 0.92 <= covered / 400 <= 0.98


def test_the_bootstrap_interval_of_few_and_of_many_tasks_agree() -> None:
    draw = random.Random(3)
    values = [float(draw.random() < 0.3) for _ in range(1001)]
    few, many = bootstrap(values[:1000]), bootstrap(values)
    assert few is not None and many is not None
    assert few.low == pytest.approx(many.low, abs=0.004)
    assert few.high == pytest.approx(many.high, abs=0.004)
    assert bootstrap([1.0]) is None
    assert bootstrap(values[:50]) == bootstrap(values[:50])


@pytest.mark.parametrize(
    ("rewards_of_tasks", "interval"),
    [
        ([[1.0], [1.0]], (0.025**0.5, 1.0)),  # Clopper-Pearson
        ([[0.0, 0.0]] * 10, (0.0, 1 - 0.025**0.1)),
        ([[1.0]] * 2000, (0.025**0.0005, 1.0)),
        ([[0.0, 1.0], [1.0, 0.0]], None),
        ([[0.3], [0.3]], None),
    ],
)
def test_the_interval_of_equal_tasks_has_a_width(
    rewards_of_tasks: list[list[float]], interval: tuple[float, float] | None
) -> None:
    rewards = Rewards()
    for task, several in enumerate(rewards_of_tasks):
        for reward in several:
            rewards.add(task, reward)
    for found in (rewards.interval, rewards.best_of()[0].interval):
        assert (found and (found.low, found.high)) == (interval and pytest.approx(interval))


def test_rewards_of_0_and_1_stay_between_0_and_1() -> None:
    rewards = Rewards()
    rewards.add(0, 0.0)
    rewards.add(1, 1.0)
    assert rewards.interval is not None and (rewards.interval.low, rewards.interval.high) == (0.0, 1.0)
    rewards.add(1, 2.0)
    assert not rewards.binary and rewards.interval.high > 1.0


def test_a_task_with_fewer_rollouts_is_left_out_of_larger_ks() -> None:
    rewards = Rewards()
    for task, reward in [(0, 0.0), (0, 1.0), (1, 1.0)]:
        rewards.add(task, reward)
    assert [(item.k, item.mean, item.tasks) for item in rewards.best_of()] == [(1, 0.75, 2), (2, 1.0, 1)]
