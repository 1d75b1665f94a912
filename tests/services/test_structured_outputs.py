"""structured_outputs: references earn 1, a changed value less, and no document or schema blocks the server."""

import asyncio
import json
from typing import Any

from local_services import local_services
from paths import ROOT

from ngym.services.base.app import load


def serving(**options: Any):
    return local_services({"gym": options}, gym=load(ROOT / "gym_servers" / "structured_outputs" / "app.py").app)


def rollout(text: str, **row: Any) -> dict[str, Any]:
    output = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}]
    return {"responses_create_params": {"input": "q"}, "response": {"output": output}, **row}


def shipped_rows() -> list[dict[str, Any]]:
    files = ("train", "validation")
    folder = ROOT / "data" / "structured_outputs"
    return [json.loads(line) for file in files for line in (folder / f"{file}.jsonl").read_text().splitlines()]


async def test_each_reference_earns_one_and_the_empty_and_the_cut_one_nothing():
    async with serving() as peers:

        async def score(row: dict[str, Any], text: str) -> float | None:
            own = {key: value for key, value in row.items() if key != "responses_create_params"}
            return (await peers["gym"].post("/verify", rollout(text, **own)))["reward"]

        rows = shipped_rows()
        assert {row["schema_type"] for row in rows} == {"json", "yaml", "xml", "csv", "toml"}
        for row in rows:
            reference = row["reference"]
            complete, empty, fence, cut = await asyncio.gather(
                *(score(row, text) for text in (reference, "", "```\n```", reference[: len(reference) // 2]))
            )
            assert (complete, empty, fence) == (1.0, 0.0, 0.0), row
            assert cut < 1.0, row


HOSTILE = {
    "look-around that backtracks": ('"' + "a" * 5000 + '!"', "json", {"pattern": "^(?=a)(a+)+$"}),
    "a schema that is its own reference": ("1", "json", {"$ref": "#"}),
    "references in a circle": (
        "1",
        "json",
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    ),
    "a circle, read as XML": ("<a><b>1</b></a>", "xml", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    "a pattern of many repeats": ('"aaa"', "json", {"pattern": "((a{0,100}){0,100}){0,100}$"}),
    "flow sequences": ("[" * 50_000, "yaml", {}),
    "block sequences": ("- " * 49_000 + "x", "yaml", {}),
    "one long key": ("? " * 40_000, "yaml", {}),
    "tables": ("[" + ".".join("a" * 40_000) + "]", "toml", {}),
    "elements": ("<a>" * 10_000 + "</a>" * 10_000, "xml", {}),
    "attributes": ("<a " + " ".join(f'a{i}="1"' for i in range(8_000)) + "/>", "xml", {}),
    "quotes": ('"' * 99_999, "csv", {}),
    "columns": (",".join(str(i) for i in range(15_000)), "csv", {}),
    "unique items": (json.dumps([[i] for i in range(12_000)]), "json", {"uniqueItems": True}),
}


async def test_a_hostile_document_or_schema_gets_an_answer_and_leaves_the_server_able():
    good = rollout('{"a": 1}', schema_str="{}", schema_type="json")
    async with serving() as peers:
        for name, (text, form, schema) in HOSTILE.items():
            hostile = rollout(text, schema_str=json.dumps(schema), schema_type=form)
            async with asyncio.timeout(120):
                bomb, *others = await asyncio.gather(
                    peers["gym"].post("/verify", hostile), *(peers["gym"].post("/verify", good) for _ in range(4))
                )
            assert [answer["reward"] for answer in others] == [1.0] * 4, name
            assert bomb["outcome"] in ("correct", "invalid", "too_heavy", "unverifiable"), name
            assert (bomb["reward"] is None) == (bomb["outcome"] == "unverifiable"), name
            assert bomb["reward"] is not None or schema, "a document alone makes no reward null"


async def test_without_fences_only_the_whole_text_is_the_document():
    async with serving(fences=False) as peers:
        fenced = await peers["gym"].post("/verify", rollout("```\n{}\n```", schema_str="{}"))
        bare = await peers["gym"].post("/verify", rollout(" {}\n", schema_str="{}"))
    assert (fenced["reward"], bare["reward"]) == (0.0, 1.0)
