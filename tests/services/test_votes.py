"""Statistics over many rollouts: majority votes, subsets, parts of rewards, and metrics of an environment."""

from __future__ import annotations

import json
import random
from collections import Counter
from io import StringIO
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from local_services import local_services
from rich.console import Console
from shipped_gym import module, rollout, rows, says

from ngym import VerifyRequest, gym_server
from ngym.collect.aggregate import Aggregates, environment_metrics
from ngym.collect.progress_display import subset_table, tables
from ngym.errors import ServiceError
from ngym.schema import Json
from ngym.services.gym.server import MAX_ROWS, aggregate
from ngym.stats import EXACT_ROLLOUTS, MAX_VALUES, OTHER, Scores, Subsets, Votes, label_scores, means_by


def votes(*cast: tuple[Any, float]) -> Votes:
    found = Votes()
    for answer, reward in cast:
        found.add(answer, reward)
    return found


def by_hand(cast: list[tuple[Any, float]], k: int) -> float:
    """Over every draw of k: the mean reward of the answers that most of them give."""
    worth = {answer: fmean(reward for other, reward in cast if other == answer) for answer, _ in cast}
    drawn = []
    for chosen in combinations(cast, k):
        counts = Counter(answer for answer, _ in chosen if answer is not None) or Counter([None])
        most = max(counts.values())
        drawn.append(fmean(worth[answer] for answer, count in counts.items() if count == most))
    return fmean(drawn)


def test_the_vote_is_over_answers_and_not_over_answers_with_their_rewards() -> None:
    # as pairs, (A, 1.0) and (A, 0.5) would each have one vote, and B would win with two
    assert votes(("A", 1.0), ("A", 0.5), ("A", 1.0), ("B", 0.0), ("B", 0.0)).at_k(5) == pytest.approx(5 / 6)


def test_a_tie_is_decided_by_lot() -> None:
    assert votes(("A", 1.0), ("B", 0.0)).at_k(2) == 0.5
    assert votes(("A", 1.0), ("A", 1.0), ("B", 0.0), ("B", 0.0), ("C", 0.0)).at_k(5) == 0.5


def test_a_rollout_without_an_answer_does_not_vote() -> None:
    assert votes((None, 0.0), ("", 0.0), (" ", 0.0), ("A", 1.0)).at_k(4) == 1.0
    assert votes((None, 0.0), (None, 0.0)).at_k(2) == 0.0


def test_the_vote_of_fewer_than_all_is_exact() -> None:
    draw = random.Random(4)
    worth = {None: 0.0, "a": 1.0, "b": 0.0, "c": 0.5, "d": 0.25}
    for _ in range(60):
        cast = [(answer, worth[answer]) for answer in draw.choices(list(worth), k=draw.randint(1, 8))]
        for k in range(1, len(cast) + 1):
            assert votes(*cast).at_k(k) == pytest.approx(by_hand(cast, k)), (cast, k)


def test_answers_of_any_json_are_distinguished_whatever_the_order_of_their_keys() -> None:
    assert votes(({"a": 1, "b": [2]}, 1.0), ({"b": [2], "a": 1}, 1.0), ([2], 0.0)).at_k(3) == 1.0
    assert votes((" 4 ", 1.0), ("4", 1.0), ("5", 0.0)).at_k(3) == 1.0


def test_of_many_rollouts_only_the_vote_of_all_is_counted() -> None:
    many = votes(*[("A", 1.0)] * EXACT_ROLLOUTS, ("B", 0.0))
    assert (many.at_k(2), many.at_k(EXACT_ROLLOUTS + 1), many.at_k(EXACT_ROLLOUTS + 2)) == (None, 1.0, None)


def verified_row(task: int, reward: float | None, answer: Any = None, **fields: Any) -> Json:
    return {"_ng_task_index": task, "reward": reward, "extracted_answer": answer, **fields}


GROUP = [
    verified_row(0, 1.0, "A", level="easy", reward_components={"answer": 0.8, "form": 0.2}),
    verified_row(0, 0.0, "B", level="easy", reward_components={"answer": 0.0, "form": 0.0}),
    verified_row(0, 1.0, "A", level="easy"),
    verified_row(1, None, "C", level="hard"),
    verified_row(1, 0.0, "C", level="hard"),
]


def test_null_rewards_are_counted_and_in_no_mean() -> None:
    answer = aggregate(GROUP)
    assert answer["agent_metrics"]["unscored"] == 1
    assert answer["agent_metrics"]["mean/reward"] == answer["key_metrics"]["mean/reward"] == 0.5
    assert answer["key_metrics"]["pass@1/reward"] == pytest.approx((2 / 3 + 0) / 2)
    assert answer["key_metrics"]["majority@3/reward"] == 1.0
    assert answer["agent_metrics"]["std/reward"] > 0
    assert answer["agent_metrics"]["mean/reward_components/answer"] == 0.4


def test_the_scores_are_reported_for_each_value_of_a_field() -> None:
    metrics = aggregate(GROUP, by="level")["key_metrics"]
    assert (metrics["easy/mean/reward"], metrics["hard/mean/reward"]) == (pytest.approx(2 / 3), 0.0)
    assert metrics["easy/majority@3/reward"] == 1.0
    assert aggregate(GROUP, by="nothing")["key_metrics"]["(no 'nothing')/mean/reward"] == 0.5


def test_the_table_of_a_field_folds_its_headers_and_cuts_none() -> None:
    subsets = Subsets("difficulty_of_the_task")
    row = verified_row(0, 1.0, difficulty_of_the_task="hard")
    subsets.add(0, row | {"reward_components": {"has_the_right_format": 1.0, "names_all_sources": 0.5}})
    console = Console(width=60, record=True, file=StringIO())
    console.print(subset_table(subsets))
    assert "…" not in console.export_text()


def test_a_field_with_too_many_values_does_not_grow_without_end() -> None:
    subsets = Subsets("seed")
    for seed in range(MAX_VALUES + 5):
        subsets.add(seed, verified_row(seed, 1.0, seed=seed))
    assert len(subsets.scores) == MAX_VALUES + 1 and subsets.scores[OTHER].rollouts == 5


def test_without_answers_no_one_votes() -> None:
    scores = Scores()
    for reward in (0.0, 1.0):
        scores.add(0, {"reward": reward})
    assert [name for name, _ in scores.named_scores()] == ["pass@1", "pass@2"]


def output_row(task: int, reward: float | None, **fields: Any) -> Json:
    trace = {"status": "ok", "stop_reason": "answer", "turns": 1, "tool_calls": 0, "tool_errors": 0}
    trace |= {"timings": {"total_s": 1.0}, "reward_components": fields.pop("parts", {})}
    agent = {"agent_ref": {"name": "words_agent"}}
    return {**verified_row(task, reward, **fields), **agent, "ng": trace, "response": {"output": [], "usage": None}}


def test_the_collectors_table_has_votes_parts_and_subsets() -> None:
    aggregates = Aggregates("level")
    for level, reward, answer in [("easy", 1.0, "A"), ("easy", 1.0, "A"), ("hard", None, None)]:
        aggregates.add(output_row(0, reward, answer=answer, level=level, parts={"form": 0.25}))
    [tally] = aggregates.by_agent.values()
    overall, by_level = tables(aggregates)
    assert {"majority@2", "form"} <= set(overall.columns[0]._cells)
    assert list(by_level.columns[0]._cells) == ["easy", "hard"] and list(by_level.columns[2]._cells) == [
        "0 (0.0%)",
        "1 (100.0%)",
    ]
    metrics = tally.as_json()
    assert metrics["key_metrics"]["easy/majority@2/reward"] == metrics["agent_metrics"]["majority@2/reward"] == 1.0
    assert metrics["agent_metrics"]["mean/reward_components/form"] == 0.25
    assert metrics["ng"]["subsets"]["level"]["hard"] == {"rollouts": 1, "unscored": 1, "unscored/reward": 1.0}


class Task(VerifyRequest):
    word: str


async def verify(task: Task) -> float:
    return float(task.word in task.text)


def gym(compute_metrics: Any) -> Any:
    return gym_server(verify=verify, compute_metrics=compute_metrics)


async def post_metrics(compute_metrics: Any, rows: list[Json]) -> Json:
    async with local_services({}, words=gym(compute_metrics)) as peers:
        answer: Json = await peers["words"].post("/aggregate_metrics", {"verify_responses": rows})
        return answer


async def test_an_environments_own_metrics_see_the_scored_rollouts() -> None:
    answer = await post_metrics(lambda rows: {"seen": len(rows), **means_by(rows, "level")}, GROUP)
    assert answer["key_metrics"]["seen"] == 4.0
    assert answer["agent_metrics"]["hard/mean/reward"] == 0.0
    assert answer["ng"]["environment"]["errors"] == []


def test_the_scores_of_labels_are_those_of_the_textbook() -> None:
    pairs = [("yes", "yes"), ("yes", "no"), ("yes", None), ("no", "no"), ("no", "yes"), ("maybe", "no")]
    found = label_scores({"expected_answer": truth, "extracted_answer": label} for truth, label in pairs)
    assert {name: found[name] for name in ("precision/yes", "recall/yes", "f1/yes")} == pytest.approx(
        {"precision/yes": 1 / 2, "recall/yes": 1 / 3, "f1/yes": 2 / 5}
    )
    assert found["f1/maybe"] == found["precision/maybe"] == 0.0
    assert found["macro/f1"] == pytest.approx((2 / 5 + 2 / 5 + 0) / 3)
    assert label_scores([]) == {} and label_scores([{"a": 1, "b": 1}], "a", "b")["macro/recall"] == 1.0


async def test_own_metrics_that_fail_are_reported_and_lose_no_other_number() -> None:
    answer = await post_metrics(lambda rows: {"mean": rows[0]["no such field"]}, GROUP)
    assert answer["ng"]["environment"] == {
        "metrics": {},
        "errors": ["compute_metrics failed: KeyError: 'no such field'"],
    }
    assert answer["key_metrics"]["mean/reward"] == 0.5


async def test_own_metrics_that_are_not_numbers_are_reported_one_by_one() -> None:
    answer = await post_metrics(lambda rows: {"good": 1, "none": None, "nan": float("nan"), "text": "x"}, GROUP)
    own = answer["ng"]["environment"]
    assert own["metrics"] == {"good": 1.0}
    assert [error.split(";")[0] for error in own["errors"]] == [
        "compute_metrics returned nan as 'nan'",
        "compute_metrics returned 'x' as 'text'",
    ]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"verify_responses": [{"reward": "1"}]}, "'reward' is a number or null"),
        ({"verify_responses": {}} | {"verify_responses": "rows"}, "must be a list of objects"),
        ({"verify_responses": [{"reward": 1.0}], "by": 3}, "must be the name of a field"),
        ({"verify_responses": [{}] * (MAX_ROWS + 1)}, "send no more than 100,000"),
    ],
)
async def test_a_request_for_metrics_that_is_invalid_is_refused(body: Json, message: str) -> None:
    async with local_services({}, words=gym(None)) as peers:
        with pytest.raises(ServiceError, match=message):
            await peers["words"].post("/aggregate_metrics", body)


async def test_the_collector_asks_an_environment_without_the_long_texts(tmp_path: Path) -> None:
    requests: list[Json] = []

    def own(rows: list[Json]) -> dict[str, float]:
        requests.extend(rows)
        return {"count": len(rows)}

    lines = [output_row(index, 1.0, level="easy", document="x" * 20_000) for index in range(3)]
    output = tmp_path / "out.jsonl"
    output.write_text("".join(json.dumps(line) + "\n" for line in lines))
    async with local_services({}, words_agent=gym(own), quiet=gym(None)) as peers:
        report = await environment_metrics(output, peers["words_agent"])
        assert await environment_metrics(output, peers["quiet"]) is None
    assert report == {"metrics": {"count": 3.0}, "errors": []}
    assert all(row["level"] == "easy" and not {"response", "ng", "document"} & row.keys() for row in requests)


async def test_the_collector_sends_no_more_fields_than_an_environment_takes(tmp_path: Path) -> None:
    line = output_row(0, 1.0, **{f"field_{number}": number for number in range(30)})
    output = tmp_path / "out.jsonl"
    output.write_text((json.dumps(line) + "\n") * 20_000)
    async with local_services({}, words_agent=gym(lambda rows: {"count": len(rows)})) as peers:
        report = await environment_metrics(output, peers["words_agent"])
    assert report is not None and 10_000 < report["metrics"]["count"] < 20_000
    assert report["errors"] == [f"only the first {report['metrics']['count']:,.0f} rollouts are in it"]


async def test_the_collector_sends_no_more_bytes_than_an_environment_takes(tmp_path: Path) -> None:
    """The names of the fields are most of them."""
    line = output_row(0, 1.0, **{f"field_{number}_{'x' * 400}": number for number in range(10)})
    output = tmp_path / "out.jsonl"
    output.write_text((json.dumps(line) + "\n") * 10_000)
    async with local_services({}, words_agent=gym(lambda rows: {"count": len(rows)})) as peers:
        report = await environment_metrics(output, peers["words_agent"])
    assert report is not None and 5_000 < report["metrics"]["count"] < 10_000
    assert report["errors"] == [f"only the first {report['metrics']['count']:,.0f} rollouts are in it"]


SHIPPED_METRICS = {
    "games": {"finished", "sokoban/mean/reward"},
    "function_call": {"exact_calls/expected", "parallel/mean/reward"},
    "instruction_following": {
        f"{level}_level/{how}" for level in ("prompt", "instruction") for how in ("strict", "loose")
    },
    "long_context": {"needle/mean/right", "pages<=16/mean/right"},
    "qa_short": {"exact", "f1", "no_answer", "text/mean/exact"},
}


@pytest.mark.parametrize("name", SHIPPED_METRICS)
async def test_a_shipped_environment_counts_its_own_metrics(name: str) -> None:
    async with local_services({}, **{name: module(name).app}) as peers:
        tasks = rows(name, "example")
        answers = [await peers[name].post("/verify", rollout(row, says("I do not know."))) for row in tasks]
        report = await peers[name].post("/aggregate_metrics", {"verify_responses": answers})
    own = report["ng"]["environment"]
    assert own["errors"] == [] and SHIPPED_METRICS[name] <= own["metrics"].keys(), own
    assert all(0.0 <= value <= 1.0 for value in own["metrics"].values())
