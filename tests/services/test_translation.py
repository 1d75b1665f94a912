"""translation: a reference earns 1, small differences slightly less, and copies or other languages little."""

import asyncio
import json
from typing import Any

import pytest
from local_services import local_services
from paths import ROOT

from ngym.services.base.app import load

SOURCE = "The old tower is white and the bridge is next to the river."
GERMAN = "Der alte Turm ist weiß und die Brücke ist neben dem Fluss."
SPANISH = "La torre vieja es blanca y el puente está al lado del río."


async def verify_all(
    *texts: str, references: tuple[str, ...] = (GERMAN,), source: str = SOURCE, **options: Any
) -> list[dict[str, Any]]:
    row = {"responses_create_params": {"input": "q"}, "source": source, "references": list(references)}
    outputs = [[{"type": "message", "role": "assistant", "content": text}] for text in texts]
    async with local_services({"gym": options}, gym=load(ROOT / "gym_servers" / "translation" / "app.py").app) as peers:
        return await asyncio.gather(
            *(peers["gym"].post("/verify", {**row, "response": {"output": o}}) for o in outputs)
        )


async def test_nearer_is_better():
    near, far = (
        GERMAN.replace("alte", "neue"),
        GERMAN.replace("Turm", "Baum").replace("Fluss", "See").replace("weiß", "rot"),
    )
    rewards = [answer["reward"] for answer in await verify_all(GERMAN, near, far, SPANISH, SOURCE, "")]
    assert rewards[0] == 1.0
    assert rewards == sorted(rewards, reverse=True)
    assert rewards[1] > 0.7 > rewards[2] > 0.3
    assert rewards[3] < 0.3
    assert rewards[4:] == [0.0, 0.0]


async def test_labels_and_quotation_marks_are_not_part_of_the_translation():
    answers = await verify_all(f"Translation: {GERMAN}", f"„{GERMAN}“", f"<think>{SOURCE}</think>\n**{GERMAN}**")
    assert [answer["reward"] for answer in answers] == [1.0] * 3


REFUSED = {
    "a copy": SOURCE,
    "a copy with one word translated": SOURCE.replace("tower", "Turm"),
    "a copy with the translation of half of it": SOURCE.replace("The old tower is white", "Der alte Turm"),
    "three translations": f"{GERMAN}\n{GERMAN}\n{GERMAN}",
    "every likely word": "der die das dem den alte neue Turm Brücke Fluss ist weiß und neben " * 3,
    "half of it": GERMAN[: len(GERMAN) // 3],
    "another script": "Старая башня белая, и мост находится рядом с рекой.",  # noqa: RUF001
    "marks": "." * len(GERMAN),
    "nothing": "",
    "only reasoning": f"<think>{GERMAN}",
    "ten million letters": "a" * 10_000_000,
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_not_a_translation_is_worth_nothing_and_says_why(name):
    [answer] = await verify_all(REFUSED[name])
    assert (answer["reward"], answer["outcome"]) == (0.0, "refused")
    assert answer["reason"]


async def test_of_several_references_the_nearest_counts():
    other = "Der alte Turm ist weiß, und neben dem Fluss ist die Brücke."
    answers = await verify_all(other, GERMAN, references=(GERMAN, other))
    assert [answer["reward"] for answer in answers] == [1.0, 1.0]


async def test_a_name_that_is_the_same_in_both_languages_is_not_a_copy():
    [answer] = await verify_all("Maria Müller", references=("Maria Müller",), source="Maria Müller")
    assert answer["reward"] == 1.0


async def test_weights_split_the_reward_between_chrf_and_bleu():
    [answer] = await verify_all(GERMAN.replace("alte", "neue"), chrf_weight=0.5)
    parts = answer["parts"]
    assert answer["reward"] == pytest.approx((parts["chrf"] + parts["bleu"]) / 2)
    assert 0 < parts["bleu"] < parts["chrf"] < 1


async def test_the_reference_of_each_shipped_row_is_worth_one_and_its_source_nothing():
    rows = [json.loads(line) for line in (ROOT / "data" / "translation" / "validation.jsonl").open()]
    async with local_services(gym=load(ROOT / "gym_servers" / "translation" / "app.py").app) as peers:
        for row in rows:
            for text, reward in ((row["references"][0], 1.0), (row["source"], 0.0)):
                output = [{"type": "message", "role": "assistant", "content": text}]
                answer = await peers["gym"].post("/verify", {**row, "response": {"output": output}})
                assert answer["reward"] == reward, row
