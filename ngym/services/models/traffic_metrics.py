"""Telemetry of a model server: calls as spans with the names of OpenTelemetry's GenAI conventions, and token counters."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry, Counter, Gauge

from ngym.convert import finish_reason, usage_from_chat
from ngym.rollout.segments import without_tokens
from ngym.schema import TOKEN_FIELDS, Json
from ngym.telemetry import tracing


class Traffic:
    """The calls of one model server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        tokens = Counter("ngym_model_tokens", "Tokens, from the usage of answers", ["way"], registry=registry)
        self.read, self.written = tokens.labels("input"), tokens.labels("output")
        self.version = Gauge(
            "ngym_policy_version", "The newest policy version that an answer was sampled with", registry=registry
        )
        self.newest = -1

    def call(self, native: Json, model: str, *, streamed: bool) -> Call:
        """A call that is about to be answered. native: the back end's request."""
        return Call(self, native, model, streamed)


class Call:
    """The span and counters of one call: used with `with`, and given the answer by `answered`."""

    def __init__(self, traffic: Traffic, native: Json, model: str, streamed: bool) -> None:
        self._traffic = traffic
        self._native = native
        self._model = model
        self._streamed = streamed
        self._span = tracing.OFF

    def __enter__(self) -> Self:
        span = self._span = tracing.span(f"chat {self._model}", "server").__enter__()
        if span.is_told:
            asked = self._native
            span.set("gen_ai.operation.name", "chat")
            span.set("gen_ai.provider.name", "ngym")
            span.set("gen_ai.request.model", self._model)
            span.set("gen_ai.request.stream", self._streamed)
            for name in ("temperature", "top_p"):
                span.set(f"gen_ai.request.{name}", asked.get(name))
            most = asked.get("max_output_tokens") or asked.get("max_completion_tokens") or asked.get("max_tokens")
            span.set("gen_ai.request.max_tokens", most)
            span.say("ngym.model.input", asked.get("input") or asked.get("messages"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._span.__exit__(kind, error, trace)

    def answered(self, answer: Json) -> None:
        """Record the answer, a Response or a Chat Completion."""
        is_response = "output" in answer
        usage = (answer.get("usage") if is_response else usage_from_chat(answer.get("usage"))) or {}
        read, written = usage.get("input_tokens") or 0, usage.get("output_tokens") or 0
        self._traffic.read.inc(read)
        self._traffic.written.inc(written)
        versions = [span[2] for span in (answer.get("ng") or {}).get("policy_version") or ()]
        if versions and max(versions) > self._traffic.newest:
            self._traffic.newest = max(versions)
            self._traffic.version.set(self._traffic.newest)
        if not self._span.is_told:
            return
        span = self._span
        span.set("gen_ai.response.id", answer.get("id"))
        span.set("gen_ai.response.model", answer.get("model"))
        span.set("gen_ai.response.finish_reasons", [finish_reason(answer)])
        span.set("gen_ai.usage.input_tokens", read)
        span.set("gen_ai.usage.output_tokens", written)
        span.set("ngym.policy_version", max(versions, default=None))
        span.say("ngym.model.output", without_tokens(answer["output"]) if is_response else _messages(answer))


def _messages(answer: Json) -> list[Json]:
    messages = [choice["message"] for choice in answer["choices"]]
    return [{key: value for key, value in message.items() if key not in TOKEN_FIELDS} for message in messages]
