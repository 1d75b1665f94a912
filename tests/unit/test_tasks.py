"""The tasks of a step: shares, epochs, the curriculum, and an exact continuation."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from ngym.collect import CollectionPlan
from ngym.collect.plan import plan_rollouts
from ngym.errors import UsageError
from ngym.trainer.online import rollout_stream, task_sampler
from ngym.trainer.recipe import rollout_options

Values = dict[str, Any]


def write(path: Path, count: int, **extra: Any) -> Path:
    rows = [{"responses_create_params": {"input": f"{path.stem} {n}"}, **extra} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def two(folder: Path, **options: Any) -> Any:
    """18 easy tasks and 5 hard ones that count half as much."""
    easy, hard = write(folder / "easy.jsonl", 18), write(folder / "hard.jsonl", 5)
    environments = [
        {"agent": "sums", "tasks": easy, "weight": 2},
        {"agent": "proofs", "tasks": hard, "weight": 1, "max_output_tokens": 9},
    ]
    for each in environments:
        each["tasks"] = str(each["tasks"])
    return rollout_options.RolloutOptions(environments=environments, **options)


def inputs(tasks: list[Any]) -> list[str]:
    return [task.row["responses_create_params"]["input"] for task in tasks]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.01, 100).map(lambda value: round(value, 3)), min_size=1, max_size=7))
def test_after_any_number_of_turns_each_has_had_its_share_to_within_one(weights: list[float]) -> None:
    order = task_sampler.RoundRobin(weights)
    for turn in range(1, 150):
        order.next()
        for count, weight in zip(order.counts, weights, strict=True):
            assert abs(count - turn * weight / sum(weights)) < 1


def test_each_step_has_the_environments_in_their_shares(tmp_path: Path) -> None:
    source = task_sampler.TaskSource(two(tmp_path), seed=0)
    for _ in range(10):
        assert Counter(task.environment for task in source.take(6)) == {"sums": 4, "proofs": 2}


def test_a_task_is_a_row_for_its_agent_with_a_number_of_its_own(tmp_path: Path) -> None:
    tasks = task_sampler.TaskSource(two(tmp_path), seed=0).take(9)
    assert [task.number for task in tasks] == [task.row["_ng_task_index"] for task in tasks] == list(range(9))
    assert {(task.environment, task.row["agent_ref"]["name"]) for task in tasks} == {
        ("sums", "sums"),
        ("proofs", "proofs"),
    }
    longest = {task.environment: task.row["responses_create_params"].get("max_output_tokens") for task in tasks}
    assert longest == {"sums": None, "proofs": 9}
    rollouts = list(plan_rollouts((task.row for task in tasks), CollectionPlan(repeats=2, params={"temperature": 0.5})))
    assert [(one.agent, one.key.task_index, one.key.rollout_index) for one in rollouts] == [
        (task.environment, task.number, attempt) for task in tasks for attempt in (0, 1)
    ]


def test_every_task_comes_once_an_epoch_and_the_order_changes(tmp_path: Path) -> None:
    options = rollout_options.RolloutOptions(
        agent="sums", tasks=str(write(tmp_path / "tasks.jsonl", 7)), max_output_tokens=5
    )
    source = task_sampler.TaskSource(options, seed=3)
    epochs = [inputs(source.take(3) + source.take(4)) for _ in range(4)]
    assert all(sorted(epoch) == [f"tasks {n}" for n in range(7)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert inputs(task_sampler.TaskSource(options, seed=3).take(7)) == epochs[0]
    assert inputs(task_sampler.TaskSource(options, seed=4).take(7)) != epochs[0]
    assert source.metrics() == {"tasks/sums/epoch": 4.0}
    assert source.take(1)[0].row["responses_create_params"]["max_output_tokens"] == 5


def test_the_first_epoch_may_go_from_easy_to_hard(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    levels = [3, 1.5, 2, 1.5, 0]
    rows = [{"responses_create_params": {"input": "x"}, "difficulty": level} for level in levels]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    options = rollout_options.RolloutOptions(agent="sums", tasks=str(path), easy_first=True)
    source = task_sampler.TaskSource(options, seed=0)
    drawn = [task.row["difficulty"] for task in source.take(2) + source.take(13)]
    assert drawn[:5] == sorted(levels) != drawn[5:10] != drawn[10:]
    again = task_sampler.TaskSource(options, seed=0)
    first = task_sampler.TaskSource(options, seed=0)
    first.take(2)
    again.restore(first.state())
    assert [task.row["difficulty"] for task in again.take(13)] == drawn[2:]
    write(path, 2)
    with pytest.raises(UsageError, match=r"tasks.jsonl:1: .*needs a number as `difficulty`, not None"):
        task_sampler.TaskSource(options, seed=0)
    with pytest.raises(ValidationError, match="curriculum draws tasks by weight"):
        two(tmp_path, easy_first=True, curriculum={})


@pytest.mark.parametrize("options", [{}, {"curriculum": {"decay": 0.6, "floor": 0.05}}])
def test_a_run_continues_from_a_state_as_if_it_had_not_stopped(tmp_path: Path, options: Values) -> None:
    def step(source: Any, draw: random.Random) -> tuple[list[Any], Values]:
        tasks = source.take(5)
        for task in tasks:
            source.learn(task.key, [draw.random() for _ in range(draw.randrange(4))])
        return tasks, source.metrics()

    options = two(tmp_path, **options)
    uninterrupted, draw = task_sampler.TaskSource(options, seed=1), random.Random(0)
    for _ in range(40):
        step(uninterrupted, draw)
    state, drawn = json.loads(json.dumps(uninterrupted.state())), draw.getstate()
    expected = [step(uninterrupted, draw) for _ in range(40)]

    resumed = task_sampler.TaskSource(options, seed=1)
    resumed.restore(state)
    draw.setstate(drawn)
    assert [step(resumed, draw) for _ in range(40)] == expected
    assert resumed.state() == uninterrupted.state()
    task = expected[7][0][2]
    assert resumed.restore_task(task.environment, task.index, task.number) == task


def test_other_shares_on_resume_hold_from_then_on(tmp_path: Path) -> None:
    source = task_sampler.TaskSource(two(tmp_path), seed=0)
    source.take(30)
    options = two(tmp_path)
    equal = [each.model_copy(update={"weight": 1.0}) for each in options.environments]
    resumed = task_sampler.TaskSource(options.model_copy(update={"environments": tuple(equal)}), seed=0)
    resumed.restore(source.state())
    tasks = resumed.take(6)
    assert Counter(task.environment for task in tasks) == {"sums": 3, "proofs": 3} and tasks[0].number == 30


def test_a_state_of_other_tasks_is_refused(tmp_path: Path) -> None:
    options = two(tmp_path)
    state = task_sampler.TaskSource(options, seed=0).state()
    with pytest.raises(UsageError, match=r"seed: 0 when the tasks were drawn before, 1 now; set it back"):
        task_sampler.TaskSource(options, seed=1).restore(state)
    one = options.model_copy(update={"environments": options.environments[:1]})
    with pytest.raises(UsageError, match=r"rollouts\.environments: sums, proofs when .* before, sums now"):
        task_sampler.TaskSource(one, seed=0).restore(state)
    learning = options.model_copy(update={"curriculum": task_sampler.CurriculumOptions()})
    with pytest.raises(
        UsageError, match=r"rollouts\.curriculum, easy_first: tasks were drawn by epochs before, by curriculum now"
    ):
        task_sampler.TaskSource(learning, seed=0).restore(state)
    text = (tmp_path / "hard.jsonl").read_text("utf-8")
    (tmp_path / "hard.jsonl").write_text(text.replace("hard 3", "hard 7"), "utf-8")
    with pytest.raises(UsageError, match=r"hard\.jsonl: changed since its tasks were drawn before: 5 tasks, sha256 "):
        task_sampler.TaskSource(options, seed=0).restore(state)


def test_rows_that_are_not_tasks_of_this_agent_are_named(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    options = rollout_options.RolloutOptions(agent="sums", tasks=str(write(path, 1, agent_ref={"name": "proofs"})))
    with pytest.raises(UsageError, match=r"tasks\.jsonl:1: agent_ref names 'proofs', and these tasks are for 'sums'"):
        task_sampler.TaskSource(options, seed=0)
    path.write_text('{"responses_create_params": {"input": "?", "top_k": 20}}\n{"input": "?"}\n', "utf-8")
    with pytest.raises(UsageError, match=r"tasks\.jsonl:1: top_k is 20: the sampler's(.|\n)*:2: not a task: it needs"):
        task_sampler.TaskSource(options, seed=0)
    path.write_text("", "utf-8")
    with pytest.raises(UsageError, match=r"tasks\.jsonl: no tasks in it"):
        task_sampler.TaskSource(options, seed=0)


def test_a_byte_order_mark_and_a_file_that_changes_meanwhile(tmp_path: Path) -> None:
    path = write(tmp_path / "tasks.jsonl", 3)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    source = task_sampler.TaskSource(rollout_options.RolloutOptions(agent="sums", tasks=str(path)), seed=0)
    assert sorted(inputs(source.take(3))) == ["tasks 0", "tasks 1", "tasks 2"]
    path.write_text("short\n", "utf-8")
    with pytest.raises(UsageError, match=r"tasks\.jsonl: changed while this run reads it"):
        source.take(3)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "name rollouts.agent and rollouts.tasks, or rollouts.environments"),
        ({"agent": "sums"}, "name rollouts.agent and rollouts.tasks, or rollouts.environments"),
        ({"agent": "sums", "environments": [{}]}, "rollouts.agent is given too; keep one of the two forms"),
        ({"environments": [{}, {}]}, "two environments are called 'sums'; give each a different `name`"),
        ({"environments": [{"weight": 0}]}, "greater than 0"),
    ],
)
def test_environments_come_in_one_form_with_distinct_names(tmp_path: Path, options: Values, problem: str) -> None:
    known = {"agent": "sums", "tasks": str(write(tmp_path / "tasks.jsonl", 1))}
    options = {**options, "environments": [{**known, **each} for each in options.get("environments", [])]}
    with pytest.raises(ValidationError, match=problem):
        rollout_options.RolloutOptions(**options)


class Solver:
    """The first third of the tasks is always solved, the second never, the rest half of the time."""

    def __init__(self, count: int) -> None:
        self._third = count // 3
        self._draw = random.Random(0)

    def __call__(self, index: int) -> float:
        chances = (1.0, 0.0, 0.5)
        return sum(self._draw.random() < chances[min(index // self._third, 2)] for _ in range(8)) / 8


def practise(count: int, rounds: int, **options: Any) -> tuple[Any, list[int]]:
    sampler, solve = task_sampler.Curriculum(task_sampler.CurriculumOptions(**options), "0", count), Solver(count)
    drawn: list[int] = []
    for _ in range(rounds):
        now = sampler.draw(32)
        for index in now:
            sampler.learn(index, solve(index))
        drawn += now
    return sampler, drawn


def test_tasks_that_are_sometimes_solved_are_drawn_most_and_the_others_still_at_the_floor() -> None:
    _, drawn = practise(300, 400, floor=0.1)
    late = Counter(min(index // 100, 2) for index in drawn[-6400:])
    ratios = [late[third] / late[2] for third in (0, 1)]
    # 0.1 against the mean weight of a task whose running mean is spread around 1/2
    assert all(0.09 < ratio < 0.16 for ratio in ratios), ratios
    assert min(Counter(drawn[-12800:]).get(index, 0) for index in range(200)) >= 1


def test_the_metrics_say_what_is_known_of_the_tasks() -> None:
    sampler, _ = practise(300, 400)
    shares = sampler.metrics()
    assert shares["solved"] == pytest.approx(1 / 3, abs=0.01) and shares["unsolved"] == pytest.approx(1 / 3, abs=0.01)
    assert shares["unseen"] == 0 and sum(shares[key.value] for key in task_sampler.TaskDifficulty) == pytest.approx(1)
    assert 100 < shares["effective"] < 200
    new = task_sampler.Curriculum(task_sampler.CurriculumOptions(), "0", 300).metrics()
    assert new["unseen"] == 1 and new["effective"] == pytest.approx(300)


def test_a_task_goes_from_full_weight_to_the_floor_and_back() -> None:
    sampler = task_sampler.Curriculum(task_sampler.CurriculumOptions(decay=0.5, floor=0.2), "0", 2)

    def weight() -> float:
        weight: int = sampler._weight(0)
        return weight / int(task_sampler.WEIGHT_SCALE)

    assert weight() == 1
    sampler.learn(0, 1.0)
    assert weight() == pytest.approx(0.2 + 0.8 * 4 * 0.75 * 0.25, abs=1e-6)
    for _ in range(60):
        sampler.learn(0, 7.0)  # a reward above 1 counts as 1
    assert weight() == pytest.approx(0.2, abs=1e-6) and sampler.metrics()["solved"] == 0.5
    sampler.learn(0, 0.0)
    assert weight() == pytest.approx(1, abs=1e-6) and sampler.metrics()["mixed"] == 0.5


def test_one_draw_has_no_task_twice_as_long_as_there_are_others() -> None:
    sampler = task_sampler.Curriculum(task_sampler.CurriculumOptions(), "0", 10)
    for size in (10, 7, 3):
        assert len(set(sampler.draw(size))) == size
    counts = Counter(sampler.draw(25))
    assert set(counts.values()) == {2, 3} and len(counts) == 10


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.lists(st.tuples(st.integers(0, 39), st.integers(0, 9))))
def test_the_lottery_gives_each_owner_as_many_tickets_as_its_weight(
    weights: list[int], changes: list[tuple[int, int]]
) -> None:
    lottery = task_sampler.WeightedSampler(weights)
    for owner, weight in changes:
        if owner < len(weights):
            weights[owner] = weight
            lottery.set(owner, weight)
    owners = [lottery.owner(ticket) for ticket in range(lottery.total)]
    assert owners == [owner for owner, weight in enumerate(weights) for _ in range(weight)]
    assert lottery.squares == sum(weight**2 for weight in weights)


def test_of_several_environments_each_has_its_progress(tmp_path: Path) -> None:
    source = task_sampler.TaskSource(two(tmp_path, curriculum={}), seed=0)
    for task in source.take(6):
        source.learn(task.key, [1.0, 0.0] if task.environment == "sums" else [])
    values = source.metrics()
    assert values["tasks/sums/unseen"] == pytest.approx(14 / 18) and values["tasks/proofs/unseen"] == 1


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 4), st.integers(1, 3), st.randoms(use_true_random=False))
def test_no_group_is_trained_later_than_the_lag_allows_whichever_is_complete_first(
    max_lag: int, size: int, draw: random.Random
) -> None:
    waiting: list[Any] = []
    for step in range(12):
        admitted = step * size + len(waiting)
        for number in range(admitted, (max_lag + step + 1) * size):
            waiting.append(rollout_stream.Group(task_sampler.Task("sums", 0, number, {}), step, running=1))
        while not (batch := rollout_stream.next_batch(waiting, size, step, max_lag)):
            draw.choice([group for group in waiting if not group.complete]).running = 0
        assert len(batch) == size and all(group.complete and step - group.step <= max_lag for group in batch)
        waiting = [group for group in waiting if group not in batch]
