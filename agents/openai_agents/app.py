"""openai_agents: the OpenAI Agents SDK drives the rollout, with the policy as its model and the gym server's tools."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from agents.tool_context import ToolContext
from openai import AsyncOpenAI
from openai.types.responses import ResponseFunctionToolCall
from pydantic import Field

from agents import (
    Agent,
    FunctionTool,
    MaxTurnsExceeded,
    ModelBehaviorError,
    ModelResponse,
    ModelSettings,
    OpenAIResponsesModel,
    RunConfig,
    RunHooks,
    Runner,
    ToolErrorFormatterArgs,
)
from ngym import AgentOptions, RolloutContext, ServiceContext, agent


class Options(AgentOptions):
    max_steps: int = Field(default=16, ge=1, description="Model calls in one rollout.")


@asynccontextmanager
async def one_client(context: ServiceContext) -> AsyncIterator[AsyncOpenAI]:
    """One client for all rollouts, because creating one takes 20 ms."""
    async with AsyncOpenAI(base_url="http://each-rollout-has-its-own", api_key="unused") as shared:
        yield shared


async def respond(request: dict[str, Any], rollout: RolloutContext) -> dict[str, Any]:
    options: Options = rollout.options
    functions = [tool for tool in request.get("tools") or () if tool.get("type") == "function"]
    client: AsyncOpenAI = rollout.state.with_options(base_url=rollout.model_base_url, api_key=rollout.model_api_key)
    actor = Agent(
        name="actor",
        instructions=request.get("instructions"),
        model=OpenAIResponsesModel(model=options.model, openai_client=client),
        model_settings=ModelSettings(extra_body=_parameters(request)),
        tools=[_tool(tool, rollout) for tool in (*functions, *_reserved(functions))],
    )
    calls = SampledCalls(options.max_steps)

    async def unknown_tool(error: ToolErrorFormatterArgs[Any]) -> str | None:
        """The answer to a call of a tool that is not offered; None leaves other errors to the SDK."""
        if error.kind != "tool_not_found":
            return None
        call = calls.sampled[error.call_id]
        item = {"call_id": call.call_id, "name": call.name, "arguments": call.arguments}
        return str((await rollout.call_tool(item))["output"])

    config = RunConfig(
        tracing_disabled=True, tool_not_found_behavior="return_error_to_model", tool_error_formatter=unknown_tool
    )
    try:
        result = await Runner.run(actor, request["input"], max_turns=options.max_steps, run_config=config, hooks=calls)
    except MaxTurnsExceeded:
        return rollout.answer("", "max_steps")
    except ModelBehaviorError as error:  # caused by the policy, so it is scored, such as a turn that was cut off
        return rollout.answer("", "length" if "response.incomplete" in str(error) else "answer")
    return rollout.answer(str(result.final_output))


class SampledCalls(RunHooks[Any]):  # type: ignore[misc]  # the SDK is not followed
    """The function calls that the model wrote, by call id: the SDK's error formatter gets no arguments.

    Ends the run at `max_turns` before the calls of the last turn: the SDK runs them first.
    """

    def __init__(self, max_turns: int) -> None:
        self.sampled: dict[str, ResponseFunctionToolCall] = {}
        self._left = max_turns

    async def on_llm_end(self, context: Any, agent: Any, response: ModelResponse) -> None:
        self._left -= 1
        calls = [item for item in response.output if isinstance(item, ResponseFunctionToolCall)]
        if calls and not self._left:
            raise MaxTurnsExceeded("the last turn calls tools")
        self.sampled.update((call.call_id, call) for call in calls)


def _parameters(request: dict[str, Any]) -> dict[str, Any]:
    """All that every model call sends besides the conversation, unchanged: the SDK's own settings do not know all of it.

    The `tools` are those of the row, and `tool_choice` holds in every turn, as with agents/simple.
    """
    return {name: value for name, value in request.items() if name not in ("input", "instructions")}


def _reserved(functions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`apply_patch`, if there are tools, but not this one: the SDK ends the run at a call of it, unless it is a function.
    `_parameters` has what the model sees; rollout.call_tool answers this call as that of any other unknown tool.
    """
    missing = functions and all(tool["name"] != "apply_patch" for tool in functions)
    return [{"name": "apply_patch"}] if missing else []


def _tool(tool: dict[str, Any], rollout: RolloutContext) -> FunctionTool:
    async def call(context: ToolContext[Any], arguments: str) -> str | list[dict[str, Any]]:
        item = {"call_id": context.tool_call_id, "name": tool["name"], "arguments": arguments}
        output = (await rollout.call_tool(item))["output"]
        return output if isinstance(output, str) else [_sdk_part(part) for part in output]

    return FunctionTool(
        name=tool["name"],
        description=tool.get("description") or "",
        params_json_schema=tool.get("parameters") or {"type": "object", "properties": {}},
        on_invoke_tool=call,
        strict_json_schema=False,
    )


def _sdk_part(part: dict[str, Any]) -> dict[str, Any]:
    """A text or an image of a tool's output as the SDK names it."""
    return {**part, "type": part["type"].removeprefix("input_")}


app = agent(respond=respond, options=Options, lifespan=one_client)
