"""langgraph: a LangGraph graph drives the rollout, with the policy as its model and the gym server's tools."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

from langchain_core.messages import AnyMessage, ToolMessage
from langchain_core.outputs import ChatResult
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.prebuilt.tool_node import ToolCallRequest
from openai import DefaultAsyncHttpxClient, DefaultHttpxClient
from pydantic import Field

from ngym import AgentOptions, RolloutContext, ServiceContext, agent
from ngym.convert import chat_content, chat_request, check_create_params
from ngym.schema import StopReason


class Options(AgentOptions):
    max_steps: int = Field(default=16, ge=1, description="Model calls in one rollout.")


class ExactChatOpenAI(ChatOpenAI):
    """ChatOpenAI with the arguments of tool calls as the model wrote them.

    LangChain parses arguments and drops the text: it cannot represent arguments that are not an object, and sends others
    back in its own spelling. Here each call has one argument, which is that text; it is sent back unchanged.
    """

    def _get_request_payload(self, input_: Any, *, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        payload = super()._get_request_payload(input_, stop=stop, **kwargs)
        for function in _called_functions(payload["messages"]):
            function["arguments"] = json.loads(function["arguments"])["arguments"]
        return payload

    def _create_chat_result(self, response: Any, generation_info: dict[str, Any] | None = None) -> ChatResult:
        completion = response if isinstance(response, dict) else response.model_dump(warnings=False)
        _keep_arguments([choice["message"] for choice in completion["choices"]])
        return super()._create_chat_result(completion, generation_info)


def _keep_arguments(messages: list[dict[str, Any]]) -> None:
    """Make the text of each call's arguments its only argument."""
    for function in _called_functions(messages):
        function["arguments"] = json.dumps({"arguments": function["arguments"]})


def _called_functions(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [call["function"] for message in messages for call in message.get("tool_calls") or ()]


@asynccontextmanager
async def http_clients(context: ServiceContext) -> AsyncIterator[dict[str, Any]]:
    """The HTTP clients of all rollouts' models: creating them takes 0.1 to 0.3 s, in which no other request is served."""
    async with DefaultAsyncHttpxClient() as client:
        with DefaultHttpxClient() as blocking:  # ChatOpenAI creates one where it is given none
            yield {"http_async_client": client, "http_client": blocking}


async def respond(request: dict[str, Any], rollout: RolloutContext) -> dict[str, Any]:
    options: Options = rollout.options
    parameters = chat_request(check_create_params(request), tokens=True)
    messages = parameters.pop("messages")
    _keep_arguments(messages)
    served = {"base_url": rollout.model_base_url, "api_key": rollout.model_api_key}
    # extra_body takes every parameter of the row, also those that ChatOpenAI does not know, such as top_k.
    model = ExactChatOpenAI(model_name=options.model, extra_body=parameters, **served, **rollout.state)
    turns = 0

    async def act(state: MessagesState) -> dict[str, list[AnyMessage]]:
        nonlocal turns
        turns += 1
        return {"messages": [await model.ainvoke(state["messages"])]}

    async def call(request: ToolCallRequest, execute: Any) -> ToolMessage:
        """Run each call by `call_tool`, also one of a tool that is not offered, which ToolNode would answer itself."""
        tool_call = request.tool_call
        item = {"call_id": tool_call["id"], "name": tool_call["name"], "arguments": tool_call["args"]["arguments"]}
        result = await rollout.call_tool(item)
        content: Any = chat_content(result["output"], tool_call["name"])
        return ToolMessage(content, name=tool_call["name"], tool_call_id=tool_call["id"])

    def next_node(state: MessagesState) -> str:
        """The tools, unless the turn calls none, was cut off, or is the last one."""
        is_last = turns == options.max_steps or _is_cut_off(state["messages"][-1])
        return END if is_last else str(tools_condition(state["messages"]))

    graph = StateGraph(MessagesState)
    graph.add_node("act", act)
    graph.add_node("tools", ToolNode([], awrap_tool_call=call))
    graph.add_edge(START, "act")
    graph.add_conditional_edges("act", next_node, ["tools", END])
    graph.add_edge("tools", "act")
    begin = cast(MessagesState, {"messages": messages})  # LangGraph also takes messages as dicts
    final_state = await graph.compile().ainvoke(begin, {"recursion_limit": 2 * options.max_steps})
    last = final_state["messages"][-1]
    stopped: StopReason = "answer" if tools_condition(final_state) == END else "max_steps"
    return rollout.answer(str(last.text), "length" if _is_cut_off(last) else stopped)


def _is_cut_off(message: AnyMessage) -> bool:
    return message.response_metadata.get("finish_reason") == "length"


app = agent(respond=respond, options=Options, lifespan=http_clients)
