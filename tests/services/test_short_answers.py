"""qa_short: F1 of short answers, and no shipped question rewards an answer that lists everything."""

import asyncio
import json
from typing import Any

import pytest
from local_services import local_services
from paths import ROOT

from ngym.config.import_path import load_file
from ngym.services.base.app import load

measures = load_file(ROOT / "gym_servers" / "qa_short" / "app.py").measures


def serving(**options: Any):
    return local_services({"qa": options}, qa=load(ROOT / "gym_servers" / "qa_short" / "app.py").app)


def rollout(text: str, **row: Any) -> dict[str, Any]:
    output = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}]
    return {"responses_create_params": {"input": "q"}, "response": {"output": output}, **row}


def shipped_rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / "data" / "qa_short" / "validation.jsonl").read_text().splitlines()]


def own(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "responses_create_params"}


@pytest.mark.parametrize("metric", ["exact", "f1"])
async def test_the_expected_answer_of_a_shipped_row_is_worth_one_and_the_whole_passage_nothing(metric):
    async with serving(metric=metric) as peers:

        async def reward(text: str, row: dict[str, Any]) -> float:
            return (await peers["qa"].post("/verify", rollout(text, **own(row))))["reward"]

        for row in shipped_rows():
            passage, _, question = row["responses_create_params"]["input"].partition("\n\n")
            right, alias, *wrong = await asyncio.gather(
                reward(f"Answer: {row['expected_answer']}", row),
                reward(f"\\boxed{{{[row['expected_answer'], *row['aliases']][-1]}}}", row),
                reward(f"Answer: {passage}", row),
                reward(question, row),
                reward("Answer: ", row),
                reward(f"Answer: {row['expected_answer']} or Rome", row),
                reward(f"Answer: not {row['expected_answer']}", row),
            )
            assert (right, alias) == (1.0, 1.0), row
            assert not any(wrong), (wrong, row)


async def test_f1_pays_for_a_part_of_the_name_and_not_for_a_list():
    async with serving(metric="f1") as peers:

        async def reward(text: str) -> float:
            return (await peers["qa"].post("/verify", rollout(text, expected_answer="Eero Lunen")))["reward"]

        assert await reward("Answer: Eero") == pytest.approx(2 / 3)
        for two in ("Eero; Mina", "Eero Lunen and Mina", "Eero Lunen/Mina", "Mina, Eero Lunen", "Eero Lunen & Mina"):
            assert await reward(f"Answer: {two}") == 0.0, two
        assert await reward("Answer: " + "Eero Lunen " * 20) == 0.0


async def test_shaping_in_the_stanza_changes_the_reward_and_keeps_the_raw_one():
    async with serving(shaping={"format": "boxed", "format_weight": 0.25}) as peers:
        scored = await peers["qa"].post("/verify", rollout("Answer: Rome", expected_answer="Rome"))
    assert (scored["reward"], scored["raw_reward"]) == (0.75, 1.0)
    assert scored["reward_components"] == {"correctness": 1.0, "shaping/format": -0.25}


@pytest.mark.parametrize(
    ("answer", "expected", "paid"),
    [
        *[(answer, "5", False) for answer in ("- 5", "5k", "5 k", "5K", "5M", "5 bn", "5%", "-5", "5 or 6", "about 5")],
        *[(answer, "5", True) for answer in ("5", "5.", "(5)", '"5"', "$5$", "five", "5 apples", "5 km", "5.0")],
        *[("5 MB", "5 Mb", False), ("5 mW", "5 MW", False), ("5 M", "5 m", False), ("5 kb/s", "5 kB/s", False)],
        *[("5 KM", "5 km", True), ("5 mb", "5 MB", True), ("5 megabytes", "5 megabytes", True)],
        *[("300K", "300 K", True), ("300 kelvin", "300 K", True), ("300 K", "300", True), ("5k", "5000", True)],
        *[("$5M", "$5 million", True), ("5 dollars", "$5", True), ("5 euros", "$5", False)],
    ],
)
def test_a_sign_a_scale_and_the_case_of_a_unit_belong_to_a_number(answer: str, expected: str, paid: bool) -> None:
    assert measures(answer, [expected], "number", 0.0).exact == float(paid)


AMOUNTS = {
    "5 km": "five kilometers | $5$ km",
    "26,510": "26 510 | 26\u202f510",
    "$5 million": "5 million dollars | US$5 million | USD 5 million | 5M dollars | $5m",
    "-3 \u00b0C": "minus 3 degrees Celsius | -3 degrees celsius | -3 \u00baC | -3 \u00b0 C | minus three degrees Celsius",
    "12%": "12\\% | 12 per cent | twelve percent | 12 pct",
    "50 MB": "50 megabytes | 50 Megabytes",
    "8 m/s": "8 m / s | 8 metres per second",
    "20 m\u00b2": "20 sqm | 20 meters squared | twenty square meters",
}
OTHERS = {
    "5 km": "five miles | about 5 km | 5 nautical miles | 5 million km | about not 5 km",
    "$5 million": "5 million euros | USD 5 | US$5 billion | 5 dollars",
    "-3 \u00b0C": "-3 degrees Fahrenheit | 3 degrees Celsius | -3 degrees",
    "12%": "twelve | 12 percentage points",
    "50 megabytes": "50 Mb | 50 megabits",
    "8 m/s": "8 m / min | 8 km / s",
}
DATES = (
    "the 10th of October 1684 | Tuesday, October 10, 1684 | on 10 October 1684 | October the 10th, 1684 | 10-Oct-1684"
)


def amounts(table: dict[str, str]) -> list[tuple[str, str]]:
    return [(answer, expected) for expected, answers in table.items() for answer in answers.split(" | ")]


@pytest.mark.parametrize(("answer", "expected"), amounts(AMOUNTS))
def test_an_amount_is_paid_in_its_usual_spellings(answer: str, expected: str) -> None:
    assert measures(answer, [expected], "number", 0.0).exact == 1.0


@pytest.mark.parametrize(("answer", "expected"), amounts(OTHERS))
def test_another_amount_or_unit_is_not_paid(answer: str, expected: str) -> None:
    assert measures(answer, [expected], "number", 0.0).exact == 0.0


@pytest.mark.parametrize("answer", DATES.split(" | "))
def test_a_date_may_have_an_article_a_preposition_or_a_weekday(answer: str) -> None:
    assert measures(answer, ["1684-10-10"], "date", 0.0).exact == 1.0
    assert measures(answer, ["1684-10-11"], "date", 0.0).exact == 0.0
