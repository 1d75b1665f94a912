"""The shipped gym servers over real sockets: gold cases, large and deep bodies, rows, and NeMo Gym's protocol."""

import asyncio
import json
import re
import runpy
import sys
import time
from typing import Any

import pytest
from local_services import local_services
from paths import ROOT

from ngym.errors import ServiceError
from ngym.services.base.app import load

NAMES = (
    "calculator",
    "math",
    "mcqa",
    "counter",
    "weather",
    "letters",
    "qa_short",
    "structured_outputs",
    "instruction_following",
    "safety",
    "judge",
    "long_context",
    "translation",
)


def rows(name: str, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / "data" / name / f"{file}.jsonl").read_text().splitlines()]


def says(text: str) -> list[dict[str, Any]]:
    return [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}]


def rollout(output: list[dict[str, Any]], **row: Any) -> dict[str, Any]:
    return {"responses_create_params": {"input": "a question"}, "response": {"output": output}, **row}


def serving(name: str, **options: Any):
    return local_services({name: options}, **{name: load(ROOT / "gym_servers" / name / "app.py").app})


def serving_with_its_model(name: str):
    """For one that asks a model, `policy`: a scripted one replaces it, as in ng_validate."""
    replies = ROOT / "data" / name / "model.jsonl"
    if not replies.is_file():
        return serving(name)
    apps = {name: load(ROOT / "gym_servers" / name / "app.py").app, "policy": load(ROOT / "models/scripted/app.py").app}
    return local_services({"policy": {"file": replies}}, **apps)


@pytest.mark.parametrize("name", NAMES)
async def test_every_gold_case_gets_the_reward_it_must_get(name):
    wrong = []
    async with serving_with_its_model(name) as peers:
        for gold in rows(name, "gold"):
            request = rollout(gold.get("output") or says(gold.get("text", "")), **gold["task"])
            session = peers[name].session()
            await session.post("/seed_session", request)
            for tool, arguments in gold.get("calls", ()):
                await session.post(f"/{tool}", arguments)
            answer = await session.post("/verify", request)
            actual = {key: answer.get(key) for key in gold["expect"]}
            if actual != gold["expect"]:
                wrong.append((gold["case"], actual, gold["expect"]))
    assert not wrong


@pytest.mark.parametrize("name", NAMES)
async def test_every_shipped_row_is_a_task_that_its_server_accepts(name):
    async with serving(name) as peers:
        tools = await peers[name].get("/tools")
        shipped = [row for file in ("train", "validation") for row in rows(name, file)]
        await asyncio.gather(*(peers[name].session().post("/seed_session", row) for row in shipped))
    for row in shipped:
        assert row["responses_create_params"].get("tools", []) == tools
        assert row["agent_ref"]["name"] == f"{name}_agent"


@pytest.mark.parametrize("name", NAMES)
def test_no_question_of_validation_is_in_training(name):
    def questions(file):
        return {row["responses_create_params"]["input"] for row in rows(name, file)}

    assert not questions("train") & questions("validation")
    assert questions("example") <= questions("validation")
    assert len(questions("train")) == len(rows(name, "train"))


@pytest.mark.parametrize(
    "name",
    [
        "math",
        "mcqa",
        "counter",
        "weather",
        "letters",
        "qa_short",
        "structured_outputs",
        "instruction_following",
        "safety",
        "judge",
        "long_context",
        "translation",
    ],
)
def test_the_shipped_data_is_what_its_script_makes(name, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["generate.py", str(tmp_path)])
    runpy.run_path(str(ROOT / "data" / name / "generate.py"), run_name="__main__")
    for file in ("train", "validation", "example"):
        generated, shipped = tmp_path / f"{file}.jsonl", ROOT / "data" / name / f"{file}.jsonl"
        assert generated.read_bytes() == shipped.read_bytes()


async def test_the_right_answer_of_a_math_row_is_worth_one_and_its_question_nothing():
    async with serving("math") as peers:

        async def reward(row: dict[str, Any], formula: str) -> float:
            answer = rollout(says(f"so \\boxed{{{formula}}}"), **_own(row))
            return (await peers["math"].post("/verify", answer))["reward"]

        for row in rows("math", "validation"):
            right, *echoes = await asyncio.gather(
                *(reward(row, formula) for formula in (row["expected_answer"], *row["question"].split("$")[1::2]))
            )
            assert right == 1.0, row["question"]
            assert not any(echoes), row["question"]


async def test_only_the_expected_letter_of_a_multiple_choice_row_is_worth_one():
    async with serving("mcqa") as peers:
        for row in rows("mcqa", "validation"):
            options = {letter: text for option in row["options"] for letter, text in option.items()}
            assert len(set(options.values())) == len(options)
            requests = [rollout(says(f"\\boxed{{{letter}}}"), **_own(row)) for letter in options]
            scored = await asyncio.gather(*(peers["mcqa"].post("/verify", request) for request in requests))
            rewarded = [letter for letter, answer in zip(options, scored, strict=True) if answer["reward"]]
            assert rewarded == [row["expected_answer"]]


def _own(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "responses_create_params"}


# Each of these burns seconds or gigabytes where it is evaluated. The last three are refused before that; the others
# look harmless and run into the deadline.
BOMBS = {
    "expansion": "(x+1)^{5000}",
    "tower under a sign": "10^{-10^{10}}",
    "product": r"\prod_{n=1}^{1000000} n",
    "binomial": r"\binom{10000000}{5000000}",
    "factorials": "((((((9!)!)!)!)!)!)!",
    "set": r"\{" + ",".join(map(str, range(3000))) + r"\}",
    "tower": "9^{9^{9^9}}",
    "digits": "9" * 30_000,
    "brackets": "(" * 5000 + "1" + ")" * 5000,
}


async def test_a_bomb_is_worth_nothing_and_blocks_no_one():
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        while True:
            started, worked = time.monotonic(), time.thread_time()
            await asyncio.sleep(0.002)
            longest = max(longest, min(time.monotonic() - started, time.thread_time() - worked))

    async def score(answer: str) -> dict[str, Any]:
        return await peers["math"].post("/verify", rollout(says(f"so \\boxed{{{answer}}}"), expected_answer="5"))

    async with serving("math", deadline_s=0.8) as peers:
        watcher = asyncio.create_task(watch())
        bombs = asyncio.gather(*(score(bomb) for bomb in BOMBS.values()))
        good: list[dict[str, Any]] = []
        for _ in range(5):  # not all in one turn of the loop, which is the clients' too
            good += await asyncio.gather(*(score(("5", "x=5", "10/2", "6")[i % 4]) for i in range(20)))
        bombs = dict(zip(BOMBS, await bombs, strict=True))
        watcher.cancel()
    assert {name: (bomb["reward"], bomb["outcome"]) for name, bomb in bombs.items()} == dict.fromkeys(
        BOMBS, (0.0, "too_heavy")
    )
    assert [answer["reward"] for answer in good] == [1.0, 1.0, 1.0, 0.0] * 25
    assert longest < 0.4, "a bomb in the loop itself would have held it for 0.8 s"


async def test_the_calculator_answers_a_bare_number_or_says_what_is_wrong():
    async with serving("calculator") as peers:
        for expression, value in (
            ("37+58", b"95"),
            ("2*(3+4)", b"14"),
            ("1/4", b"0.25"),
            ("-3*-2", b"6"),
            ("6 \N{MULTIPLICATION SIGN} 7 \N{MINUS SIGN} 2", b"40"),
            ("0.1+0.2", b"0.3"),
        ):
            reply = await peers["calculator"].request("POST", "/calculator", {"expression": expression})
            assert reply.body == value
        for expression, reason in (
            ("2**3", "unexpected '*' in '2**3'"),
            ("1/0", "division by zero"),
            ("two", "'t' in 'two' is neither a number"),
            ("(1", "a ')' is missing"),
            ("", "ends where a number"),
            ("__import__('os')", "'_' in"),
            ("9" * 31, "31 digits; at most 30"),
            ("(" * 50 + "1" + ")" * 50, "nested more than 20 levels"),
            ("1+" * 200 + "1", "401 characters; at most 200"),
            ("9" * 30 + "*" + "9" * 30, "more than 18 digits"),
        ):
            with pytest.raises(ServiceError, match=f"calculator: .*{re.escape(reason)}"):
                await peers["calculator"].post("/calculator", {"expression": expression})


async def test_two_rollouts_do_not_see_each_others_counter():
    async with serving("counter") as peers:
        sessions = [peers["counter"].session() for _ in range(64)]
        row = {"responses_create_params": {"input": ""}, "target": 1}
        await asyncio.gather(*(session.post("/seed_session", row) for session in sessions))
        for amount in (3, -1):
            await asyncio.gather(*(session.post("/add", {"amount": amount * i}) for i, session in enumerate(sessions)))
        scored = await asyncio.gather(
            *(session.post("/verify", rollout(says(""), target=2 * i)) for i, session in enumerate(sessions))
        )
    assert [row["reward"] for row in scored] == [1.0] * 64


async def test_nemo_gyms_counter_starts_at_the_rows_count():
    async with local_services(counter=load(ROOT / "gym_servers" / "counter" / "nemo_gym.py").app) as peers:
        row = {"responses_create_params": {"input": ""}, "initial_count": 3, "expected_count": 5}
        for amount, reward in ((2, 1.0), (1, 0.0)):
            session = peers["counter"].session()
            await session.post("/seed_session", row)
            assert await session.post("/increment_counter", {"count": amount}) == {"success": True}
            assert await session.post("/get_counter_value", {}) == {"count": 3 + amount}
            scored = await session.post("/verify", {**row, **rollout(says(""))})
            assert scored["reward"] == reward


async def test_the_weather_speaks_nemo_gyms_wire():
    async with serving("weather") as peers:
        answer = await peers["weather"].post("/get_weather", {"city": "San Francisco, CA"})
        assert set(answer) == {"city", "weather_description"}
        assert answer["city"] == "San Francisco, CA"
        assert answer["weather_description"].startswith("The weather in San Francisco, CA is ")
        request = rollout(says("hi"))
        assert await peers["weather"].post("/verify", request) == {**request, "reward": 0.0}


@pytest.mark.parametrize(
    ("name", "field"),
    [("calculator", "expected_answer"), ("mcqa", "expected_answer"), ("counter", "target"), ("letters", "letter")],
)
async def test_a_row_without_its_verifiers_field_is_refused_by_name(name, field):
    async with serving(name) as peers:
        with pytest.raises(ServiceError, match=f"field '{field}'"):
            await peers[name].session().post("/seed_session", {"responses_create_params": {"input": "q"}})


SCRIPTS = {
    "calculator": [
        {
            "match": "(\\d+) .*(?:lost|gave away) (\\d+)",
            "turn": 1,
            "tool_calls": [{"name": "calculator", "arguments": {"expression": "{1}-{2}"}}],
        },
        {"turn": 2, "text": "The answer is {tool_output}."},
    ],
    "counter": [
        {"match": "Bring it to (-?\\d+)", "turn": 1, "tool_calls": [{"name": "add", "arguments": '{"amount": {1}}'}]},
        {"turn": 2, "text": "Done."},
    ],
    "weather": [
        {"match": "in ([A-Z][a-z]+)", "turn": 1, "tool_calls": [{"name": "get_weather", "arguments": {"city": "{1}"}}]},
        {"turn": 2, "text": "{tool_output}"},
    ],
}


@pytest.mark.parametrize("name", SCRIPTS)
async def test_an_agent_that_uses_the_tool_well_earns_the_reward_on_shipped_rows(name):
    fitting = [row for row in rows(name, "train") if re.search(SCRIPTS[name][0]["match"], _question(row))][:10]
    services = {part: load(ROOT / folder / "app.py").app for part, folder in _parts(name).items()}
    options = {"agent": {"gym": name, "model": "model"}, "model": {"replies": SCRIPTS[name]}}
    async with local_services(options, **services) as peers:
        finished = await asyncio.gather(*(peers["agent"].post("/run", row) for row in fitting))
    assert len(finished) == 10
    assert [row["reward"] for row in finished] == [1.0] * 10
    assert {row["ng"]["tool_errors"] for row in finished} == {0}


def _parts(name: str) -> dict[str, str]:
    return {name: f"gym_servers/{name}", "agent": "agents/simple", "model": "models/scripted"}


def _question(row: dict[str, Any]) -> str:
    question: str = row["responses_create_params"]["input"]
    return question
