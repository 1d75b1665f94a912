"""Captures the calls under /rollouts/{id} as token segments; recognises a continued conversation by its digest.

The digest covers role, text, and each call's id, name and arguments. Arguments are compared as JSON, without
whitespace: many clients parse and re-serialize them. Reasoning is left out: many clients drop it. Consecutive
assistant items or messages count as one turn.

A call continues the captured call whose conversation, answer included, is the longest prefix of its own. Calls that
continue one another share a segment as long as each prompt begins with all ids so far; so each token is kept once.
A call that the client repeats replaces the first one, unless another call has continued that.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from array import array
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

import orjson
from prometheus_client import CollectorRegistry, Counter, Gauge
from starlette.datastructures import Headers

from ngym.convert import finish_reason
from ngym.errors import BadRequest
from ngym.net.json_limits import is_deep
from ngym.rollout import ModelCall as CallTokens
from ngym.rollout import add_usage, continues
from ngym.routed_experts import ExpertRows
from ngym.schema import ROUTED_EXPERTS, TOKEN_FIELDS, FinishReason, Json
from ngym.schema import Segment as SegmentJson

TEXTS = frozenset({"text", "input_text", "output_text"})
MAX_ROLLOUTS = 100_000
TTL_S = 6 * 3600.0  # seconds after the last call


class PriorCall(NamedTuple):
    """An earlier call that this one continues.

    place: the index, in the native request's messages (chat) or input items (responses), of the last item of its
    answer.
    prompt_token_ids, generation_token_ids: [P], [G], the engine's input and what it sampled.
    turn_goes_on: whether the model's turn continues after it; the engine has not seen what a client appended there.
    """

    place: int
    prompt_token_ids: list[int]
    generation_token_ids: list[int]
    turn_goes_on: bool


def take_prior_call(items: Any) -> PriorCall | None:
    """Remove the token fields from these items or messages; returns the call whose ids the last of them carried.

    Raises:
        BadRequest: the fields are not token ids.
    """
    if not isinstance(items, list):
        return None
    last = None
    for index, item in enumerate(items):
        if TOKEN_FIELDS[0] in item:
            prompt, sampled, *_ = (item.pop(name, None) for name in (*TOKEN_FIELDS, ROUTED_EXPERTS))
            last = (index, prompt, sampled)
    if last is None:
        return None
    index, prompt, sampled = last
    for name, ids in zip(TOKEN_FIELDS, (prompt, sampled), strict=False):
        _check_ids(ids, f"field 'input[{index}].{name}'")
    return PriorCall(index, prompt, sampled, index + 1 < len(items) and is_from_model(items[index + 1]))


def is_from_model(item: Json) -> bool:
    """Whether the model said this item or message."""
    return item.get("role") == "assistant" or item.get("type") in ("function_call", "reasoning")


def _check_ids(ids: Any, where: str) -> None:
    try:
        array("I", ids)  # validates in C: a conversation has many ids
    except (TypeError, ValueError, OverflowError):
        raise BadRequest(
            f"{where}: must be a list of token ids; return the item unchanged, or without this field"
        ) from None


@dataclass(frozen=True, slots=True)
class ModelCall:
    """The context of one call: its rollout, and the state of the service.

    state: what the service's lifespan yielded.
    seen: the earlier call that this one continues; a back end that owns the tokens continues from exactly its ids.
    size: bytes of the client's request (`ngym.net.json_limits.by_size`).
    """

    options: Any
    state: Any
    rollout_id: str | None
    headers: Headers
    seen: PriorCall | None = None
    size: int = 0


Respond = Callable[[Json, ModelCall], Awaitable[Json]]
Stream = Callable[[Json, ModelCall], AsyncIterator[Json]]


class Turn(NamedTuple):
    """The end of a turn.

    digest: of everything up to it.
    place: the index of its last item or message; -1 for the start, before all of them.
    """

    digest: bytes
    place: int


class RequestTurns(NamedTuple):
    """The turns of a request; `unfinished` is the assistant's part of the last turn, if that is the assistant's."""

    turns: list[Turn]
    unfinished: list[Any]


def request_turns(request: Json) -> RequestTurns:
    """The turns of a native request, chat or Responses."""
    items = request["messages"] if "messages" in request else request["input"]
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    turns = [Turn(_digest(b"", [request.get("instructions"), request.get("tools")]), -1)]
    run: list[Any] = []
    for index, item in enumerate(items):
        if is_from_model(item):
            run += _output_content(item)
            if index + 1 < len(items) and is_from_model(items[index + 1]):
                continue
            turns.append(Turn(_digest(turns[-1].digest, _merge(run)), index))
            if index + 1 < len(items):
                run = []
        else:
            turns.append(Turn(_digest(turns[-1].digest, _input_content(item)), index))
    return RequestTurns(turns, run)


def conversation_digest(before: RequestTurns, answer: Json) -> bytes:
    """The digest of a conversation and its native answer, a Response or a Chat Completion."""
    items = answer["output"] if "output" in answer else [answer["choices"][0]["message"]]
    parts = [part for item in items for part in _output_content(item)]
    turn = before.turns[-2 if before.unfinished else -1]
    return _digest(turn.digest, _merge(before.unfinished + parts))


def _digest(before: bytes, turn: list[Any]) -> bytes:
    try:
        raw = orjson.dumps(turn, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # half of a surrogate pair, which some parsers of tool calls leave in a text
        raw = json.dumps(turn, sort_keys=True).encode()
    return blake2b(before + raw, digest_size=16).digest()


def _input_content(item: Json) -> list[Any]:
    if item.get("type") == "function_call_output":
        return ["tool", item["call_id"], _content(item["output"])]
    role = item["role"]
    return ["system" if role == "developer" else role, item.get("tool_call_id"), _content(item.get("content"))]


def _output_content(item: Json) -> list[Any]:
    """An item's texts, and its calls as lists."""
    match item.get("type") or "message":
        case "reasoning":
            return []
        case "function_call":
            return [[item["call_id"], item["name"], _arguments(item["arguments"])]]
    calls = [
        [call["id"], call["function"]["name"], _arguments(call["function"]["arguments"])]
        for call in item.get("tool_calls") or ()
    ]
    content = _content(item.get("content"))
    refusal = [item["refusal"]] if item.get("refusal") else []
    return [*(content if isinstance(content, list) else [content]), *refusal, *calls]


def _merge(run: list[Any]) -> list[Any]:
    texts = [part for part in run if isinstance(part, str)]
    return ["assistant", "".join(texts), *(part for part in run if not isinstance(part, str))]


def _content(content: Any) -> Any:
    """Text as one string; content with other parts as the list of its texts and parts."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [_part(part) for part in content]
    return "".join(parts) if all(isinstance(part, str) for part in parts) else parts


def _part(part: Json) -> Any:
    if part["type"] in TEXTS:
        return part["text"]
    return part["refusal"] if part["type"] == "refusal" else part


def _arguments(arguments: str) -> Any:
    """The arguments as JSON; as they are if they are not JSON, or nested deeper than can be written again."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    return arguments if is_deep(arguments.encode(), value) else value


@dataclass(slots=True)
class _Segment:
    """One unbroken context: ids [T], the sampler's logprobs of the masked ones, its images and experts, and its calls in
    order.
    """

    ids: array[int] = field(default_factory=lambda: array("I"))
    logprobs: array[float] = field(default_factory=lambda: array("d"))
    images: list[str] = field(default_factory=list)
    experts: ExpertRows | None = None
    calls: list[_Call] = field(default_factory=list)

    def json(self) -> SegmentJson:
        sampled = [call for call in self.calls if call.end > call.start]
        segment = SegmentJson(
            token_ids=self.ids.tolist(),
            mask=[[call.start, call.end] for call in sampled],
            logprobs=self.logprobs.tolist(),
            policy_version=[
                [call.start + first, call.start + last, version]
                for call in sampled
                for first, last, version in call.versions
            ],
        )
        if self.images:
            segment["images"] = self.images
        if self.experts is not None:
            segment["routed_experts"] = self.experts.record()
        return segment

    def size(self) -> int:
        """Of what is kept, in units of a token id."""
        return len(self.ids) + (0 if self.experts is None else len(self.experts.raw) // self.ids.itemsize)


@dataclass(slots=True, eq=False)
class _Call:
    """One call: its context begins at `before` in its segment, its sampled tokens are [start, end).

    started_at: by time.monotonic().

    finish: why its turn ended.
    """

    segment: _Segment
    before: int
    start: int
    end: int
    versions: list[list[int]]
    usage: Json | None
    finish: FinishReason
    request_digest: bytes
    answer_digest: bytes
    started_at: float
    seconds: float
    continued: bool = False


@dataclass(slots=True)
class _Rollout:
    calls: list[_Call] = field(default_factory=list)
    by_answer: dict[bytes, _Call] = field(default_factory=dict)
    used_at: float = 0.0

    def tokens(self) -> int:
        return sum(segment.size() for segment in self.segments())

    def segments(self) -> list[_Segment]:
        """The segments with tokens, in the order in which they began."""
        return list({id(call.segment): call.segment for call in self.calls if call.segment.ids}.values())


class PendingCall(NamedTuple):
    """A call in progress: its rollout, its start, the conversation before it, and the call that it continues."""

    rollout_id: str
    started_at: float
    turns: RequestTurns
    continues: _Call | None
    seen: PriorCall | None
    repeated: bool


class Captures:
    """The captured calls of all rollouts. The least recently used rollouts are dropped first.

    Args:
        registry: counts what is kept and what was dropped.
        max_rollouts, ttl_s: how many rollouts are kept, and for how long after their last call.

    Attributes:
        kept_id: changes whenever calls may have been lost.
    """

    def __init__(self, registry: CollectorRegistry, max_rollouts: int = MAX_ROLLOUTS, ttl_s: float = TTL_S) -> None:
        self._max_tokens = 0
        self._max_rollouts = max_rollouts
        self._ttl_s = ttl_s
        self._rollouts: OrderedDict[str, _Rollout] = OrderedDict()  # least recently used first
        self._tokens = 0
        self._keep_since(time.monotonic())
        rollout_count = Gauge("ngym_captured_rollouts", "Rollouts whose calls are kept", registry=registry)
        rollout_count.set_function(lambda: len(self._rollouts))
        tokens = Gauge("ngym_captured_tokens", "Token ids kept of captured calls", registry=registry)
        tokens.set_function(lambda: self._tokens)
        self._forgotten = Counter(
            "ngym_captures_forgotten", "Rollouts dropped before they were fetched", ["why"], registry=registry
        )

    def begin(self, max_tokens: int, *, at_new_address: bool = False) -> None:
        """Reset, and keep at most this many token ids: 4 bytes each, and 8 for the logprob of a sampled one.

        at_new_address: whether no other process that kept calls can have served there.
        """
        self._max_tokens = max_tokens
        self._rollouts.clear()
        self._tokens = 0
        self._keep_since(-math.inf if at_new_address else time.monotonic())

    def _keep_since(self, since: float) -> None:
        """Calls before this time, by time.monotonic(), may be lost."""
        self._kept_since = since
        self.kept_id = secrets.token_hex(8)

    def kept_s(self) -> float | None:
        """The seconds in which no call was lost: all calls of a rollout that began in them are here.

        They begin with this process, or with the last call of a rollout that was dropped before it was fetched. None: no
        call was ever lost.
        """
        return None if self._kept_since == -math.inf else round(time.monotonic() - self._kept_since, 6)

    def ask(self, rollout_id: str, request: Json, *, repeated: bool) -> PendingCall:
        """Begin a call.

        request: the native one. repeated: the client says that it sent this before.
        """
        started, turns = time.monotonic(), request_turns(request)
        rollout = self._rollouts.get(rollout_id)
        if rollout is None:
            return PendingCall(rollout_id, started, turns, None, None, repeated)
        for turn in reversed(turns.turns):
            call = rollout.by_answer.get(turn.digest)
            if call is not None:
                ids = call.segment.ids
                goes_on = bool(turns.unfinished) and turn is turns.turns[-1]
                prior_call = PriorCall(
                    turn.place, ids[: call.start].tolist(), ids[call.start : call.end].tolist(), goes_on
                )
                return PendingCall(rollout_id, started, turns, call, prior_call, repeated)
        return PendingCall(rollout_id, started, turns, None, None, repeated)

    def keep(self, question: PendingCall, answer: Json, tokens: CallTokens, usage: Json | None) -> None:
        """Capture the answer, native and with token data. tokens: empty for a conversation that did not fit."""
        rollout = self._rollouts.pop(question.rollout_id, None) or _Rollout()
        self._rollouts[question.rollout_id] = rollout
        rollout.used_at = time.monotonic()
        self._tokens -= rollout.tokens()
        if question.repeated:
            _retract(rollout, question.turns.turns[-1].digest)
        call = _place_call(question, tokens, usage, answer)
        rollout.calls.append(call)
        if tokens.prompt_token_ids:
            rollout.by_answer[call.answer_digest] = call
        self._tokens += rollout.tokens()
        self._forget()

    def segments(self, rollout_id: str) -> Json | None:
        """The captured calls of a rollout, for the collector (reference/rows.md), or None.

        `spans` has for each call how many seconds ago it began and how many it took: clocks of two hosts differ.
        """
        rollout = self._rollouts.get(rollout_id)
        if rollout is None:
            return None
        segments = [segment.json() for segment in rollout.segments()]
        now, usage = time.monotonic(), rollout.calls[0].usage
        for call in rollout.calls[1:]:
            usage = add_usage(usage, call.usage)
        return {
            "rollout_id": rollout_id,
            "calls": len(rollout.calls),
            "segments": segments,
            "policy_version": sorted({span[2] for segment in segments for span in segment["policy_version"]}),
            "usage": usage,
            "finish_reasons": [call.finish for call in rollout.calls],
            "spans": [[round(now - call.started_at, 6), round(call.seconds, 6)] for call in rollout.calls],
            "kept_s": self.kept_s(),
            "kept_id": self.kept_id,
        }

    def forget(self, rollout_id: str) -> bool:
        """Delete a rollout's calls; returns whether there were any."""
        rollout = self._rollouts.pop(rollout_id, None)
        if rollout is None:
            return False
        self._tokens -= rollout.tokens()
        return True

    def _forget(self) -> None:
        """Drop rollouts down to the bounds; the rollout of the last call stays."""
        oldest_kept = time.monotonic() - self._ttl_s
        while len(self._rollouts) > 1:
            rollout_id, rollout = next(iter(self._rollouts.items()))
            if rollout.used_at < oldest_kept:
                why = "old"
            elif len(self._rollouts) > self._max_rollouts or self._tokens > self._max_tokens:
                why = "full"
            else:
                return
            self.forget(rollout_id)
            self._forgotten.labels(why).inc()
            if self._max_tokens:  # 0 asks for it
                self._keep_since(max(self._kept_since, rollout.used_at))


def _place_call(question: PendingCall, tokens: CallTokens, usage: Json | None, answer: Json) -> _Call:
    """Put the call in the segment that it continues, if its prompt begins with all ids of that, else in a new one."""
    earlier = question.continues
    prompt = array("I", tokens.prompt_token_ids)
    segment = _Segment()
    if earlier is not None:
        earlier.continued = True
        if continues(earlier.segment.ids, earlier.segment.images, prompt, tokens.images):
            segment = earlier.segment
    segment.images = list(tokens.images)
    if tokens.experts is not None:
        if segment.experts is None:
            segment.experts = tokens.experts
        else:
            segment.experts.add(tokens.experts)
    before = len(segment.ids)
    segment.ids += prompt[before:]
    start = len(segment.ids)
    segment.ids.extend(tokens.generation_token_ids)
    segment.logprobs.extend(tokens.generation_log_probs)
    call = _Call(
        segment,
        before,
        start,
        len(segment.ids),
        tokens.versions,
        usage,
        finish_reason(answer),
        request_digest=question.turns.turns[-1].digest,
        answer_digest=conversation_digest(question.turns, answer),
        started_at=question.started_at,
        seconds=time.monotonic() - question.started_at,
    )
    segment.calls.append(call)
    return call


def _retract(rollout: _Rollout, digest: bytes) -> None:
    """Drop the last call with this conversation, unless another call has continued it."""
    call = next((call for call in reversed(rollout.calls) if call.request_digest == digest), None)
    if call is None or call.continued:
        return
    segment = call.segment
    rollout.calls.remove(call)
    segment.calls.remove(call)
    del segment.ids[call.before :]
    if segment.experts is not None:
        segment.experts.cut(max(0, call.before - 1))  # of the last token before it, the call computed them
    del segment.logprobs[len(segment.logprobs) - (call.end - call.start) :]
    if rollout.by_answer.get(call.answer_digest) is call:
        del rollout.by_answer[call.answer_digest]
