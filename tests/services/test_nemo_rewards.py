"""Rows with NeMo Gym's fields are accepted unchanged, and answers get the reward that they get there."""

import json
from typing import Any

import pytest
from local_services import local_services
from paths import ROOT

from ngym.services.base.app import load

SCHEMA = json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
SQUARE = "```python\nn = int(input())\nprint()\nprint(n * n / 1)\n```"

# server, its options (the same in all of its rows), fields of the row, what the model says, the reward there
ROWS: list[tuple[str, dict[str, Any], dict[str, Any], str, float]] = [
    ("mcqa", {}, {"expected_answer": "D"}, "\\boxed{D}", 1.0),
    ("mcqa", {}, {"expected_answer": "I", "grading_mode": "strict_single_letter_boxed"}, "**I**\n\\boxed{H}", 0.0),
    ("mcqa", {}, {"expected_answer": "C", "grading_mode": "strict_single_letter_boxed"}, "\\boxed{C: a cell}", 0.0),
    ("mcqa", {}, {"expected_answer": "C", "grading_mode": "strict_single_letter_boxed"}, "\\boxed{\\text{C}}", 1.0),
    ("math", {}, {"expected_answer": "210", "question": "1 + ... + 20?"}, "\\boxed{210}", 1.0),
    ("qa_short", {}, {"expected_answer": "yes", "type": "comparison"}, '{"answer": "yes"}', 1.0),
    ("qa_short", {}, {"expected_answer": "Chief of Staff"}, 'My answer: {"answer": "Chief of Staff"}', 1.0),
    ("qa_short", {}, {"expected_answer": "5 to 6 pounds"}, '{"answer": "5 lbs"}', 0.0),
    (
        "instruction_following",
        {},
        {
            "instruction_id_list": ["paragraphs:paragraphs", "detectable_format:title"],
            "kwargs": [{}, None],
            "prompt": "p",
        },
        "<<A title>>\n\nOne.\n***\nTwo.",
        1.0,
    ),
    (
        "instruction_following",
        {},
        {"instruction_id_list": ["first_word:first_word_sent"], "kwargs": [{"first_word": "rain"}]},
        "Rain falls. Rain-driven rivers rise.",
        0.0,
    ),
    ("structured_outputs", {"fences": False}, {"schema_str": SCHEMA, "schema_type": "json"}, '{"n": 1}', 1.0),
    ("structured_outputs", {"fences": False}, {"schema_str": SCHEMA}, '```json\n{"n": 1}\n```', 0.0),
    (
        "code_exec",
        {},
        {"verifier_metadata": {"unit_tests": {"inputs": ["3\n"], "outputs": ["9\n"], "fn_name": None}}},
        SQUARE,
        1.0,
    ),
    (
        "code_exec",
        {},
        {"verifier_metadata": {"unit_tests": {"inputs": ["3\n4"], "outputs": ["6"], "fn_name": "area"}}},
        "```python\ndef area(a, b):\n    return a * b / 2\n```",
        1.0,
    ),
]


@pytest.mark.parametrize("name", sorted({name for name, *_ in ROWS}))
async def test_a_row_of_theirs_gets_their_reward(name):
    rows = [row for row in ROWS if row[0] == name]
    app, wrong = load(ROOT / "gym_servers" / name / "app.py").app, []
    async with local_services({"gym": rows[0][1]}, gym=app) as peers:
        for _, _, row, text, reward in rows:
            message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
            messages = [{"role": "user", "type": "message", "content": "q"}]
            body = {
                "responses_create_params": {"input": messages, "tools": []},
                "response": {"output": [message]},
                **row,
            }
            session = peers["gym"].session()
            await session.post("/seed_session", body)
            answer = await session.post("/verify", body)
            if answer["reward"] != reward:
                wrong.append((text, answer["reward"], reward))
    assert not wrong
