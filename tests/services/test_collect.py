"""Collection of tasks x repeats from agents on real sockets: rows, failures, attempts and pauses."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import orjson
import pytest
from aiohttp import web
from local_services import local_services
from paths import ROOT
from stub_agents import head, problem, scored_row, serving, task, text_item
from waiting import PATIENCE_S, reserved_port, until

from ngym import VerifyRequest, gym_server
from ngym.collect import CollectionLimits, CollectionPlan, FailedAttempt, Gate, Outcome, Rollout, collect
from ngym.collect.collection_session import discover
from ngym.collect.plan import plan_rollouts, sampling_seed
from ngym.collect.rollout_scheduler import FREE_OUTAGES, Outages, ServiceGone
from ngym.errors import UsageError
from ngym.peers import Peers
from ngym.schema import Failure, Json, task_id
from ngym.services.base.app import load

OURS = CollectionPlan("agent")
QUICK = CollectionLimits(retry_s=(0.0,), poll_s=0.02)


DEEP = b'{"detail": ' + b"[" * 300 + b"]" * 300 + b', "response": {"output": []}, "reward": 1.0}'
LOST: Failure = {
    "class": "verify_error",
    "stage": "verify",
    "service": "agent",
    "http_status": 404,
    "message": "no such session",
    "retryable": False,
}


@asynccontextmanager
async def answering(answer: Any) -> AsyncIterator[str]:
    """A server that answers every GET so."""
    app = web.Application()
    app.router.add_get("/{any:.*}", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class Task(VerifyRequest):
    n: int


async def collect_all(
    answer: Any, tasks: Any, recipe: CollectionPlan = OURS, limits: CollectionLimits = QUICK, **options: Any
) -> list[Outcome]:
    async with serving(answer) as url:
        peers = Peers({"agent": [url]})
        try:
            return [outcome async for outcome in collect(tasks, peers=peers, recipe=recipe, limits=limits, **options)]
        finally:
            await peers.close()


def rows(outcomes: list[Outcome]) -> list[Json]:
    return [outcome.row for outcome in outcomes if isinstance(outcome, Rollout)]


def failures(outcomes: list[Outcome]) -> list[FailedAttempt]:
    return [outcome for outcome in outcomes if isinstance(outcome, FailedAttempt)]


async def test_a_rollout_of_our_own_agent_is_a_whole_row() -> None:
    def verify(row: Task) -> dict[str, Any]:
        return {"reward": float(row.text == f"task {row.n}"), "said": row.text}

    apps = {
        "gym": gym_server(verify=verify),
        "model": load(ROOT / "models" / "scripted" / "app.py").app,
        "agent": load(ROOT / "agents" / "simple" / "app.py").app,
    }
    options = {"agent": {"gym": "gym", "model": "model"}, "model": {"tokens": True}}
    async with local_services(options, **apps) as peers:
        found = [
            outcome
            async for outcome in collect(
                map(task, range(3)), peers=peers, recipe=CollectionPlan("agent", 2), limits=QUICK
            )
        ]
    assert [row["reward"] for row in rows(found)] == [1.0] * 6
    row = min(rows(found), key=lambda row: (row["_ng_task_index"], row["_ng_rollout_index"]))
    assert (row["n"], row["said"]) == (0, "task 0")
    assert (row["_ng_task_index"], row["_ng_rollout_index"]) == (0, 0)
    assert row["agent_ref"] == {"type": "responses_api_agents", "name": "agent"}
    trace = row["ng"]
    assert (trace["schema_version"], trace["task_id"], trace["attempt"], trace["status"]) == (
        1,
        task_id(task(0)),
        0,
        "ok",
    )
    assert trace["rollout_id"].startswith(trace["run_id"])
    assert trace["segments"][0]["logprobs"] and trace["policy_version"] == [0]
    assert {"queue_s", "model_s", "verify_s", "total_s"} <= trace["timings"].keys()
    assert all("prompt_token_ids" not in item for item in row["response"]["output"])
    assert len({row["ng"]["rollout_id"] for row in rows(found)}) == 6


async def test_repeats_are_in_the_order_aabbcc() -> None:
    found = await collect_all(
        scored_row, map(task, range(3)), CollectionPlan("agent", repeats=2), CollectionLimits(concurrency=1)
    )
    order = [(row["_ng_task_index"], row["_ng_rollout_index"]) for row in rows(found)]
    assert order == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


RESPONSES_ITEMS: list[Json] = [
    {"type": "function_call", "name": "add", "call_id": "c", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "5"},
]
CHAT_MESSAGES: list[Json] = [
    {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "add", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "c", "content": "5"},
]


@pytest.mark.parametrize("called", [RESPONSES_ITEMS, CHAT_MESSAGES], ids=["responses", "chat"])
async def test_an_agent_that_is_not_ours_gets_its_row_completed(called: list[Json]) -> None:
    items = [*called, text_item("5")]
    sent: list[Json] = []

    def answer(row: Json) -> Json:
        sent.append(row)
        return scored_row(row, 0.5, *items, extracted="5")

    row = task(0, agent_ref={"type": "responses_api_agents", "name": "agent"}, _ng_task_index=7, expected_answer="5")
    [found] = rows(await collect_all(answer, [row], CollectionPlan()))
    assert sent[0] == {**row, "_ng_rollout_index": 0}
    assert (found["reward"], found["extracted"], found["_ng_task_index"]) == (0.5, "5", 7)
    trace = found["ng"]
    assert (trace["turns"], trace["tool_calls"], trace["tool_errors"]) == (2, 1, None)
    assert (trace["status"], trace["stop_reason"], trace["segments"]) == ("ok", "answer", [])
    assert trace["timings"]["total_s"] > 0


async def test_token_fields_of_a_foreign_trajectory_become_segments() -> None:
    def answer(row: Json) -> Json:
        first = text_item("a", prompt_token_ids=[1, 2], generation_token_ids=[3], generation_log_probs=[-0.5])
        tool = {"type": "function_call_output", "call_id": "c", "output": "5"}
        last = text_item("b", prompt_token_ids=[1, 2, 3, 4], generation_token_ids=[5], generation_log_probs=[-0.1])
        return scored_row(row, 1.0, first, tool, last)

    [ours] = rows(await collect_all(answer, [task(0)]))
    assert ours["ng"]["segments"] == [
        {
            "token_ids": [1, 2, 3, 4, 5],
            "mask": [[2, 3], [4, 5]],
            "logprobs": [-0.5, -0.1],
            "policy_version": [[2, 3, 0], [4, 5, 0]],
        }
    ]
    assert all("prompt_token_ids" not in item for item in ours["response"]["output"])
    [nemo] = rows(await collect_all(answer, [task(0)], token_format="nemo"))
    assert nemo["response"]["output"][0]["prompt_token_ids"] == [1, 2]
    assert nemo["ng"]["segments"] == ours["ng"]["segments"]


async def test_a_rollout_that_cannot_be_scored_is_kept_as_unscored() -> None:
    [row] = rows(await collect_all(lambda row: scored_row(row, None), [task(0)]))
    assert (row["reward"], row["ng"]["status"]) == (None, "unscored")


async def test_an_incomplete_response_is_truncated() -> None:
    def answer(row: Json) -> Json:
        result = scored_row(row, 0)
        result["response"] |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        return result

    [row] = rows(await collect_all(answer, [task(0)]))
    assert (row["reward"], row["ng"]["status"], row["ng"]["stop_reason"]) == (0.0, "truncated", "length")


async def test_overrides_reach_the_agent_and_leave_the_task_id_alone() -> None:
    sent: list[Json] = []

    def answer(row: Json) -> Json:
        sent.append(row["responses_create_params"])
        return scored_row(row)

    row = {"responses_create_params": {"input": "x", "temperature": 1, "reasoning": {"summary": "auto"}}}
    recipe = CollectionPlan(
        "agent", 2, params={"temperature": 0.5, "reasoning.effort": "low", "metadata.a.b": 1}, seed=10
    )
    found = rows(await collect_all(answer, [row], recipe, CollectionLimits(concurrency=1)))
    assert sent[0] == {
        "input": "x",
        "temperature": 0.5,
        "reasoning": {"summary": "auto", "effort": "low"},
        "metadata": {"a": {"b": 1}, "extra_body": f'{{"seed":{sampling_seed(10, 0, 0)}}}'},
    }
    assert {found["ng"]["task_id"] for found in found} == {task_id(row)}


def test_each_rollout_of_a_seed_has_a_seed_of_its_own_which_another_run_repeats() -> None:
    """With one seed for all tasks, their prompts get the same random numbers, and their rewards are not independent."""

    def seeds(seed: int) -> list[int]:
        planned = plan_rollouts(map(task, range(10)), CollectionPlan("agent", 8, seed=seed))
        params = [one.row["responses_create_params"] for one in planned]
        return [orjson.loads(each["metadata"]["extra_body"])["seed"] for each in params]

    assert seeds(0) == seeds(0)
    drawn = [*seeds(0), *seeds(1)]
    assert len(set(drawn)) == len(drawn) == 160


async def test_rows_that_share_a_task_index_continue_its_rollouts() -> None:
    def answer(row: Json) -> Json:
        return scored_row(row, n=row["n"])

    found = await collect_all(
        answer, [task(0, _ng_task_index=3), task(1, _ng_task_index=3)], CollectionPlan("agent", 2)
    )
    assert sorted((row["n"], row["_ng_rollout_index"]) for row in rows(found)) == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert {row["_ng_task_index"] for row in rows(found)} == {3}


async def test_tasks_are_taken_only_when_there_is_room() -> None:
    read = 0

    def endless() -> Iterator[Json]:
        nonlocal read
        for n in itertools.count():
            read += 1
            yield task(n)

    async with serving(scored_row) as url:
        peers = Peers({"agent": [url]})
        count = 0
        async with aclosing(
            collect(endless(), peers=peers, recipe=CollectionPlan("agent"), limits=CollectionLimits(concurrency=8))
        ) as outcomes:
            async for _ in outcomes:
                count += 1
                if count == 40:
                    break
        await peers.close()
    assert read < 40 + 8 + 2100, "at most what is in flight, and what waits to be read"


async def test_never_more_than_concurrency_are_in_flight() -> None:
    running, most = 0, 0

    async def answer(row: Json) -> Json:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await until(lambda: most >= 7)
        await asyncio.sleep(0.01)  # for one more to come
        running -= 1
        return scored_row(row)

    await collect_all(answer, map(task, range(60)), limits=CollectionLimits(concurrency=7))
    assert most == 7


async def test_leaving_the_loop_cancels_what_is_in_flight() -> None:
    async def answer(row: Json) -> Json:
        if row["n"]:
            await asyncio.sleep(3600)
        return scored_row(row)

    async with asyncio.timeout(PATIENCE_S), serving(answer) as url:
        peers = Peers({"agent": [url]})
        async with aclosing(
            collect(map(task, range(9)), peers=peers, recipe=CollectionPlan("agent"), limits=QUICK)
        ) as outcomes:
            async for outcome in outcomes:
                assert outcome.row["_ng_task_index"] == 0
                break
        await peers.close()
    assert not [t for t in asyncio.all_tasks() if "rollout" in t.get_name()]


async def test_a_held_gate_starts_nothing_new() -> None:
    gate = Gate()
    gate.hold("learner", "the learner is behind")
    async with serving(scored_row) as url:
        peers = Peers({"agent": [url]})
        outcomes = collect([task(0)], peers=peers, recipe=CollectionPlan("agent"), gate=gate)
        first = asyncio.ensure_future(anext(outcomes))
        await asyncio.sleep(0.1)
        assert not first.done()
        gate.hold("learner", None)
        assert isinstance(await first, Rollout)
        await outcomes.aclose()
        await peers.close()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"response_create_params": {}}, "no responses_create_params in this row (is 'response_create_params' meant"),
        ({"responses_create_params": "x"}, "responses_create_params must be an object, not str"),
        (task(0, agent_ref={"name": "agnt"}), "no agent named 'agnt' (did you mean 'agent'?)"),
        (task(0, agent_ref="agent"), 'agent_ref must be {"name": ...}, not "agent"'),
        (task(0), "this row names no agent"),
        (task(0, _ng_task_index="1", agent_ref={"name": "agent"}), "_ng_task_index must be a whole number"),
        ({"responses_create_params": {"metadata": {"extra_body": "{"}}}, "extra_body must be a JSON object written as"),
        ({"responses_create_params": {"metadata": []}, "agent_ref": {"name": "agent"}}, ""),
        ({"responses_create_params": {"metadata": "x"}}, "metadata must be an object, not str"),
    ],
)
async def test_a_task_that_is_invalid_is_refused(row: Json, message: str) -> None:
    if not message:
        assert len(await collect_all(scored_row, [row], CollectionPlan())) == 1
        return
    with pytest.raises(UsageError, match=r"^task 1: ") as caught:
        await collect_all(scored_row, [task(9, agent_ref={"name": "agent"}), row], CollectionPlan())
    assert message in str(caught.value)


async def test_task_indices_are_for_all_rows_or_for_none() -> None:
    with pytest.raises(UsageError, match="only some rows of this file have an _ng_task_index"):
        await collect_all(scored_row, [task(0, _ng_task_index=4), task(1)])


async def test_a_failure_that_may_pass_is_tried_again_and_each_attempt_is_a_row() -> None:
    calls = 0

    def answer(row: Json) -> Any:
        nonlocal calls
        calls += 1
        if calls < 3:
            upstream = {"service": "policy", "url": "http://x", "status": 500}
            return problem(502, failure="model_error", retryable=True, upstream=upstream, detail="CUDA out of memory")
        return scored_row(row)

    found = await collect_all(answer, [task(0)])
    assert [row["ng"]["attempt"] for row in rows(found)] == [2]
    first, second = failures(found)
    assert (first.row["attempt"], second.row["attempt"], first.final, second.final) == (0, 1, False, False)
    assert first.row["n"] == 0 and first.row["_ng_task_index"] == 0 and first.row["_ng_rollout_index"] == 0
    assert first.failure == {
        "class": "model_error",
        "stage": "model",
        "service": "policy",
        "http_status": 500,
        "message": "CUDA out of memory",
        "retryable": True,
    }


async def test_attempts_are_capped() -> None:
    found = await collect_all(lambda row: problem(500, failure="agent_error", retryable=True), [task(0)])
    assert [failed.final for failed in failures(found)] == [False, False, True] and not rows(found)


async def test_a_failure_that_cannot_pass_is_tried_once() -> None:
    errors = [{"field": "target", "message": "Field required"}]
    detail = "this row is not valid: field 'target': Field required"
    found = await collect_all(
        lambda row: problem(422, detail=detail, retryable=False, errors=errors), [task(0), task(1)]
    )
    assert [(failed.final, failed.failure["class"]) for failed in failures(found)] == [(True, "config")] * 2
    assert failures(found)[0].failure["message"] == detail


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (lambda row: web.Response(text="<html>"), "agent_error", "no JSON"),
        (lambda row: [1], "agent_error", "with list, not an object"),
        (lambda row: {"reward": 1.0}, "agent_error", "without a response"),
        (lambda row: {"response": {"output": "x"}, "reward": 1}, "agent_error", "a list of items"),
        (lambda row: {"response": {"output": 5}, "reward": 1}, "agent_error", "a list of items"),
        (lambda row: {"response": {"output": []}}, "verify_error", "without a reward"),
        (lambda row: {"response": {"output": []}, "reward": "1"}, "verify_error", "the reward '1'"),
        (lambda row: web.Response(text='{"response": {}, "reward": 1e999}'), "agent_error", "no JSON"),
        (lambda row: scored_row(row, 1.0, text_item("x", prompt_token_ids=[1])), "agent_error", "all or nothing"),
        (lambda row: scored_row(row, ng={"segments": [1]}), "agent_error", "ng.segments.0 = 1: Input should be a valid dict"),
        (lambda row: scored_row(row, ng={"timings": {"total_s": "soon"}}), "agent_error", "ng.timings.total_s = 'soon': "),
        (lambda row: scored_row(row, ng={"finish_reasons": "stop"}), "agent_error", "ng.finish_reasons = 'stop': "),
        (lambda row: scored_row(row, ng={"finish_reasons": [["x"]]}), "agent_error", "ng.finish_reasons.0 = ['x']: "),
        (lambda row: scored_row(row, ng={"stop_reason": ["x"]}), "agent_error", "ng.stop_reason = ['x']: "),
        (lambda row: scored_row(row, ng={"reward_components": True}), "verify_error", "ng.reward_components = True: "),
        (lambda row: scored_row(row, ng={"policy_version": [[1]]}), "agent_error", "ng.policy_version.0 = [1]: "),
        (lambda row: scored_row(row, ng={"turns": -1}), "agent_error", "ng.turns = -1: "),
        (lambda row: scored_row(row, reward_components={"a": "x"}), "verify_error", "with reward_components.a = 'x': "),
        (lambda row: scored_row(row, ng=3), "agent_error", "an `ng` that is not an object"),
        (lambda row: {**scored_row(row), "response": {"output": [], "usage": 3}}, "agent_error", "usage that is not an object"),
        (lambda row: web.Response(status=500, text='"ValueError(\'bad\')"'), "agent_error", "ValueError('bad')"),
        (lambda row: web.Response(body=DEEP), "agent_error", "nested deeper than 250 levels"),
        (lambda row: web.Response(status=500, body=DEEP), "agent_error", "answered 500"),
        (lambda row: web.Response(status=301, headers={"location": "/"}), "agent_error", "answered 301 to POST /run"),
        (lambda row: problem(422, failure=["x"], upstream={"service": ["x"], "status": "x"}), "config", "it failed"),
        (lambda row: scored_row(row, 0.0, _ng_failure_class="judge_failed", _ng_failure_judge_error="no verdict"), "judge_error", "no verdict"),
    ],
)  # fmt: skip
async def test_whatever_an_agent_answers_ends_as_a_row(answer: Any, kind: str, words: str) -> None:
    found = await collect_all(answer, [task(0)])
    last = failures(found)[-1]
    assert last.final and not rows(found)
    assert last.failure["class"] == kind
    assert words in last.failure["message"]


@pytest.mark.parametrize("waiting", ["\u00b2", "9" * 5000, "-1", "soon"])
async def test_an_agents_queue_that_is_not_a_number_is_passed_over(waiting: str) -> None:
    def answer(row: Json) -> web.Response:
        body = orjson.dumps(scored_row(row)).decode()
        return web.Response(text=body, headers={"x-ng-waiting": waiting})

    assert len(rows(await collect_all(answer, [task(0)]))) == 1


async def test_a_rollout_that_takes_too_long_is_a_timeout() -> None:
    async def answer(row: Json) -> Json:
        await asyncio.sleep(3600 if row["n"] == 1 else 0)
        return scored_row(row)

    for seconds in (0.3, 3.0, 30.0):
        limits = CollectionLimits(timeout_s=seconds, max_attempts=2, retry_s=(0.0,))
        found = await collect_all(answer, map(task, range(3)), limits=limits)
        if len(found) == 4:
            break  # this machine needs no longer for the other two, at the first attempt
    assert sorted(row["_ng_task_index"] for row in rows(found)) == [0, 2]
    assert [failed.failure["class"] for failed in failures(found)] == ["timeout", "timeout"]


async def test_one_bad_rollout_stops_no_other() -> None:
    def answer(row: Json) -> Any:
        return problem(500, retryable=False) if row["n"] % 5 == 0 else scored_row(row)

    found = await collect_all(answer, map(task, range(50)))
    assert len(rows(found)) == 40 and len(failures(found)) == 10


@pytest.fixture
def port() -> Iterator[int]:
    """For an agent that comes and goes."""
    with reserved_port() as port:
        yield port


async def test_an_agent_that_is_down_pauses_the_run_and_spends_no_attempts(port: int) -> None:
    gate = Gate()
    url = f"http://127.0.0.1:{port}"
    peers = Peers({"agent": [url]})
    limits = CollectionLimits(concurrency=4, max_attempts=1, poll_s=0.05)
    outcomes = collect(map(task, range(10)), peers=peers, recipe=CollectionPlan("agent"), limits=limits, gate=gate)
    first = asyncio.ensure_future(anext(outcomes))
    async with asyncio.timeout(PATIENCE_S):
        await until(lambda: gate.reasons)
        assert gate.reasons == {"agent": f"agent does not answer at {url}"}
        assert not first.done()
        async with serving(scored_row, port=port):
            found = [await first] + [outcome async for outcome in outcomes]
    await peers.close()
    assert not gate.reasons
    assert len(rows(found)) == 10 and not failures(found)
    assert {row["ng"]["attempt"] for row in rows(found)} == {0}


async def test_an_agent_that_dies_in_the_middle_costs_nothing(port: int) -> None:
    """Every connection breaks with requests in flight; the agent is back a little later on the same port."""
    counted: Counter[int] = Counter()

    async def answer(row: Json) -> Json:
        counted[row["n"]] += 1
        await asyncio.sleep(0.02)
        return scored_row(row)

    gate = Gate()
    found: list[Outcome] = []
    peers = Peers({"agent": [f"http://127.0.0.1:{port}"]})

    async def consume() -> None:
        limits = CollectionLimits(concurrency=16, max_attempts=1, poll_s=0.05)
        async for outcome in collect(
            map(task, range(100)), peers=peers, recipe=CollectionPlan("agent"), limits=limits, gate=gate
        ):
            found.append(outcome)

    async with serving(answer, port=port):
        consuming = asyncio.create_task(consume())
        await until(lambda: len(found) >= 20)
    await until(lambda: gate.reasons)
    async with asyncio.timeout(PATIENCE_S), serving(answer, port=port):
        await consuming
    await peers.close()
    assert sorted(row["_ng_task_index"] for row in rows(found)) == list(range(100))
    assert not failures(found)
    assert sum(counted.values()) <= 100 + 16, "at most what was in flight is done again"


async def test_a_service_behind_the_agent_that_is_not_ready_is_named_and_waited_for() -> None:
    """The agent cannot reach the model: the run pauses on the model's name."""
    up = False

    def answer(row: Json) -> Any:
        upstream = {"service": "policy", "url": "http://x", "status": None}
        return scored_row(row) if up else problem(502, failure="connect", upstream=upstream, retryable=True)

    gate = Gate()
    async with (
        asyncio.timeout(PATIENCE_S),
        serving(answer) as agent,
        serving(scored_row, ready=lambda: 200 if up else 503) as policy,
    ):
        peers = Peers({"agent": [agent], "policy": [policy]})
        limits = CollectionLimits(max_attempts=1, poll_s=0.05)
        outcomes = collect(map(task, range(5)), peers=peers, recipe=CollectionPlan("agent"), limits=limits, gate=gate)
        first = asyncio.ensure_future(anext(outcomes))
        await until(lambda: gate.reasons)
        assert gate.reasons == {"policy": f"policy is not ready at {policy}: loading"}
        up = True
        found = [await first] + [outcome async for outcome in outcomes]
        await peers.close()
    assert len(rows(found)) == 5 and not failures(found)


async def test_connect_failures_of_a_service_that_is_up_spend_attempts() -> None:
    """Otherwise an agent with a wrong address of its model would be asked for ever."""
    upstream = {"service": "policy", "url": "http://wrong", "status": None}
    async with (
        serving(scored_row) as policy,
        serving(lambda row: problem(502, failure="connect", upstream=upstream, retryable=True)) as agent,
    ):
        peers = Peers({"agent": [agent], "policy": [policy]})
        found = [o async for o in collect([task(0)], peers=peers, recipe=CollectionPlan("agent"), limits=QUICK)]
        await peers.close()
    assert [failed.failure["service"] for failed in failures(found)] == ["policy"] * 3


async def test_what_a_restarted_service_lost_spends_no_attempts() -> None:
    """The agent was killed and started again within its supervisor's 0.2 s: it answers, but the sessions are gone."""
    restarts = 0

    def answer(row: Json) -> Any:
        nonlocal restarts
        if row["n"] == 3 and restarts == 0:
            restarts = 1
            return problem(404, failure="verify_error", detail="no such session", retryable=False)
        return scored_row(row)

    async with head(answer, restarts=lambda: restarts) as head_url:
        peers = Peers({}, head_url)
        await peers.refresh()
        found = [
            o
            async for o in collect(
                map(task, range(9)), peers=peers, recipe=OURS, limits=CollectionLimits(max_attempts=1)
            )
        ]
        await peers.close()
    assert len(rows(found)) == 9 and not failures(found)


async def test_the_restarts_of_a_locked_run_are_known_too() -> None:
    """Its head and its services answer nothing without the token."""
    requests: set[tuple[str, str | None]] = set()

    async def answer(request: web.Request) -> web.Response:
        requests.add((request.path, request.headers.get("authorization")))
        if request.headers.get("authorization") != "Bearer the-token-of-the-run":
            return web.json_response({}, status=401)
        return web.json_response([{"name": "agent", "kind": "agent", "url": url, "restarts": len(requests) - 1}])

    async with answering(answer) as url:
        peers = Peers({"agent": [url]}, url, "the-token-of-the-run")
        outages = Outages(peers, Gate(), poll_s=0.02, give_up_s=0.1)
        await outages.begin()
        lost = await outages.explain(LOST, asyncio.get_running_loop().time())
        await outages.close()
        await peers.close()
    assert lost and {path for path, _ in requests} == {"/servers", "/ready"}


@pytest.mark.parametrize("body", [b"<html>", b"null", b'{"a": 1}', b"[1]", b'[{"name": "agent"}]', b'[{"kind": []}]'])
async def test_a_stranger_in_the_heads_place_is_not_believed(body: bytes) -> None:
    """The head's process died, and its port is by now another program's."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=body)

    async with answering(answer) as url:
        peers = Peers({"agent": ["http://127.0.0.1:9"]}, url)
        await peers.refresh()
        assert peers.urls == {"agent": ["http://127.0.0.1:9"]}
        outages = Outages(peers, Gate(), poll_s=0.02, give_up_s=0.1)
        await outages.begin()
        with pytest.raises(ServiceGone, match="agent does not answer"):
            await outages.explain(LOST, 0.0)
        await peers.close()
        with pytest.raises(UsageError, match="is not that of a head"):
            await discover(url)


async def test_a_rollout_that_kills_a_service_every_time_is_given_up() -> None:
    restarts = 0

    def answer(row: Json) -> Any:
        nonlocal restarts
        if row["n"] == 3:
            restarts += 1
            return problem(502, failure="connect", detail="connection reset", retryable=True)
        return scored_row(row)

    async with asyncio.timeout(PATIENCE_S), head(answer, restarts=lambda: restarts) as head_url:
        peers = Peers({}, head_url)
        await peers.refresh()
        found = [o async for o in collect(map(task, range(9)), peers=peers, recipe=OURS, limits=QUICK)]
        await peers.close()
    assert len(rows(found)) == 8
    assert [failed.final for failed in failures(found)] == [False, False, True]
    assert restarts == FREE_OUTAGES + 3


async def test_a_service_that_stays_away_ends_the_run(port: int) -> None:
    url = f"http://127.0.0.1:{port}"
    peers = Peers({"agent": [url]})
    with pytest.raises(ServiceGone, match=rf"agent does not answer at {url}, for \d+ s now; .* --resume"):
        limits = CollectionLimits(poll_s=0.02, give_up_s=0.1)
        _ = [o async for o in collect(map(task, range(9)), peers=peers, recipe=CollectionPlan("agent"), limits=limits)]
    await peers.close()
