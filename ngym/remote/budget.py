"""May this be asked at all? What a key may use up."""

from __future__ import annotations

from dataclasses import dataclass, field

from ngym.errors import ServiceError
from ngym.schema import Json


class UsedUp(ServiceError):
    """A key may be used no more, or its account has nothing left. Clients try a 429 again, and no 402."""

    status = 402
    title = "Used up"


@dataclass
class Used:
    """Tokens of one answer, or of all."""

    input: int = 0
    output: int = 0

    def take(self, event: Json) -> None:
        """Read the usage of an answer, or of one event of its stream (the highest counts: some repeat it)."""
        usage = _usage(event)
        if usage is None:
            return
        counts = {name: count for name, count in usage.items() if isinstance(count, int)}
        cached = counts.get("cache_read_input_tokens", 0) + counts.get("cache_creation_input_tokens", 0)
        self.input = max(self.input, counts.get("input_tokens", counts.get("prompt_tokens", 0)) + cached)
        self.output = max(self.output, counts.get("output_tokens", counts.get("completion_tokens", 0)))


def _usage(event: Json) -> Json | None:
    """Where Chat, Responses, Anthropic and SGLang put it: at the top, or in the `response` or `message` of an event."""
    if isinstance(event.get("meta_info"), dict):
        of_sglang: Json = event["meta_info"]
        return of_sglang
    for holder in (event, event.get("response"), event.get("message")):
        if isinstance(holder, dict) and isinstance(holder.get("usage"), dict):
            found: Json = holder["usage"]
            return found
    return None


@dataclass
class Caps:
    """What this process may use up of a key, since it started; None: as much as it likes. Prices are per million tokens."""

    max_tokens: int | None = None
    max_spend: float | None = None
    price_input: float = 0.0
    price_output: float = 0.0
    used: Used = field(default_factory=Used)

    @property
    def spend(self) -> float:
        return (self.used.input * self.price_input + self.used.output * self.price_output) / 1e6

    def check(self) -> None:
        """Raises UsedUp once a cap is reached; it says what to raise."""
        tokens = self.used.input + self.used.output
        if self.max_tokens is not None and tokens >= self.max_tokens:
            raise _reached(f"{tokens} tokens used of max_tokens_total {self.max_tokens}", "max_tokens_total")
        if self.max_spend is not None and self.spend >= self.max_spend:
            raise _reached(f"{self.spend:.4g} spent of max_spend {self.max_spend:g}", "max_spend")

    def add(self, used: Used) -> None:
        self.used.input += used.input
        self.used.output += used.output


def _reached(what: str, option: str) -> UsedUp:
    detail = f"{what}: nothing more is asked of this key; raise {option} in the stanza (a restart counts from 0)"
    return UsedUp(detail, failure="model_error")
