"""tool_minimal and function_call: gold cases, properties of the data, and answers that try to get an undeserved
reward."""

import asyncio
import json
import string
from itertools import product

import pytest
from local_services import local_services
from shipped_gym import (
    ROOT,
    calls,
    gold_failures,
    module,
    questions,
    rollout,
    rows,
    says,
    serving,
    unreproducible_files,
)

from ngym.errors import ServiceError, UpstreamError
from ngym.services.base.app import load

NAMES = ("tool_minimal", "function_call")


@pytest.mark.parametrize("name", NAMES)
async def test_every_gold_case_gets_the_reward_it_must_get(name):
    assert not await gold_failures(name)


@pytest.mark.parametrize("name", NAMES)
def test_the_shipped_data_is_what_its_script_makes(name, tmp_path):
    assert unreproducible_files(name, tmp_path) == []


@pytest.mark.parametrize("name", NAMES)
async def test_shipped_rows_are_accepted_and_validation_is_not_trained_on(name):
    assert not set(questions(name, "train")) & set(questions(name, "validation"))
    assert set(questions(name, "example")) <= set(questions(name, "validation"))
    async with serving(name) as peers:
        shipped = [row for file in ("train", "validation") for row in rows(name, file)]
        await asyncio.gather(*(peers[name].session().post("/seed_session", row) for row in shipped))


def fewest_calls(shop, handles, needs, limit):
    """The number of calls that reveal the needed facts, found by trying all; limit + 1 if no so many do."""
    tools = module("tool_minimal").TOOLS
    frontier = {(frozenset(handles), frozenset())}
    for count in range(limit + 1):
        if any(facts >= needs for _, facts in frontier):
            return count
        further = set()
        for known, facts in frontier:
            for tool, argument in tools.items():
                for kind, value in known:
                    result = shop.call(tool, value) if kind == argument else None
                    # What adds nothing new to know or to ask cannot be a part of a shortest way.
                    if result and not (result.facts <= facts and result.handles <= known):
                        further.add((known | result.handles, facts | result.facts))
        frontier = further
    return limit + 1


def named_things(shop, question):
    """The things in a question that a tool accepts."""
    words = {word.strip(string.punctuation) for word in question.split()}
    things = {("name", ware.name) for ware in shop.wares.values() if ware.name in question}
    things |= {("sku", sku) for sku in shop.wares if sku in words}
    return things | {("aisle", aisle) for aisle in shop.aisles if aisle in words}


def test_no_task_can_be_done_with_fewer_calls_and_each_can_with_so_many():
    server = module("tool_minimal")
    for row in rows("tool_minimal", "validation") + rows("tool_minimal", "train"):
        shop, question = server.world(row["world"]), row["responses_create_params"]["input"]
        found = fewest_calls(shop, named_things(shop, question), frozenset(row["needs"]), row["minimal_calls"])
        assert found == row["minimal_calls"], question


@pytest.fixture
async def scored():
    apps = {name: module(name).app for name in NAMES}
    async with local_services({}, **apps) as peers:
        yield lambda name, row, *output: peers[name].post("/verify", rollout(row, *output))


def shop_task(minimal):
    return next(row for row in rows("tool_minimal", "train") if row["minimal_calls"] == minimal)


async def test_a_whole_number_of_another_type_is_the_same_world():
    row = shop_task(2)
    name = next(iter(module("tool_minimal").world(row["world"]).wares.values())).name
    async with serving("tool_minimal") as peers:

        async def find_ware(world):
            session = peers["tool_minimal"].session()
            await session.post("/seed_session", {**row, "world": world})
            return await session.post("/find_ware", {"name": name})

        assert (
            await find_ware(float(row["world"]))
            == await find_ware(f"{row['world']}.0")
            == await find_ware(row["world"])
        )


async def test_a_known_answer_that_was_not_looked_up_earns_nothing(scored):
    row = shop_task(2)
    guess = await scored("tool_minimal", row, says(row["expected_answer"]))
    other = await scored(
        "tool_minimal", row, *calls(("get_reviews", {"sku": "K-1"}), ("no_tool", {})), says(row["expected_answer"])
    )
    assert (guess["reward"], guess["right"], guess["looked_up"]) == (0.0, True, False)
    assert (other["reward"], other["failed_calls"]) == (0.0, 2)


async def test_each_needless_call_costs_whether_it_fails_repeats_or_does_not_exist(scored):
    row = shop_task(0)
    answer = says(row["expected_answer"])
    rewards = [
        (await scored("tool_minimal", row, *calls(*extra), answer))["reward"]
        for extra in (
            [],
            [("find_ware", {"name": "x"})],
            [("verify", {})] * 2,
            [("get_freight", {"city": "Hallin"})] * 3,
        )
    ]
    assert rewards[0] == 1.0
    assert rewards == sorted(set(rewards), reverse=True)
    assert rewards[-1] > 0.6


async def test_calls_that_the_trajectory_does_not_show_are_counted_by_the_session():
    row = shop_task(0)
    async with serving("tool_minimal") as peers:
        session = peers["tool_minimal"].session()
        await session.post("/seed_session", row)
        for city in ("Hallin", "Velden"):
            await session.post("/get_freight", {"city": city})
        with pytest.raises(ServiceError, match="get_freight: there is no city 'Paris'"):
            await session.post("/get_freight", {"city": "Paris"})
        answer = await session.post("/verify", rollout(row, says(row["expected_answer"])))
    assert (answer["calls"], answer["failed_calls"]) == (3, 1)
    assert answer["reward"] == pytest.approx(0.7)


async def test_naming_every_city_is_not_an_answer(scored):
    server = module("tool_minimal")
    row = next(row for row in rows("tool_minimal", "train") if row["expected_answer"] in server.CITIES)
    assert (await scored("tool_minimal", row, says(" ".join(server.CITIES))))["right"] is False


TOOL = {
    "type": "function",
    "name": "f",
    "parameters": {
        "type": "object",
        "properties": {
            "n": {"type": "integer"},
            "x": {"type": "number", "default": 1.5},
            "s": {"type": "string"},
            "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
            "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
            "path": {"type": "array", "items": {"type": "string"}},
            "deep": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}},
        },
        "required": ["n"],
    },
}
SAME = [
    ({"n": 5}, {"n": 5.0}),
    ({"n": 5}, {"n": 5, "x": 1.5, "unit": "C"}),
    ({"n": 5, "x": 1.5}, {"n": 5}),
    ({"n": 5, "x": 0.3}, {"n": 5, "x": 0.1 + 0.2}),
    ({"n": 5, "s": "Good  Morning"}, {"n": 5, "s": "good morning "}),
    ({"n": 5, "tags": ["a", "b"]}, {"n": 5, "tags": ["B", "a"]}),
    ({"n": 5, "deep": {"a": 1, "b": False}}, {"n": 5, "deep": {"b": False, "a": 1.0}}),
    ({"n": 5}, {"n": 5, "s": None}),
]
DIFFERENT = [
    ({"n": 5}, {"n": "5"}),
    ({"n": 1}, {"n": True}),
    ({"n": 5}, {"n": 5.5}),
    ({"n": 5}, {}),
    ({"n": 5}, {"n": 5, "x": 2.5}),
    ({"n": 5}, {"n": 5, "unit": "F"}),
    ({"n": 5, "unit": "F"}, {"n": 5, "unit": "f"}),
    ({"n": 5}, {"n": 5, "invented": 1}),
    ({"n": 5}, {"n": 5, "s": ""}),
    ({"n": 5, "tags": ["a", "b"]}, {"n": 5, "tags": ["a", "a"]}),
    ({"n": 5, "path": ["a", "b"]}, {"n": 5, "path": ["b", "a"]}),
    ({"n": 5, "path": ["a"]}, {"n": 5, "path": ["a", "b"]}),
    ({"n": 5, "deep": {"b": False}}, {"n": 5, "deep": {"b": 0}}),
    ({"n": 5, "x": 1e6}, {"n": 5, "x": 1e6 + 10}),
    ({"n": 5}, {"n": 10**30}),
]


async def test_arguments_are_compared_by_their_schema():
    async with serving("function_call") as peers:
        for pairs, exact in ((SAME, 1.0), (DIFFERENT, 0.2)):
            for expected, actual in pairs:
                row = {
                    "responses_create_params": {"input": "", "tools": [TOOL]},
                    "expected_calls": [{"name": "f", "arguments": expected}],
                }
                answer = await peers["function_call"].post("/verify", rollout(row, *calls(("f", actual))))
                assert answer["reward"] == pytest.approx(exact), (expected, actual)


async def test_integers_beyond_64_bits_are_compared_exactly_where_the_row_has_their_digits():
    large = 2**70
    async with serving("function_call") as peers:
        for expected, number, exact in ((large + 1, large + 1, 1.0), (large, large + 1, 0.2), (large, large, 1.0)):
            call = {"type": "function_call", "name": "f", "arguments": f'{{"n": {expected}}}'}
            row = {"responses_create_params": {"input": "", "tools": [TOOL]}, "expected_action": call}
            answer = await peers["function_call"].post("/verify", rollout(row, *calls(("f", {"n": number}))))
            assert answer["reward"] == pytest.approx(exact), (expected, number)


def gold_calls(row):
    return [(call["name"], call["arguments"]) for call in row["expected_calls"]]


def of_kind(kind):
    return next(row for row in rows("function_call", "train") if row["kind"] == kind)


async def test_more_calls_than_asked_for_score_less_whatever_they_are(scored):
    row = of_kind("parallel")
    gold = gold_calls(row)
    tools = [(tool["name"], {}) for tool in row["responses_create_params"]["tools"]]
    right = (await scored("function_call", row, *calls(*gold)))["reward"]
    backwards = (await scored("function_call", row, *calls(*reversed(gold))))["reward"]
    assert right == backwards == pytest.approx(1.0)
    for attempt in ([*gold, ("made_up", {})], [*gold, gold[0]], gold[:-1], gold * 20, tools * 3, [*gold, *tools]):
        assert (await scored("function_call", row, *calls(*attempt)))["reward"] < 0.9


async def test_an_invented_tool_and_arguments_that_are_not_json_are_worth_nothing(scored):
    row = of_kind("single")
    made_up = await scored("function_call", row, *calls(("made_up", {})))
    (broken,) = calls(gold_calls(row)[0])
    half = await scored("function_call", row, {**broken, "arguments": broken["arguments"][:-1]})
    nested = await scored("function_call", row, {**broken, "arguments": "[" * 100_000})
    assert (made_up["reward"], made_up["hallucinated_calls"]) == (0.0, 1)
    assert half["reward"] == nested["reward"] == pytest.approx(0.2)


async def test_where_no_call_is_right_neither_a_call_nor_silence_nor_a_flood_of_words_is(scored):
    for row in (of_kind("no call"), of_kind("missing")):
        name = row["responses_create_params"]["tools"][0]["name"]
        words = " ".join(row.get("asks_for", [])) + "? "
        for output in ([], [says("")], [says("ok")], [says(words * 40)], [*calls((name, {})), says(words)]):
            assert (await scored("function_call", row, *output))["reward"] == 0.0


HONEST = {
    "temperature": ["Which temperature?", "How many degrees should it be?", "Sure! What temperature would you like?"],
    "season": [
        "Which season should I record?",
        "Could you tell me the season?",
        "Which season do you mean (e.g. 1, 2)?",
    ],
    "rate": ["What is the interest rate?", "At how many percent?"],
    "language": [
        "Into which language?",
        "Which language should I translate it into?",
        'Into which language should I translate "where is the station"?',
    ],
    "people": ["For how many people?", "How many guests will there be on Friday?", "For how many?"],
    "start": [
        "Where do you want to start?",
        "Where from?",
        "What is the starting location?",
        "Which city are you starting from?",
        "Where are you departing from?",
    ],
    "time": ["For what time?", "When should it ring?"],
    "city": ["For which city?", "Where would you like the forecast for?"],
    "amount": ["What amount should I send?", "How much should I send?"],
}


async def test_a_question_for_what_is_missing_is_paid_and_one_reply_for_all_rows_is_not(scored):
    missing = [
        row for file in ("train", "validation") for row in rows("function_call", file) if row["kind"] == "missing"
    ]
    words = sorted({word for row in missing for word in [*row["asks_for"], *row["not_for"]]})
    replies = [
        *(f"{word}?" for word in words if " " not in word),
        *(f"Sorry, {word}?" for word in words if " " not in word),
        f"{' '.join(words)}?",
        f"What {', '.join(words)} do you want?",
        "Which one?", "How many?", "Could you tell me more?", "What? When? Where? Which? How much? Who?",
        "I need the temperature, the season and the city. Ok?",
    ]  # fmt: skip
    for row in missing:
        for question in HONEST[row["asks_for"][0]]:
            assert (await scored("function_call", row, says(question)))["reward"] == 1.0, (question, row["asks_for"])
        echo = row["responses_create_params"]["input"]
        assert (await scored("function_call", row, says(echo)))["reward"] == 0.0, echo
        assert (await scored("function_call", row, says(f"Sure. {echo}")))["reward"] == 0.0, echo
        own = [word for word in words if word in row["asks_for"]]
        listed = f"Which {' '.join(own[:1] + ['unit', 'day', 'name', 'size'] * 7)}?"
        assert (await scored("function_call", row, says(listed)))["reward"] == 0.0, listed
        for some in ("unit, day, name, size", "unit day name size colour", "unit/day/name and size"):
            question = f"Which {own[0]}{',' if ',' in some else ''} {some}?".replace("/", " / ")
            assert (await scored("function_call", row, says(question)))["reward"] == 0.0, question
    for reply in replies:
        assert {(await scored("function_call", row, says(reply)))["reward"] for row in missing} == {0.0}, reply
    for texts in HONEST.values():
        for question in texts:
            paid = {
                row["asks_for"][0] for row in missing if (await scored("function_call", row, says(question)))["reward"]
            }
            assert len(paid) <= 1, (question, paid)


async def test_a_row_of_two_kinds_or_with_an_undeclared_tool_is_refused():
    call = {"name": "f", "arguments": {}}
    for fields, reason in (
        (
            {"expected_calls": [], "expected_answer": 1, "asks_for": ["x"]},
            "either expected_calls, expected_answer or asks_for",
        ),
        ({"expected_calls": [call]}, "which the row's tools do not declare"),
    ):
        async with serving("function_call") as peers:
            with pytest.raises(ServiceError, match=reason):
                await peers["function_call"].post("/seed_session", {"responses_create_params": {"input": ""}, **fields})


BAD_TOOLS = (
    {"type": "text"},
    [None],
    [[TOOL]],
    [{"type": "function", "function": TOOL}],
    [{**TOOL, "name": ["f"]}],
    [{**TOOL, "parameters": "object"}],
    [{**TOOL, "parameters": {"properties": []}}],
    [{**TOOL, "parameters": {"properties": {"n": True}}}],
    [{**TOOL, "parameters": {"required": [["n"]]}}],
    [{**TOOL, "parameters": {"required": "n"}}],
    [{**TOOL, "parameters": {"properties": {"path": {"items": [{}]}}}}],
)


@pytest.mark.parametrize("tools", BAD_TOOLS)
async def test_a_row_whose_tools_cannot_be_read_is_refused_with_a_reason(scored, tools):
    row = {"responses_create_params": {"input": "", "tools": tools}, "expected_calls": [{"name": "f", "arguments": {}}]}
    with pytest.raises(ServiceError, match=r"responses_create_params': Value error, tools") as caught:
        await scored("function_call", row, *calls(("f", {"n": 5})))
    assert caught.value.status == 422


async def test_an_agent_that_executes_no_tools_ends_at_the_first_calls():
    row = of_kind("parallel")
    tool_calls = [{"name": name, "arguments": arguments} for name, arguments in gold_calls(row)]
    apps = {
        "env": module("function_call").app,
        "agent": load(ROOT / "agents" / "simple" / "app.py").app,
        "model": load(ROOT / "models" / "scripted" / "app.py").app,
    }
    options = {
        "agent": {"gym": "env", "model": "model", "execute_tools": False},
        "model": {"replies": [{"tool_calls": tool_calls}]},
    }
    async with local_services(options, **apps) as peers:
        scored_row = await peers["agent"].post("/run", row)
    assert scored_row["reward"] == pytest.approx(1.0)
    assert (scored_row["ng"]["turns"], scored_row["ng"]["stop_reason"], scored_row["ng"]["tool_calls"]) == (
        1,
        "answer",
        0,
    )


def test_worlds_of_different_tasks_differ():
    server = module("tool_minimal")
    worlds = [server.world(row["world"]) for row in rows("tool_minimal", "validation")]
    assert all(a.wares != b.wares for a, b in product(worlds, worlds) if a is not b)
    assert len({json.dumps(sorted(world.wares)) for world in worlds}) == len(worlds)


ODD = [
    *(
        "",
        " ",
        "\x00",
        "�",
        "٣",
        "-1",
        "1e400",
        "NaN",
        "{" * 300,
        "a" * 20_000,
        "[d001]",
        "../../etc/passwd",
        "' OR 1=1 --",
    ),
    *(
        "e00",
        "p00",
        "m00",
        "f00",
        "t00",
        "2027-03-16",
        "24:00",
        "09:00+14:00",
        "9999-12-31",
        "0001-01-01",
        "1/0",
        "(" * 40,
    ),
    *(
        "with recursive r(n) as (select 1 union all select n+1 from r) select * from r",
        "select zeroblob(1e9)",
        "select 1e999",
    ),
    *("select char(55296)", "select x'ff'", "select 9223372036854775807 + 1", "select 1;select 2", "--", "analyze"),
    *(
        0,
        -1,
        2**53,
        2**63 - 1,
        2**64 - 1,
        -(2**63),
        1e308,
        -0.5,
        True,
        None,
        [],
        {},
        [[]],
        ["p00"],
        ["p00"] * 60,
        {"a": {}},
    ),
]


@pytest.mark.parametrize(
    "name",
    ["calculator", "counter", "weather", "retrieval", "sql", "safety", "tool_minimal", "workplace", "long_context"],
)
async def test_whatever_a_model_passes_to_a_shipped_tool_is_its_own_business(name: str):
    """None of it fails the rollout: else a policy could take its bad rewards out of the mean."""
    row = rows(name, "validation")[0]
    async with serving(name, **({"max_queries": 1000} if name == "sql" else {})) as peers:
        session = peers[name].session()
        tools = (await session.post("/seed_session", row))["tools"]
        assert tools
        for tool in tools:
            fields = list(tool["parameters"].get("properties", {}))
            for odd in ODD:
                for arguments in (dict.fromkeys(fields, odd), {fields[0]: odd} if fields else {"more": odd}):
                    try:
                        await session.request(f"/{tool['name']}", arguments)
                    except UpstreamError as error:
                        assert error.is_for_the_model, f"{tool['name']}({arguments!r:.200}): {error}"
        scored = await session.post("/verify", {**row, "response": {"output": []}})
    assert scored["reward"] is not None


async def test_function_calls_are_all_or_nothing_if_the_stanza_says_so():
    row = next(row for row in rows("function_call", "validation") if len(row["expected_calls"]) == 2)
    right = [(call["name"], call["arguments"]) for call in row["expected_calls"]]
    for tool_calls, partial, strict in ((right, 1.0, 1.0), (right[:1], 0.5, 0.0), ([*right, right[0]], 2 / 3, 0.0)):
        for options, reward in (({}, partial), ({"all_or_nothing": True}, strict)):
            async with serving("function_call", **options) as peers:
                scored = await peers["function_call"].post("/verify", rollout(row, *calls(*tool_calls)))
            assert scored["reward"] == pytest.approx(reward), (tool_calls, options)


async def test_a_row_without_any_expected_call_takes_any_text_and_no_call(scored):
    row = next(row for row in rows("function_call", "validation") if row["expected_calls"] == [])
    free = {key: value for key, value in row.items() if key not in ("expected_answer", "asks_for", "not_for")}
    call = calls((row["responses_create_params"]["tools"][0]["name"], {}))
    for output, reward in (([says("They have some left.")], 1.0), ([says(" ")], 0.0), ([*call, says("Done.")], 0.0)):
        assert (await scored("function_call", free, *output))["reward"] == reward
