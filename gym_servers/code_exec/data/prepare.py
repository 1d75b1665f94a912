"""Public programming tasks, as rows of ours (`ng_prepare mbpp`)."""

import ast
from typing import Any

from ngym.prepare import ConvertedRow, PublicSet, Split, Unconvertible, part, saying
from ngym.schema import Json

PROMPT = "{text}\n\nYour function has to pass this test, and others:\n{test}\n\nGive the code in one ```python block."
MAX_INTEGER = 1 << 63
FOR_TESTS = range(11, 511)  # task ids, as the README of MBPP shares them out
FOR_VALIDATION = range(511, 601)


def mbpp(record: Json) -> ConvertedRow:
    """`{"text", "code", "task_id", "test_setup_code", "test_list": ["assert f(1) == 2", ...]}`."""
    if record["task_id"] in FOR_TESTS:
        raise Unconvertible("kept for tests by its authors")
    if record["test_setup_code"]:
        raise Unconvertible("its tests need code of their own")
    calls = [_call(test) for test in record["test_list"]]
    names = {name for name, _ in calls}
    if len(names) != 1:
        raise Unconvertible("its tests call more than one function")
    row = {
        "responses_create_params": {"input": PROMPT.format(text=record["text"], test=record["test_list"][0])},
        "function": names.pop(),
        "cases": [case for _, case in calls],
    }
    split: Split = "validation" if record["task_id"] in FOR_VALIDATION else "train"
    return ConvertedRow(row, saying(f"```python\n{record['code']}\n```"), split)


def _call(test: str) -> tuple[str, Json]:
    """`assert f(1, "a") == [2]` -> ("f", its arguments and what it must return)."""
    match ast.parse(test).body:
        case [ast.Assert(ast.Compare(ast.Call(ast.Name(name), args, []), [ast.Eq()], [expected]))]:
            return name, {"args": [_plain(arg) for arg in args], "expected": _plain(expected)}
    raise Unconvertible("a test is more than `f(...) == value`")


def _plain(node: ast.expr) -> Any:
    """A value as JSON has it: a tuple is a list."""
    try:
        return _as_json(ast.literal_eval(node))
    except ValueError:
        raise Unconvertible("a test is more than `f(...) == value`") from None


def _as_json(value: Any) -> Any:
    match value:
        case int() if abs(value) >= MAX_INTEGER:
            raise Unconvertible("a number of more than 64 bits")
        case bool() | int() | float() | str() | None:
            return value
        case list() | tuple():
            return [_as_json(item) for item in value]
        case dict() if all(isinstance(key, str) for key in value):
            return {key: _as_json(item) for key, item in value.items()}
    raise Unconvertible("a value of a test cannot be written as JSON")


SETS = (
    PublicSet(
        name="mbpp",
        title="MBPP",
        environment="code_exec",
        host="github",
        repo="google-research/google-research",
        revision="1fa17414f56c3703d5adb3818338b6e35e0fd550",
        licence="CC-BY-4.0",
        rows=974,
        parts=(part("mbpp/mbpp.jsonl", "ccf64ceae9c5403bf50a044cb6d505bfd2a2963ee58338ba268fd65beab92a9f"),),
        convert=mbpp,
    ),
)
