"""Evaluation on held-out tasks: means, pass@k and intervals of real rollouts, and what they leave out."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from stub_agents import problem, scored_row, serving

from ngym.collect import Rollout
from ngym.errors import UsageError
from ngym.peers import Peers
from ngym.runtime.event_loop import never_fails
from ngym.schema import Json, RolloutKey
from ngym.trainer.evaluation import live_eval
from ngym.trainer.online import services
from ngym.trainer.recipe import rollout_options

Values = dict[str, Any]


class Solver:
    """Two agents: task n of `sums` is solved by the first n of its attempts; `proofs` gets half a reward. seen: all rows."""

    def __init__(self) -> None:
        self.requests: list[Json] = []

    def sums(self, row: Json) -> Any:
        self.requests.append(row)
        params, attempt = row["responses_create_params"], row["_ng_rollout_index"]
        if params["input"] == "breaks":
            return problem(500, retryable=False)
        if params["input"] == "no judge":
            return scored_row(row, None)
        return scored_row(row, float(params["temperature"] == 0 or attempt < int(params["input"])))

    def proofs(self, row: Json) -> Json:
        self.requests.append(row)
        return scored_row(row, 0.5)


@contextmanager
def serve_solver(solver: Solver) -> Iterator[Any]:
    @asynccontextmanager
    async def connect() -> AsyncIterator[Any]:
        async with serving(solver.sums) as sums, serving(solver.proofs) as proofs:
            peers = Peers({"sums": [sums], "proofs": [proofs]}, owner="the test")
            try:
                yield services.ReadyServices(peers, "", never_fails)
            finally:
                await peers.close()

    with services.Services(connect) as found:
        yield found


def write(path: Path, inputs: list[str]) -> str:
    rows = [{"responses_create_params": {"input": text}} for text in inputs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return str(path)


def run_evaluation(folder: Path, solver: Solver, done: int = 0, **options: Any) -> tuple[list[Values], list[str]]:
    """The metrics and lines of an evaluation after `done`, ... 2 and 3 (the last) steps."""
    train = write(folder / "train.jsonl", ["0"])
    rollouts = rollout_options.RolloutOptions(agent="sums", tasks=train, max_output_tokens=77)
    values: list[Values] = []
    lines: list[str] = []

    def note(step: int, found: Values, line: str) -> None:
        values.append({"step": step, **found})
        lines.append(line)

    with serve_solver(solver) as found:
        file = folder / "eval_rollouts.jsonl"
        evaluation = live_eval.Evaluation(
            rollout_options.EvaluationOptions(**options), rollouts, 0.7, found, note, 5, file, done
        )
        for step in range(done, 4):
            evaluation.after(step, last=step == 3)
        evaluation.close()
    return values, lines


def test_k_attempts_give_the_mean_and_the_unbiased_pass_at_k(tmp_path: Path) -> None:
    tasks = write(tmp_path / "held_out.jsonl", ["0", "1", "2", "4"])
    solver = Solver()
    (first, *others), lines = run_evaluation(tmp_path, solver, tasks=tasks, attempts=4, every=2)
    assert [values["step"] for values in (first, *others)] == [0, 2, 3]
    assert first["eval/sums/avg@4"] == pytest.approx(7 / 16) == first["val/accuracy"] == first["eval/sums/pass@1"]
    # 1 - C(4 - c, 2) / C(4, 2) for c = 0, 1, 2, 4 solved attempts
    assert first["eval/sums/pass@2"] == pytest.approx((0 + 1 / 2 + 5 / 6 + 1) / 4)
    assert first["eval/sums/pass@4"] == 3 / 4 and first["eval/sums/greedy"] == 1
    assert first["eval/sums/avg@4/low"] < 7 / 16 < first["eval/sums/avg@4/high"]
    assert first["eval/sums/avg@4/count"] == 16 and first["eval/sums/greedy/count"] == 4
    assert lines[0].startswith("held-out after 0 steps: sums avg@4 0.438 [0.000, 1.000], pass@4 0.750; greedy")
    counts = Counter(row["responses_create_params"]["temperature"] for row in solver.requests)
    assert counts == {0.7: 3 * 16, 0.0: 3 * 4}
    assert {row["responses_create_params"]["max_output_tokens"] for row in solver.requests} == {77}
    numbers = Counter((row["_ng_task_index"], row["_ng_rollout_index"]) for row in solver.requests)
    assert set(numbers.values()) == {1} and len(numbers) == 3 * 20, "each attempt has a number of its own"


def test_held_out_rows_of_later_weights_are_dropped_behind_a_line_that_was_there_twice(tmp_path: Path) -> None:
    file = tmp_path / "eval_rollouts.jsonl"
    rows = [json.dumps({"ng": {"rollout_id": "r"}, "_ng_train": {"oldest": oldest}}) + "\n" for oldest in range(4)]
    file.write_text("".join([rows[0], rows[1], rows[0], rows[2], rows[3]]), "utf-8")
    kept = live_eval.HeldOutRollouts(file, done=2)
    asyncio.run(kept.close())
    assert file.read_text("utf-8") == rows[0] + rows[1]


def test_a_reward_that_is_1_but_for_rounding_is_the_whole_reward() -> None:
    tally = live_eval.AttemptTally("sums", greedy=False, attempts=1)
    for task, reward in enumerate((0.9999999999999999, 0.999)):
        tally.add(Rollout(RolloutKey("sums", task, 0), {"reward": reward}))
    assert tally.metrics()["eval/sums/pass@1"] == 0.5


def read_rollouts(folder: Path, failures: str = "") -> list[Json]:
    return [json.loads(line) for line in (folder / f"eval_rollouts{failures}.jsonl").read_text("utf-8").splitlines()]


def sampled_with(row: Json) -> Any:
    return json.loads((row["responses_create_params"].get("metadata") or {}).get("extra_body") or "{}").get("seed")


def test_each_sampled_attempt_has_a_seed_that_its_step_task_and_number_decide(tmp_path: Path) -> None:
    tasks = write(tmp_path / "held_out.jsonl", ["0", "1", "2"])
    seeds = []
    for life in ("one", "other"):
        (tmp_path / life).mkdir()
        solver = Solver()
        run_evaluation(tmp_path / life, solver, tasks=tasks, attempts=4, every=1)
        seeds.append({(row["_ng_task_index"], row["_ng_rollout_index"]): sampled_with(row) for row in solver.requests})
    assert seeds[0] == seeds[1], "another run of the same recipe asks for the same"
    sampled = [seed for seed in seeds[0].values() if seed is not None]
    assert len(set(sampled)) == len(sampled) == 4 * 12
    assert list(seeds[0].values()).count(None) == 4 * 3, "greedy attempts need none"


def test_every_held_out_rollout_is_kept_with_its_step_and_a_resumed_run_has_none_twice(tmp_path: Path) -> None:
    tasks = write(tmp_path / "held_out.jsonl", ["0", "9", "breaks"])
    settings: Values = {"tasks": tasks, "attempts": 2, "every": 1}
    run_evaluation(tmp_path, Solver(), **settings)

    def count_rollouts(failures: str = "") -> Counter[tuple[int, str, str]]:
        return Counter(
            (row["_ng_train"]["oldest"], row["evaluation"], row["_ng_train"]["task"])
            for row in read_rollouts(tmp_path, failures)
        )

    finished, failed = count_rollouts(), count_rollouts("_failures")
    ways = {"sums/avg@2": 2, "sums/greedy": 1}
    assert finished == {(step, way, f"sums/{n}"): ways[way] for step in range(4) for way in ways for n in range(2)}
    assert failed == {(step, way, "sums/2"): ways[way] for step in range(4) for way in ways}
    before = [row["ng"]["rollout_id"] for row in read_rollouts(tmp_path) if row["_ng_train"]["oldest"] < 2]
    with (tmp_path / "eval_rollouts.jsonl").open("a") as file:
        file.write('{"a row that was be')  # the trainer was killed here
    run_evaluation(tmp_path, Solver(), done=2, **settings)
    assert count_rollouts() == finished and count_rollouts("_failures") == failed
    assert [row["ng"]["rollout_id"] for row in read_rollouts(tmp_path)][: len(before)] == before


def test_the_interval_knows_that_the_attempts_at_a_task_are_alike(tmp_path: Path) -> None:
    """16 tasks of which half are always solved: 4 attempts at each say no more than one."""
    tasks = write(tmp_path / "held_out.jsonl", ["0", "9"] * 8)
    (four, *_), _ = run_evaluation(tmp_path, Solver(), tasks=tasks, attempts=4, greedy=False)
    (one, *_), _ = run_evaluation(tmp_path, Solver(), tasks=tasks, attempts=1, greedy=False)
    for bound in ("low", "high"):
        assert four[f"eval/sums/avg@4/{bound}"] == pytest.approx(one[f"eval/sums/avg@1/{bound}"])
    # 0.5 +- t(15) sqrt(1/4 / 15)
    assert four["eval/sums/avg@4/low"] == pytest.approx(0.5 - 2.1314 * (0.25 / 15) ** 0.5, rel=1e-3)
    assert "eval/sums/greedy" not in four


def test_attempts_without_a_reward_are_counted_and_are_not_zeros(tmp_path: Path) -> None:
    tasks = write(tmp_path / "held_out.jsonl", ["9", "9", "breaks", "no judge"])
    (first, *_), lines = run_evaluation(tmp_path, Solver(), tasks=tasks, attempts=2, greedy=False)
    assert first["eval/sums/avg@2"] == first["eval/sums/pass@2"] == 1
    assert [first[f"eval/sums/avg@2/{what}"] for what in ("count", "failed", "unscored")] == [4, 2, 2]
    assert lines[0].endswith("avg@2 1.000 [0.158, 1.000], pass@2 1.000, 2 failed, 2 unscored (33.3%) (4 tasks)")


def test_where_nothing_has_a_reward_nothing_is_claimed(tmp_path: Path) -> None:
    tasks = write(tmp_path / "held_out.jsonl", ["breaks", "no judge"])
    (first, *_), lines = run_evaluation(tmp_path, Solver(), tasks=tasks)
    assert not {"eval/sums/avg@1", "eval/sums/pass@1", "eval/sums/greedy", "val/accuracy"} & first.keys()
    assert "avg@1 has no reward, 1 failed, 1 unscored (100.0%); greedy has no reward, 1 failed, 1 unscored" in lines[0]


def test_several_held_out_files_have_agents_and_names_of_their_own(tmp_path: Path) -> None:
    solver = Solver()
    environments = [
        {"agent": "sums", "tasks": write(tmp_path / "a.jsonl", ["9", "9", "0"])},
        {
            "agent": "sums",
            "name": "easy",
            "tasks": write(tmp_path / "b.jsonl", ["9", "9", "0"]),
            "max_output_tokens": 5,
        },
        {"agent": "proofs", "tasks": write(tmp_path / "c.jsonl", ["?"] * 3)},
    ]
    (first, *_), lines = run_evaluation(tmp_path, solver, environments=environments, limit=2)
    assert (first["eval/sums/avg@1"], first["eval/easy/avg@1"], first["eval/proofs/avg@1"]) == (1, 1, 0.5)
    assert first["eval/proofs/pass@1"] == 0, "half a reward is not solved"
    assert first["val/accuracy"] == pytest.approx(2.5 / 3)
    assert len(lines[0].splitlines()) == 3 and "held-out after 0 steps: easy avg@1 1.000" in lines[0]
    longest = Counter(row["responses_create_params"]["max_output_tokens"] for row in solver.requests)
    assert longest == {77: 2 * 2 * 4, 5: 2 * 2 * 2}


def test_a_row_for_another_agent_is_named_before_anything_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "held_out.jsonl"
    path.write_text('{"responses_create_params": {"input": "?"}, "agent_ref": {"name": "proofs"}}\n', "utf-8")
    with pytest.raises(
        UsageError, match=r"held_out\.jsonl:1: agent_ref names 'proofs', and these tasks are for 'sums'"
    ):
        run_evaluation(tmp_path, Solver(), tasks=str(path))


@pytest.mark.parametrize(
    ("options", "live", "algorithm", "reason"),
    [
        ({"tasks": "TASKS"}, None, "sft", "sft trains on a file and is evaluated on one; name evaluation.data"),
        ({"data": "TASKS"}, None, "grpo", "grpo has no metric on a finished file"),
        ({"data": "TASKS"}, 1, "grpo", "name held-out tasks with evaluation.tasks"),
        ({"tasks": "TASKS"}, 2, "grpo", "evaluation.tasks does not say which agent attempts them"),
        ({"tasks": "TASKS"}, 1, "grpo", None),
        ({"tasks": "TASKS"}, None, "grpo", None),  # the same recipe, once with data.path
        ({"data": "TASKS"}, None, "dpo", None),
    ],
)
def test_an_evaluation_that_the_run_cannot_make_is_refused(
    tmp_path: Path, options: Values, live: int | None, algorithm: str, reason: str | None
) -> None:
    tasks = write(tmp_path / "tasks.jsonl", ["0"])
    environments = [{"agent": f"agent_{n}", "tasks": tasks} for n in range(live or 0)]
    rollouts = rollout_options.RolloutOptions(environments=environments) if live else None
    evaluation = rollout_options.EvaluationOptions(**{key: tasks for key in options})
    problem = rollout_options.evaluation_problem(
        evaluation, rollouts, algorithm, learns_from_rollouts=algorithm == "grpo"
    )
    assert problem is None if reason is None else problem is not None and reason in problem


def test_held_out_tasks_are_those_beside_the_tasks_of_the_rollouts(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "train.jsonl", ["0"])
        write(tmp_path / name / "validation.jsonl", ["1"])
    first, second = (
        {"agent": name, "tasks": str(tmp_path / name / "train.jsonl"), "name": name} for name in ("a", "b")
    )
    one, two = (
        rollout_options.RolloutOptions(environments=[first]),
        rollout_options.RolloutOptions(environments=[first, second]),
    )
    followed = rollout_options.EvaluationOptions(limit=1).with_default_tasks(one)
    assert (followed.tasks, followed.limit) == (str(tmp_path / "a" / "validation.jsonl"), 1)
    assert [(each.agent, each.key, each.tasks) for each in rollout_options.EvaluationOptions().with_default_tasks(two).held_out(two)] == [
        ("a", "a", str(tmp_path / "a" / "validation.jsonl")), ("b", "b", str(tmp_path / "b" / "validation.jsonl"))
    ]  # fmt: skip
    named = rollout_options.EvaluationOptions(tasks=first["tasks"])
    assert named.with_default_tasks(one) is named
    (tmp_path / "b" / "validation.jsonl").unlink()
    with pytest.raises(ValueError, match=r"no validation\.jsonl next to .*b/train\.jsonl; name held-out tasks with"):
        rollout_options.EvaluationOptions().with_default_tasks(two)


def test_held_out_tasks_come_in_one_form(tmp_path: Path) -> None:
    tasks = write(tmp_path / "tasks.jsonl", ["0"])
    with pytest.raises(ValidationError, match=r"evaluation\.tasks is given too; keep one of the two forms"):
        rollout_options.EvaluationOptions(tasks=tasks, environments=[{"agent": "sums", "tasks": tasks}])
