"""Which spans do agents and gym servers tell? invoke_agent, execute_tool and verify, named as OpenTelemetry's GenAI conventions do."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ngym.schema import Json
from ngym.services.base.dispatch import Handler
from ngym.telemetry import tracing


def invoke_agent(handler: Handler) -> Handler:
    """An agent's handler of a whole rollout, within its span."""

    async def traced(request: Request) -> Response:
        context = request.app.state.context
        with tracing.span(f"invoke_agent {context.name}", "server") as span:
            span.set("gen_ai.operation.name", "invoke_agent")
            span.set("gen_ai.agent.name", context.name)
            span.set("gen_ai.provider.name", "ngym")
            return await handler(request)

    return traced


def execute_tool(name: str) -> tracing.Span:
    """The span of a tool's call."""
    span = tracing.span(f"execute_tool {name}", "server")
    span.set("gen_ai.operation.name", "execute_tool")
    span.set("gen_ai.tool.name", name)
    span.set("gen_ai.tool.type", "function")
    return span


def verify() -> tracing.Span:
    """The span of a rollout's scoring."""
    span = tracing.span("verify", "server")
    span.set("gen_ai.evaluation.name", "reward")
    return span


def scored(span: tracing.Span, outcome: Json) -> None:
    """What the rewards are; a null reward is none."""
    span.set("gen_ai.evaluation.score.value", outcome["reward"])
    for name, value in (outcome.get("reward_components") or {}).items():
        span.set(f"ngym.reward.{name}", value)
