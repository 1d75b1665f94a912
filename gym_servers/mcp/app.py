"""mcp: any MCP server as an environment: its tools are ours; the answer and the calls are compared with the row's, or you judge."""

import importlib.util
import json
import logging
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, field_validator, model_validator

from ngym import ServiceContext, VerifyRequest, gym_server
from ngym.config.shipped_files import shipped_file
from ngym.errors import ConfigError
from ngym.grading.answers import number, same_number, short
from ngym.grading.text_match import exact
from ngym.rollout.tool_calls import calls_in
from ngym.services.gym.tools import inspected, offer

from .connection import Connections
from .offered import offered
from .options import Options


class Call(BaseModel):
    name: str
    arguments: dict[str, Any] = {}

    @field_validator("arguments", mode="before")
    @classmethod
    def _as_object(cls, value: Any) -> Any:
        return json.loads(value) if isinstance(value, str) else value


class Task(VerifyRequest):
    expected_answer: str | int | float | None = None
    expected_tool_calls: list[Call] | None = None

    @model_validator(mode="after")
    def _says_what_is_right(self) -> Self:
        if self.expected_answer is None and self.expected_tool_calls is None:
            raise ValueError("needs expected_answer or expected_tool_calls, or the stanza a `verify` of your own")
        return self


async def verify(task: Task) -> dict[str, Any]:
    """1 if the final answer is the expected one and the expected calls were made, as far as the row has either."""
    answered = None if task.expected_answer is None else _is(task.text, task.expected_answer)
    called = None if task.expected_tool_calls is None else _called(task.response, task.expected_tool_calls)
    return {"reward": float(answered is not False and called is not False), "answered": answered, "called": called}


def _is(text: str, expected: str | float) -> bool:
    try:
        wanted = Decimal(str(expected))
    except InvalidOperation:
        return exact(short(text) or "", [str(expected)])
    found = number(text)
    return found is not None and same_number(found, wanted)


def _called(response: dict[str, Any], expected: list[Call]) -> bool:
    """Of the tools that are expected, exactly the expected calls, in any order; other tools are free. []: no call at all."""
    names = {call.name for call in expected}
    counted = [call for call in calls_in(response) if call.name in names or not expected]
    made = Counter(_spelled(call.name, call.arguments) for call in counted)
    return made == Counter(_spelled(call.name, call.arguments) for call in expected)


def _spelled(name: str, arguments: dict[str, Any] | None) -> str:
    """Equal for equal JSON: 3 is 3.0, and 1 is not true."""
    return f"{name} {json.dumps(_plain(arguments), sort_keys=True)}"


def _plain(value: Any) -> Any:
    match value:
        case dict():
            return {key: _plain(each) for key, each in value.items()}
        case list():
            return [_plain(each) for each in value]
        case float() if value.is_integer():
            return int(value)
    return value


@asynccontextmanager
async def serving(context: ServiceContext) -> AsyncIterator[None]:
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it says each request
    options: Options = context.options
    if options.verify is not None:
        file = shipped_file(options.verify, context.root, "verify")
        app.state.verifier = inspected(_verify_in(file), VerifyRequest)
    async with Connections(options, context.root) as connections:
        for tool in offered(await connections.list_tools(), connections):
            offer(app, tool)
        yield


def _verify_in(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location("_ngym_mcp_verify", file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"verify: {file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if not hasattr(module, "verify"):
        raise ConfigError(f"verify: {file} has no function `verify(task: <a VerifyRequest>, [session: Session])`")
    return module.verify


app = gym_server(verify=verify, options=Options, lifespan=serving)
