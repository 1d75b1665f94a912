"""long_context: answers follow from the pages at any length; reading them earns 1, guessing 0."""

import asyncio
import json
import re
import subprocess
import sys
from typing import Any

import pytest
from local_services import local_services
from paths import ROOT

from ngym import ModelCall, model_server
from ngym.convert import message_item, new_response, output_text
from ngym.errors import ServiceError
from ngym.services.base.app import load

APP = load(ROOT / "gym_servers" / "long_context" / "app.py")


def solve(kind: str, question: str, text: str) -> str:
    """The answer, worked out from what the document says."""
    if kind == "needle":
        gate = re.search(r"of the (\w+ \w+)\?", question)[1]
        return re.search(rf"code of the {gate} is (\d+)", text)[1]
    if kind == "counting":
        town = re.search(r"from (\w+)\?", question)[1]
        return str(text.count(f"courier from {town} "))
    if kind == "state":
        return re.findall(r"The key was brought to the (\w+)", text)[-1]
    values: dict[str, str] = {}
    for name, source, value in re.findall(r"Variable (\w+) is set to (?:the value of variable (\w+)|(\d+))", text):
        values[name] = values[source] if source else value
    target = re.search(r"value (\d+)", question)[1]
    return ", ".join(name for name, value in values.items() if value == target)


async def reader(request: dict[str, Any], call: ModelCall) -> dict[str, Any]:
    """Reads every page, one after another, then answers."""
    items = request["input"]
    question = items[0]["content"]
    pages = [json.loads(item["output"]) for item in items if item.get("type") == "function_call_output"]
    of = int(re.search(r"document of (\d+) pages", question)[1])
    if len(pages) < of:
        arguments = json.dumps({"page": len(pages) + 1})
        name = f"c{len(pages)}"
        output = [{"type": "function_call", "id": name, "call_id": name, "name": "read_page", "arguments": arguments}]
    else:
        kind = next(
            k
            for k, w in (("needle", "code"), ("variables", "variables"), ("counting", "couriers"), ("state", "room"))
            if w in question
        )
        output = [message_item([output_text(f"Answer: {solve(kind, question, ' '.join(pages))}")], "m")]
    return new_response(request, output, response_id="r", model="reader")


async def test_a_model_that_reads_every_page_earns_every_shipped_row():
    rows = [json.loads(line) for line in (ROOT / "data" / "long_context" / "validation.jsonl").open()]
    services = {"gym": APP.app, "agent": load(ROOT / "agents" / "simple" / "app.py").app}
    async with local_services(
        {"agent": {"gym": "gym", "model": "model"}}, **services, model=model_server(respond=reader)
    ) as peers:
        done = await asyncio.gather(*(peers["agent"].post("/run", row) for row in rows))
    assert [row["reward"] for row in done] == [1.0] * len(rows)
    assert {row["kind"] for row in rows} == {"needle", "variables", "counting", "state"}


async def test_a_page_of_a_very_long_document_is_made_without_the_others():
    row = {"responses_create_params": {"input": "q"}, "kind": "needle", "seed": 1, "pages": 100_000, "facts": 200}
    async with local_services(gym=APP.app) as peers:
        session = peers["gym"].session()
        await session.post("/seed_session", row)
        page = await session.post("/read_page", {"page": 99_999})
        again = await session.post("/read_page", {"page": 99_999})
        assert page == again
        assert page.startswith("Page 99999 of 100000.")
        for wrong in (0, -1, 100_001):
            with pytest.raises(ServiceError, match="the pages are 1 to 100000"):
                await session.post("/read_page", {"page": wrong})


@pytest.mark.parametrize(
    ("field", "value"), [("pages", 1), ("pages", 10**9), ("facts", 3), ("kind", "x"), ("seed", -1)]
)
async def test_a_row_that_makes_no_document_is_refused(field, value):
    row = {"responses_create_params": {"input": "q"}, "kind": "needle", "seed": 1, "pages": 3, "facts": 8, field: value}
    async with local_services(gym=APP.app) as peers:
        with pytest.raises(ServiceError) as refusal:
            await peers["gym"].session().post("/seed_session", row)
    assert refusal.value.status == 422


def test_documents_of_any_length_can_be_written_into_the_prompts(tmp_path):
    out = tmp_path / "long.jsonl"
    script = ROOT / "data" / "long_context" / "generate.py"
    subprocess.run([sys.executable, script, "--inline", "8", "30", out], check=True)
    rows = [json.loads(line) for line in out.open()]
    assert len(rows) == 8
    for row in rows:
        text, _, question = row["responses_create_params"]["input"].rpartition("\n\n")
        assert len(text.split()) > 3000
        fields = {key: row[key] for key in ("kind", "seed", "pages", "facts")}
        document = APP.LongTask(responses_create_params={}, response={}, **fields).document
        assert solve(row["kind"], question, text) == document.answer
