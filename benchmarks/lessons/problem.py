"""The parts of a lesson: task rows, and a beginner's demonstrations."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any, NamedTuple

import orjson

from ngym.config.shipped_files import shipped
from ngym.schema import Json


class Problem(NamedTuple):
    """row: the task. same: what tasks that are the same for a learner have in common; train and held-out share none.
    demonstrate: a demonstration's messages; drawn again each time, because a beginner does not always do the same."""

    row: Json
    same: str
    demonstrate: Callable[[random.Random], list[Json]]


class Lesson(NamedTuple):
    """habit: what the demonstrations do wrong; problems: endless; demonstrations: how many the supervised start has.
    tools: of tasks whose rows declare none. words: what differs from grpo.yaml; steps: of reinforcement learning."""

    agent: str
    habit: str
    problems: Callable[[random.Random], Iterator[Problem]]
    demonstrations: int
    tools: Sequence[Json] = ()
    words: Sequence[str] = ()
    steps: int = 30


def generator(name: str) -> ModuleType:
    """The environment's own generator."""
    spec = spec_from_file_location(f"generate_{name}", shipped() / "data" / name / "generate.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def chat_tools(declared: list[Json]) -> list[Json]:
    """The Responses API's tools as Chat Completions has them."""
    return [{"type": "function", "function": {key: tool[key] for key in ("name", "parameters")}} for tool in declared]


def asks(row: Json) -> list[Json]:
    """The row's prompt as messages."""
    params = row["responses_create_params"]
    system = [{"role": "system", "content": params["instructions"]}] if "instructions" in params else []
    return [*system, user(params["input"])] if params["input"] else system


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def says(text: str) -> Json:
    return {"role": "assistant", "content": text}


def request(name: str, arguments: Json) -> Json:
    """An assistant's turn that is one tool call."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
    }


def call(name: str, arguments: Json, result: Any) -> list[Json]:
    """A tool call and its result. JSON has no spaces: so gym servers answer, and the policy reads it in rollouts."""
    output = result if isinstance(result, str) else orjson.dumps(result).decode()
    return [request(name, arguments), {"role": "tool", "tool_call_id": "call_0", "content": output}]
