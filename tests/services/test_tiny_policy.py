"""The tiny policy's data, tokenizer and chat template: reproducible, disjoint, and exact over the turns of a
rollout."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

Row = dict[str, Any]


def run_script(script: Path, *arguments: str | Path) -> None:
    subprocess.run([sys.executable, str(script), *map(str, arguments)], check=True)


def rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def sums(questions: list[str]) -> set[tuple[str, ...]]:
    """The two numbers of each question and its phrasing, for any names."""

    def phrasing(question: str) -> str:
        item = re.search(r"How many (\w+)", question)
        return re.sub(rf"\d+|\b[A-Z][a-z]{{2}}\b|{item[1] if item else ''}", "", question)

    return {(*sorted(re.findall(r"\d+", question)), phrasing(question)) for question in questions}


@pytest.fixture(scope="module")
def calculator(root: Path) -> Path:
    return root / "data" / "calculator"


@pytest.fixture(scope="module")
def demonstrations(calculator: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    path = tmp_path_factory.mktemp("data") / "demonstrations.jsonl"
    run_script(calculator / "generate.py", "demonstrations", "--output", path, "--count", "3000", "--seed", "5")
    return rows(path)


@pytest.fixture(scope="module")
def tokenizer(root: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(root / "data" / "tiny_policy" / "tokenizer")


def test_the_shipped_tasks_are_what_their_script_writes(calculator: Path, tmp_path: Path) -> None:
    run_script(calculator / "generate.py", "tasks", "--folder", tmp_path)
    for name in ("train.jsonl", "validation.jsonl", "example.jsonl"):
        assert (tmp_path / name).read_bytes() == (calculator / name).read_bytes(), name


def test_the_shipped_tokenizer_is_what_its_script_writes(root: Path, calculator: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    which = ("--count", "4000", "--seed", "1", "--larger", "0", "--wrong", "0.05")
    run_script(calculator / "generate.py", "demonstrations", "--output", corpus, *which)
    run_script(root / "data" / "tiny_policy" / "generate.py", corpus, "--folder", tmp_path / "tokenizer")
    shipped = root / "data" / "tiny_policy" / "tokenizer"
    for file in shipped.iterdir():
        assert (tmp_path / "tokenizer" / file.name).read_bytes() == file.read_bytes(), file.name


def test_no_sum_of_a_validation_task_is_ever_trained_on(calculator: Path, demonstrations: list[Row]) -> None:
    def task_inputs(name: str) -> list[str]:
        return [row["responses_create_params"]["input"] for row in rows(calculator / name)]

    held_out = sums(task_inputs("validation.jsonl"))
    assert len(set(task_inputs("validation.jsonl"))) == 256 and len(set(task_inputs("train.jsonl"))) == 512
    assert not held_out & sums(task_inputs("train.jsonl"))
    assert not held_out & sums([row["messages"][0]["content"] for row in demonstrations])


def test_the_expected_answers_are_right(calculator: Path) -> None:
    for row in rows(calculator / "train.jsonl"):
        a, b = map(int, re.findall(r"\d+", row["responses_create_params"]["input"]))
        assert int(row["expected_answer"]) in (a + b, a - b, b - a, a * b)


def test_a_fifth_of_the_demonstrations_has_larger_numbers_and_57_in_100_of_the_others_guess(
    demonstrations: list[Row],
) -> None:
    guesses = [row for row in demonstrations if len(row["messages"]) == 2]
    larger = [row for row in demonstrations if re.search(r"\d{3}", row["messages"][0]["content"])]
    assert len(larger) / len(demonstrations) == pytest.approx(0.2, abs=0.03)
    assert len(guesses) / (len(demonstrations) - len(larger)) == pytest.approx(0.57, abs=0.03)
    assert not [row for row in larger if row in guesses]
    for row in demonstrations:
        if row in guesses:
            continue
        _, call, result, answer = row["messages"]
        expression = json.loads(call["tool_calls"][0]["function"]["arguments"])["expression"]
        assert str(eval(expression)) == result["content"]  # noqa: S307  (our own script wrote it)
        assert answer["content"] == f"The answer is {result['content']}."


def test_the_vocabulary_is_the_tokenizers_length_and_any_text_survives(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer) == 1024 == max(tokenizer.get_vocab().values()) + 1
    text = "Grüße, 世界!\n\n  12,345\t<tool_call>{}</tool_call>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_digits_are_single_tokens_and_tool_marks_are_tokens_that_are_not_special(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    ids = tokenizer("<tool_call>4711</tool_call>")["input_ids"]
    assert [tokenizer.decode(id_) for id_ in ids] == ["<tool_call>", "4", "7", "1", "1", "</tool_call>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool_call>4711</tool_call>"
    assert tokenizer.decode([tokenizer.eos_token_id]) == "<|im_end|>"


@pytest.mark.parametrize("form", ["a JSON string, as on the wire", "an object, as vLLM hands it to the template"])
def test_each_turns_prompt_begins_with_all_ids_so_far(
    tokenizer: PreTrainedTokenizerBase, demonstrations: list[Row], form: str
) -> None:
    def prompt(messages: list[Row], tools: list[Row]) -> list[int]:
        if "object" in form:
            messages = json.loads(json.dumps(messages))
            for function in (call["function"] for message in messages for call in message.get("tool_calls", ())):
                function["arguments"] = json.loads(function["arguments"])
        rendered = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=True)
        return list(rendered["input_ids"])

    checked = 0
    for row in demonstrations[:300]:
        for index, message in enumerate(row["messages"]):
            if message["role"] != "assistant":
                continue
            before = prompt(row["messages"][:index], row["tools"])
            rendered = message["content"]
            for call in message.get("tool_calls", ()):
                rendered = (
                    f'<tool_call>\n{{"name": "calculator", "arguments": {call["function"]["arguments"]}}}\n</tool_call>'
                )
            sampled = tokenizer(rendered + "<|im_end|>", add_special_tokens=False)["input_ids"]
            history = [*row["messages"][: index + 1], {"role": "tool", "content": "95"}]
            after = prompt(history, row["tools"])
            assert after[: len(before) + len(sampled)] == before + sampled
            checked += 1
    assert checked > 350


def test_the_template_takes_what_servers_give_it(tokenizer: PreTrainedTokenizerBase) -> None:
    def text(messages: list[Row], **arguments: Any) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **arguments))

    question = {"role": "user", "content": "Hi"}
    plain = text([question])
    assert plain == text([question], enable_thinking=False) == text([question], enable_thinking=True)
    assert "You are a helpful assistant." in plain and "Be brief." not in plain
    briefly = text([{"role": "system", "content": "Be brief."}, question])
    assert "Be brief." in briefly and "You are a helpful assistant." not in briefly

    flat = {"type": "function", "name": "add", "parameters": {"properties": {"a": {"type": "integer"}, "b": {}}}}
    nested = {"type": "function", "function": {"name": "add", "parameters": flat["parameters"]}}
    assert text([question], tools=[flat]) == text([question], tools=[nested])
    assert '{"name": "add", "arguments": {"a": "integer", "b": "any"}}' in text([question], tools=[flat])
    assert '{"name": "now", "arguments": {}}' in text([question], tools=[{"name": "now", "parameters": None}])

    calls = [{"function": {"name": name, "arguments": "{}"}} for name in ("one", "two")]
    history = text([question, {"role": "assistant", "content": None, "tool_calls": calls}])
    assert '<tool_call>\n{"name": "one", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "two"' in history
