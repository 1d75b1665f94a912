"""Public function calls, as rows of ours (`ng_prepare bfcl`)."""

from typing import Any

from ngym.prepare import ConvertedRow, File, Part, PublicSet, Unconvertible, calling
from ngym.schema import Json

FOLDER = "berkeley-function-call-leaderboard/bfcl_eval/data"
# Its names of types -> JSON Schema's; `any` allows all.
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": None}


def bfcl(record: Json) -> ConvertedRow:
    """`{"id": "multiple_7", "question": [[message, ...]], "function": [...], "ground_truth": [{name: {argument: [allowed, ...]}}, ...]}`.

    An allowed `""` means that the argument may be left out: its other value is then the tool's default.
    """
    if len(record["question"]) != 1:
        raise Unconvertible("more than one turn")
    tools = [_tool(function) for function in record["function"]]
    expected = [
        _expected(name, call_arguments, tools)
        for call in record["ground_truth"]
        for name, call_arguments in call.items()
    ]
    row = {
        "responses_create_params": {"input": record["question"][0], "tools": tools},
        "kind": record["id"].rpartition("_")[0],
        "expected_calls": [{"name": name, "arguments": arguments} for name, arguments in expected],
    }
    return ConvertedRow(row, calling(expected))


def _tool(function: Json) -> Json:
    parameters = {**_schema(function["parameters"]), "additionalProperties": False}
    description = function["description"]
    return {
        "type": "function",
        "name": _name(function["name"]),
        "description": description,
        "parameters": parameters,
        "strict": False,
    }


def _name(name: str) -> str:
    """The name without dots, which are not allowed in a tool's name."""
    return name.replace(".", "_")


def _schema(source: Any) -> Any:
    if isinstance(source, list):
        return [_schema(item) for item in source]
    if not isinstance(source, dict):
        return source
    fields = {name: _schema(value) for name, value in source.items()}
    kind = fields.get("type")
    if isinstance(kind, str) and kind in TYPES:
        fields["type"] = TYPES[kind]
        if TYPES[kind] is None:
            del fields["type"]
    return fields


def _expected(name: str, call_arguments: Json, tools: list[Json]) -> tuple[str, Json]:
    tool = next((tool for tool in tools if tool["name"] == _name(name)), None)
    if tool is None:
        raise Unconvertible("a call of a tool that is not offered")
    properties = tool["parameters"]["properties"]
    arguments: Json = {}
    for argument, allowed in call_arguments.items():
        if argument not in properties:
            raise Unconvertible("an argument that the tool does not have")
        values = [value for value in allowed if value != ""]
        if len({_plain(value) for value in values}) > 1:
            raise Unconvertible("an argument with several right values")
        if any(map(_has_object, values)):  # its members are lists of allowed values, too
            raise Unconvertible("an argument that is an object")
        if "" not in allowed:
            arguments[argument] = values[0]
        elif values and properties[argument].setdefault("default", values[0]) != values[0]:
            raise Unconvertible("an argument that may be left out, though its default is another")
    return tool["name"], arguments


def _has_object(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(map(_has_object, value)))


def _plain(value: Any) -> str:
    return " ".join(repr(value).casefold().split())


SETS = (
    PublicSet(
        name="bfcl",
        title="BFCL",
        environment="function_call",
        host="github",
        repo="ShishirPatil/gorilla",
        revision="6ea57973c7a6097fd7c5915698c54c17c5b1b6c8",
        licence="Apache-2.0",
        rows=1_000,
        note="a benchmark, four parts of it; calls with several right answers are left out",
        parts=tuple(
            Part(
                files=(
                    File(path=f"{FOLDER}/BFCL_v4_{part}.json", sha256=sha256),
                    File(path=f"{FOLDER}/possible_answer/BFCL_v4_{part}.json"),
                )
            )
            for part, sha256 in (
                ("simple_python", "82dd63ba502eb2520c6b5d1d9a5c4b590e03ff261565175561f6228a367d1991"),
                ("multiple", None),
                ("parallel", None),
                ("parallel_multiple", None),
            )
        ),
        convert=bfcl,
    ),
)
