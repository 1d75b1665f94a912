"""ng_export: rollouts in, files for trainers out; what is left out is counted."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
import zstandard
from click.testing import CliRunner, Result
from local_services import local_services
from pydantic import BaseModel
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from waiting import PATIENCE_S

from ngym import VerifyRequest, gym_server
from ngym.cli.rollouts.export import main
from ngym.errors import UsageError
from ngym.export.exporter import export
from ngym.export.options import FORMATS, Options
from ngym.export.rollout_selection import ExportCounts, Reason
from ngym.notebook.exporting import export_rollouts
from ngym.services.base.app import load

Row = dict[str, Any]
CHAT = ("demonstrations", "preferences", "kto", "sharegpt")
ADD = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def reply(text: str) -> Row:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "role": "assistant", "status": "completed", "content": content}


def reasoning(text: str) -> Row:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def call(call_id: str, arguments: str) -> Row:
    return {"type": "function_call", "call_id": call_id, "name": "add", "arguments": arguments}


def result(call_id: str, output: Any) -> Row:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def rollout(reward: float | None, *items: Row | str, task: int = 0, stop: str = "answer", **params: Any) -> Row:
    """An output row; a string is a message of the policy."""
    output = [reply(item) if isinstance(item, str) else item for item in items]
    cut = stop in ("length", "context")
    status = "unscored" if reward is None else "ok" if stop == "answer" else "truncated"
    return {
        "responses_create_params": {"input": f"Question {task}?", **params},
        "response": {"status": "incomplete" if cut else "completed", "output": output},
        "reward": reward,
        "_ng_task_index": task,
        "_ng_rollout_index": 0,
        "ng": {"task_id": f"{task:016x}", "status": status, "stop_reason": stop},
    }


def write(path: Path, *rows: Row | str) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return path


def export_rows(folder: Path, format: str, *rows: Row | str, **options: Any) -> tuple[list[Row], ExportCounts]:
    """The lines for these rollouts, and the counts; every rollout that was read is counted once."""
    source, output = write(folder / "rollouts.jsonl", *rows), folder / "exported.jsonl"
    output.unlink(missing_ok=True)
    tally = export(Options(format=format, inputs=(source,), output=output, **options), lambda line: None)
    assert tally.read == tally.kept + tally.dropped.total()
    return lines(output) if output.exists() else [], tally


def lines(path: Path) -> list[Row]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def dropped_counts(tally: ExportCounts) -> dict[str, int]:
    return dict(tally.as_json()["dropped"])


def command(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def tokenizer(root: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(root / "data" / "tiny_policy" / "tokenizer")


class Sum(BaseModel):
    a: int
    b: int


def add(body: Sum) -> int:
    """Add two numbers."""
    return body.a + body.b


def verify(task: VerifyRequest) -> float:
    return float("5" in task.text)


@pytest.mark.process
async def test_a_rollout_of_real_services_becomes_the_conversation_that_the_model_had(root: Path, tmp_path: Path):
    replies = [
        {"turn": 1, "reasoning": "A sum.", "tool_calls": [{"name": "add", "arguments": {"a": 2, "b": 3}}] * 2},
        {"turn": 2, "text": "It is {tool_output}."},
    ]
    options = {"agent": {"gym": "gym", "model": "policy"}, "policy": {"replies": replies}}
    apps = {
        "agent": load(root / "agents" / "simple" / "app.py").app,
        "policy": load(root / "models" / "scripted" / "app.py").app,
        "gym": gym_server(verify=verify, tools=[add]),
    }
    params = {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "2 + 3?"}]}],
        "instructions": "Sum.",
    }
    async with local_services(options, **apps) as peers:
        row = await peers["agent"].post("/run", {"responses_create_params": params, "_ng_task_index": 0})
    (demonstration,), _ = export_rows(tmp_path, "demonstrations", row)
    system, user, question, first, second, answer = demonstration["messages"]
    assert (system, user) == ({"role": "system", "content": "Sum."}, {"role": "user", "content": "2 + 3?"})
    assert question["reasoning_content"] == "A sum." and question["content"] == ""
    assert [call["function"]["arguments"] for call in question["tool_calls"]] == [{"a": 2, "b": 3}] * 2
    assert [first["tool_call_id"], second["tool_call_id"]] == [call["id"] for call in question["tool_calls"]]
    assert (first["role"], first["content"], second["content"]) == ("tool", "5", "5")
    assert answer == {"role": "assistant", "content": "It is 5."}
    (tool,) = demonstration["tools"]  # the row declared none: they are the gym server's
    assert tool["type"] == "function" and tool["function"]["description"] == "Add two numbers."
    assert set(tool["function"]["parameters"]["properties"]) == {"a", "b"}


def with_tools(reward: float, answer: str, task: int = 0) -> Row:
    steps = (reasoning("Let me see."), call(f"x{random.random()}", '{"a": 1}'))
    return rollout(reward, *steps, result(steps[1]["call_id"], "2"), answer, task=task, tools=[ADD])


def test_each_format_has_what_trl_and_datasets_look_for(tmp_path: Path, tokenizer: PreTrainedTokenizerBase):
    """TRL 1.16: is_conversational, is_conversational_from_value, and the keys of apply_chat_template."""
    rounded = 0.9999999999999999  # as 1 of parts that were added up
    rows = [with_tools(reward, f"{reward}", task) for task in range(3) for reward in (rounded, 0)]

    def text(messages: list[Row], prompt: bool = False) -> str:
        return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt))

    keys = {
        "demonstrations": {"messages", "tools"},
        "preferences": {"prompt", "chosen", "rejected", "tools", "margin"},
        "kto": {"prompt", "completion", "label", "tools"},
        "sharegpt": {"conversations", "tools"},
    }
    for format in CHAT:
        written, _ = export_rows(tmp_path, format, *rows)
        assert len(written) == (6 if format == "kto" else 3)
        for row in written:
            assert row.keys() == keys[format]
            tools = row["tools"]
            for key in keys[format] & {"messages", "prompt", "chosen", "rejected", "completion"}:
                assert all(isinstance(message, dict) and "role" in message for message in row[key])
            if format == "sharegpt":
                assert all(turn.keys() == {"from", "value"} for turn in row["conversations"])
                continue
            assert tools[0]["function"]["name"] == "add"
            if format == "demonstrations":
                assert row["messages"][-1]["role"] == "assistant" and text(row["messages"])
                continue
            assert row["prompt"][-1]["role"] == "user"
            sides = [text(row["prompt"] + row[key]) for key in keys[format] & {"chosen", "rejected", "completion"}]
            assert all(side.startswith(text(row["prompt"], prompt=True)) for side in sides)
            assert len(set(sides)) == len(sides)
            assert isinstance(row.get("label", True), bool) and row.get("margin", 1.0) == 1.0


def test_the_trainer_reads_demonstrations_and_pairs(tmp_path: Path, tokenizer: PreTrainedTokenizerBase):
    from ngym.trainer.data import chat_dataset as conversations

    rows = [with_tools(reward, f"It is {reward}.", task) for task in range(3) for reward in (1, 0)]
    export_rows(tmp_path, "demonstrations", *rows)
    samples = conversations.read_demonstrations(tmp_path / "exported.jsonl", tokenizer)
    (segment,) = samples[0].segments
    turns = [tokenizer.decode(segment.token_ids[start:end]) for start, end in segment.spans]
    assert turns == [
        '<think>\nLet me see.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
        "It is 1.<|im_end|>",
    ]
    export_rows(tmp_path, "preferences", *rows)
    assert len(conversations.read_pairs(tmp_path / "exported.jsonl", tokenizer)) == 3


@pytest.mark.parametrize("format", FORMATS)
def test_failed_and_unscored_rollouts_are_in_no_format(format: str, tmp_path: Path):
    failure = {"responses_create_params": {"input": "?"}, "failure": {"class": "timeout"}, "attempt": 0, "ng": {}}
    broken = rollout(1, "broken") | {"response": {"status": "failed", "output": []}}
    good = rollout(1, "good") | {"failure": "a field of the task"}
    rows = [rollout(None, "null"), failure, broken, good, rollout(0, "bad")]
    written, tally = export_rows(tmp_path, format, *rows)
    assert (tally.dropped[Reason.UNSCORED], tally.dropped[Reason.FAILED]) == (1, 2)
    assert written and not any(word in json.dumps(written) for word in ("null", "broken"))


@pytest.mark.parametrize("stop", ["length", "context"])
def test_what_was_cut_off_in_mid_turn_never_passes_for_a_turn(stop: str, tmp_path: Path):
    rows = [rollout(1, "good"), rollout(0, "bad"), rollout(1, "it is th", stop=stop), rollout(0, "it is so", stop=stop)]
    for format in CHAT:
        written, tally = export_rows(tmp_path, format, *rows, keep_truncated=True)
        assert tally.dropped[Reason.CUT] == 2 and "it is" not in json.dumps(written)
    written, _ = export_rows(tmp_path, "rollouts", *rows)
    assert written == rows


@pytest.mark.parametrize("turns", [["length"], ["tool_calls", "length"], ["length", "stop"], ["stop", "context"]])
def test_a_turn_that_was_cut_off_never_passes_for_one_though_the_agent_continued(turns: list[str], tmp_path: Path):
    complete, cut = (rollout(1, call("a", "{}"), result("a", "3"), "good"), rollout(1, call("a", "{"), "bad"))
    complete["ng"]["finish_reasons"], cut["ng"]["finish_reasons"] = ["tool_calls", "stop"], turns
    for format in CHAT:
        written, tally = export_rows(tmp_path, format, complete, cut, keep_truncated=True)
        assert tally.dropped[Reason.CUT] == 1 and "bad" not in json.dumps(written)
        assert ("good" in json.dumps(written)) == (format != "preferences")


def test_what_the_step_limit_stopped_is_a_bad_example_and_a_good_one_only_if_asked(tmp_path: Path):
    rows = [rollout(1, call("a", "{}"), stop="max_steps"), rollout(0.5, "half")]
    for format in ("demonstrations", "sharegpt", "kto"):
        _, tally = export_rows(tmp_path, format, *rows)
        assert tally.dropped[Reason.TRUNCATED] == 1
        written, tally = export_rows(tmp_path, format, *rows, keep_truncated=True)
        assert tally.dropped[Reason.TRUNCATED] == 0 and "add" in json.dumps(written)
    assert export_rows(tmp_path, "preferences", *rows)[0] == []
    assert len(export_rows(tmp_path, "preferences", *rows, keep_truncated=True)[0]) == 1
    rows = [rollout(0, call("a", "{}"), stop="max_steps"), rollout(0.5, "half")]
    (pair,), _ = export_rows(tmp_path, "preferences", *rows)
    assert pair["rejected"][0]["tool_calls"]
    assert [row["label"] for row in export_rows(tmp_path, "kto", *rows)[0]] == [False, False]


def test_the_best_of_each_task_are_kept_and_equals_are_drawn_by_the_seed(tmp_path: Path):
    rows = [
        rollout(reward, f"{n}: {reward}", task=task) for task in (0, 1) for n, reward in enumerate((0.2, 1, 1, 0.9, 1))
    ]
    drawn = set()
    for seed in range(20):
        written, tally = export_rows(tmp_path, "demonstrations", *rows, best=2, min_reward=0.5, seed=seed)
        answers = [row["messages"][-1]["content"] for row in written]
        assert len(answers) == 4 and all(answer.endswith(": 1") for answer in answers)
        assert dropped_counts(tally) == {"low": 2, "not_best": 4}
        assert written == export_rows(tmp_path, "demonstrations", *rows, best=2, min_reward=0.5, seed=seed)[0]
        drawn.add(tuple(answers))
    assert len(drawn) > 3


@pytest.mark.parametrize(
    ("strategy", "options", "expected"),
    [
        ("best-worst", {}, {(1.0, 0.0)}),
        ("best-worst", {"max_pairs": 9}, {(1.0, 0.0), (0.7, 0.2)}),
        ("best-worst", {"max_pairs": 9, "margin": 0.6}, {(1.0, 0.0)}),
        ("best-rest", {}, {(1.0, 0.0), (1.0, 0.2), (1.0, 0.7)}),
        ("best-rest", {"max_pairs": 2}, {(1.0, 0.0), (1.0, 0.2)}),
        ("adjacent", {}, {(1.0, 0.7), (0.7, 0.2), (0.2, 0.0)}),
        ("adjacent", {"margin": 0.5}, {(1.0, 0.2)}),
        ("all", {"margin": 0.5}, {(1.0, 0.0), (1.0, 0.2), (0.7, 0.0), (0.7, 0.2)}),
        ("all", {"max_pairs": 1}, {(1.0, 0.0)}),
        ("all", {"min_reward": 1.0}, {(1.0, 0.0), (1.0, 0.2), (1.0, 0.7)}),
    ],
)
def test_pairs_of_a_group(strategy: str, options: dict[str, Any], expected: set[tuple[float, float]], tmp_path: Path):
    rows = [rollout(reward, f"{reward}") for reward in (0.2, 1.0, 0.0, 0.7)] + [rollout(1.0, "alone", task=1)]
    written, tally = export_rows(tmp_path, "preferences", *rows, pairs=strategy, **options)
    sides = [[float(row[side][0]["content"]) for side in ("chosen", "rejected")] for row in written]
    assert len(written) == len(expected) and {tuple(pair) for pair in sides} == expected
    assert [row["margin"] for row in written] == pytest.approx([better - worse for better, worse in sides])
    assert tally.dropped[Reason.ALONE] == 1


def test_equal_rewards_equal_words_and_other_prompts_are_not_a_pair(tmp_path: Path):
    equal = [rollout(0.5, "a"), rollout(0.5, "b")]
    # the same words, though the server named the calls otherwise and the tool answered otherwise
    same = [
        rollout(
            reward,
            call(f"id{reward}", arguments),
            result(f"id{reward}", f"{reward}"),
            "Done.\n" * int(reward + 1),
            task=1,
        )
        for reward, arguments in ((0.9, '{"a":1}'), (0.1, '{ "a": 1 }'))
    ]
    other = [rollout(reward, f"{reward}", task=2, instructions=f"{reward}") for reward in (0, 1)]
    written, tally = export_rows(tmp_path, "preferences", *equal, *same, *other, pairs="all")
    assert written == [] and dropped_counts(tally) == {"alone": 2, "no_partner": 4}


def test_dedupe_exports_the_same_conversation_once(tmp_path: Path):
    twins = [rollout(1, call(f"id{n}", '{"a": 1}'), result(f"id{n}", "2"), "2") for n in range(3)]
    others = [rollout(1, "2"), rollout(1, "2", task=1)]
    for format in ("demonstrations", "kto", "sharegpt", "rollouts"):
        assert len(export_rows(tmp_path, format, *twins, *others)[0]) == 5
        written, tally = export_rows(tmp_path, format, *twins, *others, dedupe=True)
        assert len(written) == 3 and dropped_counts(tally) == {"duplicate": 2}
    pairs, _ = export_rows(tmp_path, "preferences", *twins, rollout(0, "3"), pairs="all", dedupe=True)
    assert len(pairs) == 1


def test_arguments_become_the_object_that_they_spell_and_nothing_is_lost(tmp_path: Path):
    deep = '{"a": ' + "[" * 240 + "]" * 240 + "}"
    texts = [
        '{"a": 1}',
        "",
        '{"a": ',
        "[1]",
        '{"a": 12345678901234567890123}',
        '{"a": "12345678901234567890123"}',
        deep,
    ]
    calls = [call(f"id{n}", text) for n, text in enumerate(texts)]
    (row,), _ = export_rows(tmp_path, "demonstrations", rollout(1, *calls))
    arguments = [call["function"]["arguments"] for call in row["messages"][1]["tool_calls"]]
    assert arguments == [{"a": 1}, {}, *texts[2:5], {"a": "12345678901234567890123"}, deep]


def test_reasoning_is_dropped_on_demand_also_where_it_is_in_the_text(tmp_path: Path):
    rows = [rollout(1, reasoning("secret"), "<think>\nsecret</think>Four")]
    ((with_reasoning,), _), ((bare,), _) = (
        export_rows(tmp_path, "demonstrations", *rows, keep_reasoning=keep) for keep in (True, False)
    )
    assert with_reasoning["messages"][1] == {
        "role": "assistant",
        "content": "<think>\nsecret</think>Four",
        "reasoning_content": "secret",
    }
    assert bare["messages"][1] == {"role": "assistant", "content": "Four"}
    assert bare.keys() == {"messages"}  # a task without tools says nothing about tools


@pytest.mark.parametrize("format", ["demonstrations", "kto"])
def test_what_the_environment_says_before_the_policy_is_in_the_prompt(format: str, tmp_path: Path):
    observation = {"type": "message", "role": "user", "content": "You have 12."}
    first = rollout(1, observation, "hit", task=0, input=[])
    second = rollout(1, observation, "hit", task=1, input=[], instructions="Play.")
    found, _ = export_rows(tmp_path, format, first, second)
    prompts = [row["prompt"] if format == "kto" else row["messages"][:-1] for row in found]
    assert [[message["content"] for message in prompt] for prompt in prompts] == [
        ["You have 12."],
        ["Play.", "You have 12."],
    ]


def test_what_follows_the_policys_last_turn_is_not_exported(tmp_path: Path):
    user = {"type": "message", "role": "user", "content": "Bye."}
    (row,), _ = export_rows(tmp_path, "demonstrations", rollout(1, "A", user, "B", user))
    assert [message["content"] for message in row["messages"]] == ["Question 0?", "A", "Bye.", "B"]


def test_sharegpt_has_tools_and_thoughts_as_llama_factory_wants_them(tmp_path: Path):
    calls = [call("i", '{"a": 1}'), call("j", '{"a": 2}')]
    steps = [call("h", '{"a": 0}'), result("h", "0"), *calls, result("j", "2"), result("i", "1")]
    row = rollout(1, reasoning("Hm."), *steps, reasoning("So."), "Three.", tools=[ADD], instructions="Sum.")
    (written,), _ = export_rows(tmp_path, "sharegpt", row)
    assert [(turn["from"], turn["value"]) for turn in written["conversations"]] == [
        ("system", "Sum."),
        ("human", "Question 0?"),
        ("function_call", '<think>\nHm.\n</think>\n\n{"name":"add","arguments":{"a":0}}'),
        ("observation", "0"),
        ("function_call", '[{"name":"add","arguments":{"a":1}},{"name":"add","arguments":{"a":2}}]'),
        ("observation", '["1","2"]'),
        ("gpt", "<think>\nSo.\n</think>\n\nThree."),
    ]
    assert json.loads(written["tools"])[0]["function"]["name"] == "add"


def test_sharegpt_has_no_rows_that_llama_factory_skips(tmp_path: Path):
    user, system, assistant = ({"role": role, "content": "x"} for role in ("user", "system", "assistant"))
    rows = [
        rollout(1, "A", input=[user, user]),
        rollout(1, "A", input=[user, system, user]),
        rollout(1, "A", input=[assistant, user]),
        rollout(1, "A", "B"),
        rollout(1, call("a", "{}"), result("a", "0"), user, "A"),
    ]
    written, tally = export_rows(tmp_path, "sharegpt", *rows, rollout(1, "A", input=[system, user]))
    assert len(written) == 1 and [place.partition(": ")[2] for place in tally.not_representable] == [
        "human after human, where ShareGPT has gpt or function_call",
        "system after human, where ShareGPT has gpt or function_call",
        "gpt at the beginning, where ShareGPT has human or observation",
        "gpt after gpt, where ShareGPT has human or observation",
        "human after observation, where ShareGPT has gpt or function_call",
    ]
    assert len(export_rows(tmp_path, "demonstrations", *rows)[0]) == 5


def test_what_a_format_cannot_say_is_left_out_and_the_place_is_named(tmp_path: Path):
    search = {"type": "web_search_call", "id": "ws", "status": "completed"}
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,"}]}
    rows = [rollout(1, search, "A"), rollout(1), rollout(1, "B", input=[]), rollout(1, "good")]
    for format in CHAT[:3]:
        _, tally = export_rows(tmp_path, format, *rows, rollout(0, "bad"))
        assert tally.dropped[Reason.NOT_REPRESENTABLE] == 3
        places = [place.removeprefix(f"{tmp_path / 'rollouts.jsonl'}:") for place in tally.not_representable]
        assert [place.split(" (known")[0] for place in places] == [
            "1: field 'response.output[0].type': 'web_search_call' is not supported",
            "2: the policy said nothing",
            "3: there is no prompt",
        ]
    only_chat = [rollout(1, "Look.", call("a", "{}")), rollout(1, call("a", "{")), rollout(1, "A", input=[image])]
    assert len(export_rows(tmp_path, "demonstrations", *only_chat)[0]) == 3
    assert export_rows(tmp_path, "sharegpt", *only_chat)[1].dropped[Reason.NOT_REPRESENTABLE] == 3
    alone = rollout(1, "A", input=[], instructions="Speak.")
    assert len(export_rows(tmp_path, "demonstrations", alone)[0]) == 1
    assert "ends with a system message" in export_rows(tmp_path, "kto", alone)[1].not_representable[0]


def test_images_that_a_tool_returned_are_exported_as_chat_messages_only(tmp_path: Path):
    url = "data:image/png;base64,AAAA"
    shown = [{"type": "input_text", "text": "The screen:"}, {"type": "input_image", "image_url": url}]
    row = rollout(1, call("a", "{}"), result("a", shown), "Red.")
    [exported], _ = export_rows(tmp_path, "demonstrations", row)
    assert exported["messages"][2] == {
        "role": "tool",
        "tool_call_id": "a",
        "content": [{"type": "text", "text": "The screen:"}, {"type": "image_url", "image_url": {"url": url}}],
    }
    assert "more than text" in export_rows(tmp_path, "sharegpt", row)[1].not_representable[0]


def test_rows_of_nemo_gyms_collector_need_no_ng(tmp_path: Path):
    rows = [rollout(1, "A"), rollout(0, "B"), rollout(1, "C", stop="length"), rollout(1, "D", input="Other?")]
    for row in rows:
        del row["ng"]
    written, tally = export_rows(tmp_path, "preferences", *rows)
    assert len(written) == 1 and dropped_counts(tally) == {"cut": 1, "alone": 1}


def test_the_first_rows_show_all_shapes_that_come_later(tmp_path: Path):
    """`datasets` takes the columns' types from the first 10 MB, and fails on what first appears behind them."""
    plain = [rollout(1, f"{n}", task=n) for n in range(50)]
    late = [rollout(1, reasoning("Hm."), "A", task=98), rollout(1, "B", task=99, tools=[ADD])]
    written, _ = export_rows(tmp_path, "demonstrations", *plain, *late)
    assert len(written) == 52
    assert "reasoning_content" in written[1]["messages"][1] and "tools" in written[2]
    assert [row["messages"][1]["content"] for row in written[3:]] == [f"{n}" for n in range(1, 50)]


def test_a_limit_draws_rows_from_all_over_the_file(tmp_path: Path):
    rows = [rollout(1, f"{n}", task=n) for n in range(100)]
    written, tally = export_rows(tmp_path, "demonstrations", *rows, limit=10)
    places = [int(row["messages"][1]["content"]) for row in written]
    assert places == sorted(places) and max(places) > 50 and dropped_counts(tally) == {"limit": 90}


def test_rollouts_are_copied_byte_for_byte(tmp_path: Path):
    first, second = json.dumps(rollout(1, "é")), json.dumps(rollout(0.4, "B"), indent=None, separators=(", ", " : "))
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\xef\xbb\xbf" + f"{first}\r\n\n{second}".encode())  # a BOM, CRLF, no newline at the end
    assert command("--format", "rollouts", "--input", source, "--output", tmp_path / "out.jsonl").exit_code == 0
    assert (tmp_path / "out.jsonl").read_text() == f"{first}\n{second}\n"
    assert command("--format", "demonstrations", source, "--output", tmp_path / "sft.jsonl").exit_code == 0


@pytest.mark.parametrize("format", ["rollouts", "preferences"])
def test_compressed_files_and_patterns_are_read_like_plain_files(format: str, tmp_path: Path):
    rows = [[rollout(reward, reply(f"{n} {reward}"), task=n) for reward in (1.0, 0.0)] for n in range(3)]
    plain = [write(tmp_path / f"{n}.jsonl", *two) for n, two in enumerate(rows)]
    packed = [tmp_path / "packed_0.jsonl.gz", tmp_path / "packed_1.jsonl.zst", tmp_path / "packed_2.jsonl"]
    for path, to, pack in zip(plain, packed, (gzip.compress, zstandard.compress, bytes), strict=True):
        to.write_bytes(pack(path.read_bytes()))
    repeated = [word for path in plain for word in ("--input", path)]
    inputs = [["--input", *plain], ["--input", tmp_path / "packed_*", packed[0]], repeated]
    for n, sources in enumerate(inputs):
        result = command("--format", format, *sources, "--output", tmp_path / f"out{n}")
        assert result.exit_code == 0, result.output
    first, *others = [(tmp_path / f"out{n}").read_bytes() for n in range(len(inputs))]
    assert first and others == [first, first]


def test_bad_lines_of_all_files_are_named_and_nothing_is_written(tmp_path: Path):
    good, output = rollout(1, "A"), tmp_path / "out.jsonl"
    bad = ["{torn", {"messages": []}, {**good, "reward": "high"}, {**good, "_ng_task_index": None}, {**good, "ng": 3}]
    one = write(tmp_path / "one.jsonl", good, *bad[:3])
    two = write(tmp_path / "two.jsonl", {k: v for k, v in good.items() if k != "reward"}, *bad[3:])
    result = command("--format", "kto", "--input", one, two, "--output", output)
    assert result.exit_code == 2 and not output.exists()
    assert [line.split(str(tmp_path) + "/")[1].split(";")[0] for line in result.stderr.splitlines()] == [
        "one.jsonl:2: not JSON: unexpected character, expected a string key (column 2)",
        "one.jsonl:3: no rollout: 'responses_create_params' is missing",
        "one.jsonl:4: 'reward' must be null or a number within ±3.4e+38, not 'high'",
        "two.jsonl:1: no rollout: 'reward' is missing (null would mean: could not be scored)",
        "two.jsonl:2: '_ng_task_index' must be a whole number, not None",
        "two.jsonl:3: no rollout: 'ng' must be an object, not int",
    ]


def test_a_torn_last_line_is_counted_and_no_error(tmp_path: Path):
    source = write(tmp_path / "in.jsonl", rollout(1, "A"))
    with source.open("a") as file:
        file.write(json.dumps(rollout(1, "B"))[:60])
    result = command("--format", "demonstrations", "--input", source, "--output", tmp_path / "out.jsonl")
    assert result.exit_code == 0 and "torn last line" in result.stdout
    assert len(lines(tmp_path / "out.jsonl")) == 1


def test_the_command_says_what_it_kept_and_why_not_the_rest(tmp_path: Path):
    source = write(
        tmp_path / "in.jsonl", rollout(1, "A"), rollout(0.2, "B"), rollout(None, "C"), rollout(0, "D", task=1)
    )
    output = tmp_path / "out.jsonl"
    arguments = ("--format", "preferences", "--input", source, "--output", output)
    result = command(*arguments)
    table = {tuple(cell.strip() for cell in line.split("│")[1:3]) for line in result.stdout.splitlines() if "│" in line}
    assert table == {("rollouts", "4"), ("left out", "1"), ("kept", "2")}
    assert "in 1 pairs; margin 0.8" in result.stdout and result.stdout.endswith(f"{output}: 1 rows\n")
    refusal = command(*arguments)
    assert refusal.exit_code == 2 and "add --overwrite" in refusal.stderr
    report = orjson.loads(command(*arguments, "--overwrite", "--json").stdout)
    assert report.pop("seconds") > 0
    assert report == {
        "format": "preferences",
        "output": str(output),
        "rows": 1,
        "read": 4,
        "kept": 2,
        "tasks": 2,
        "dropped": {"unscored": 1, "alone": 1},
        "not_representable": [],
        "margin": {"mean": 0.8, "min": 0.8, "max": 0.8},
    }


def test_a_dry_run_shows_the_first_row_and_writes_nothing(tmp_path: Path):
    source = write(tmp_path / "in.jsonl", rollout(1, "A"))
    result = command("--format", "demonstrations", "--input", source, "--output", tmp_path / "out.jsonl", "--dry-run")
    assert result.exit_code == 0 and '"content": "A"' in result.stdout and "kept" in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_control_characters_of_the_first_row_do_not_reach_the_terminal(tmp_path: Path):
    source = write(tmp_path / "in.jsonl", rollout(1, "A\x1b]0;title\x07\x9d0;title\x9c"))
    result = command("--format", "demonstrations", "--input", source, "--output", tmp_path / "out.jsonl", "--dry-run")
    assert result.exit_code == 0 and r"A\u001b]0;title\u0007\x9d0;title\x9c" in result.stdout


def test_where_nothing_is_left_the_old_output_stays_and_the_exit_code_is_1(tmp_path: Path):
    source, output = write(tmp_path / "in.jsonl", rollout(0.5, "A")), write(tmp_path / "out.jsonl", "old")
    result = command("--format", "demonstrations", "--input", source, "--output", output, "--overwrite")
    assert result.exit_code == 1 and "no rollout is left" in result.stderr
    assert "reward under --min-reward, 1" in result.stdout and output.read_text() == "old\n"


@pytest.mark.process
def test_a_disk_without_room_leaves_the_old_output(tmp_path: Path):
    rows = [rollout(1, "long " * 4000, task=n) for n in range(100)]
    source, output = write(tmp_path / "in.jsonl", *rows), write(tmp_path / "out.jsonl", "old")
    arguments = ["--format", "demonstrations", "--input", source, "--output", output, "--overwrite"]
    program = f"import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6)); from ngym.cli.rollouts.export import main; main({[*map(str, arguments)]!r})"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert result.returncode == 1 and result.stderr == f"{output}: cannot be written: File too large\n"
    assert output.read_text() == "old\n" and not output.with_name("out.jsonl.tmp").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "preferences", "--best", "2"], "--best has no effect with --format preferences; --max-pairs"),
        (["--format", "kto", "--pairs", "all"], "--pairs is for --format preferences, not kto"),
        (["--format", "sharegpt", "--margin", "1"], "--margin is for --format preferences, not sharegpt"),
        (["--format", "rollouts", "--drop-reasoning"], "--drop-reasoning has no effect with --format rollouts"),
        (["--format", "rollouts", "--min-reward", "nan"], "--min-reward must be a number, not nan"),
        (["--format", "rollouts", "none*.jsonl"], "none*.jsonl: no file matches (--input)"),
        (["--format", "rollouts", "nowhere.jsonl"], "nowhere.jsonl: no such file (--input)"),
        (["--format", "rollouts", "--output", "{input}"], "is both the input and --output"),
        (["--format", "rollouts", "--output", "nowhere/out.jsonl"], "the folder nowhere does not exist; make it first"),
        (["--format", "rollouts", "--output", "-"], "-: output to standard output is not supported; name a file"),
        (
            ["--format", "rollouts", "--output", "out.jsonl.gz"],
            "out.jsonl.gz: output is not compressed; name it out.jsonl",
        ),
        (["--format", "dpo"], "'dpo' is not one of 'demonstrations', 'preferences', 'kto', 'sharegpt', 'rollouts'"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_read(arguments: list[str], message: str, tmp_path: Path):
    source = write(tmp_path / "in.jsonl", "not JSON")
    words = [argument.format(input=source) for argument in arguments]
    result = command("--input", source, "--output", tmp_path / "out.jsonl", *words)
    assert result.exit_code == 2 and message in result.stderr


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"format": "preference"}, "format: 'preference' is unknown (did you mean 'preferences'?)"),
        ({"format": None}, "format: None is unknown (known: demonstrations, kto, preferences, rollouts, sharegpt)"),
        (
            {"format": "preferences", "pairs": "best_rest"},
            "pairs: 'best_rest' is unknown (did you mean 'best-rest'?)",
        ),
        ({"format": "demonstrations", "best": -1}, "best must be a whole number of at least 1, not -1"),
        ({"format": "kto", "limit": 0}, "limit must be a whole number of at least 1, not 0"),
        ({"format": "preferences", "max_pairs": 1.5}, "max_pairs must be a whole number of at least 1, not 1.5"),
        ({"format": "preferences", "margin": -1}, "margin must be at least 0, not -1"),
        ({"format": "kto", "min_reward": "a"}, "min_reward must be a number, not 'a'"),
    ],
)
def test_wrong_values_of_the_python_call_are_refused(values: dict[str, Any], message: str, tmp_path: Path):
    source = write(tmp_path / "in.jsonl", rollout(1, "yes"))
    with pytest.raises(UsageError) as caught:
        export_rollouts(source, output=tmp_path / "out.jsonl", **values)
    assert str(caught.value) == message and not (tmp_path / "out.jsonl").exists()
