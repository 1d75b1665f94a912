"""openai_sdk: a tool loop on the plain `openai` client, which needs only a base_url from ngym."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from openai import AsyncOpenAI
from pydantic import Field

from ngym import AgentOptions, RolloutContext, ServiceContext, agent
from ngym.convert import chat_content, chat_request, check_create_params


class Options(AgentOptions):
    max_steps: int = Field(default=16, ge=1, description="Model calls in one rollout.")


@asynccontextmanager
async def one_client(context: ServiceContext) -> AsyncIterator[AsyncOpenAI]:
    """One client for all rollouts, because creating one takes 20 ms."""
    async with AsyncOpenAI(base_url="http://each-rollout-has-its-own", api_key="unused") as shared:
        yield shared


async def respond(request: dict[str, Any], rollout: RolloutContext) -> dict[str, Any]:
    options: Options = rollout.options
    chat = chat_request(check_create_params(request), tokens=True)
    messages = chat.pop("messages")
    client: AsyncOpenAI = rollout.state.with_options(base_url=rollout.model_base_url, api_key=rollout.model_api_key)
    for step in count(1):
        # extra_body takes every parameter of the row, also those that the client does not know, such as top_k.
        completion: Any = await client.chat.completions.create(model=options.model, messages=messages, extra_body=chat)
        message = completion.choices[0].message
        if completion.choices[0].finish_reason == "length":
            return rollout.answer(message.content or "", "length")
        if not message.tool_calls:
            return rollout.answer(message.content or "")
        if step == options.max_steps:
            break
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            function_call = {"call_id": call.id, "name": call.function.name, "arguments": call.function.arguments}
            result = await rollout.call_tool(function_call)
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": chat_content(result["output"], call.id)}
            )
    return rollout.answer(message.content or "", "max_steps")


app = agent(respond=respond, options=Options, lifespan=one_client)
