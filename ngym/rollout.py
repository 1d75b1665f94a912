"""The tokens, tool calls and transcript of a rollout.

`splice` continues a conversation after the exact ids that the engine has seen, followed by what the template adds:

    seen      |<- prompt of the last call ->|<- sampled ->|
    rendered  |<- history, tokenised again ->...turn end  |<- glue, tool results, generation prompt ->|
    result    |<- seen ------------------------------------|<- the same ------------------------------>|

Tokenising a history again may give other ids than those sampled, and a template may leave out old reasoning or write a
tool call with other spaces. The policy must be trained on exactly the ids that it saw.
"""

from __future__ import annotations

import json
import math
import textwrap
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import takewhile
from typing import Any, NamedTuple

import orjson

from ngym.errors import printable
from ngym.net.json_limits import LONG_NUMBER
from ngym.routed_experts import ExpertRows
from ngym.schema import LARGEST_REWARD, ROUTED_EXPERTS, TOKEN_FIELDS, Json, Segment

Turn = tuple[int, ...]
OURS: Turn = ()
"""Stands for one or more consecutive turns that the policy sampled; their contents are not compared."""
LABEL_WIDTH = 11
ROUNDING = 0.01  # of a logprob of 0
_TOKEN_DATA = frozenset({*TOKEN_FIELDS, ROUTED_EXPERTS})
_NUMBER = (int, float)


class ModelCall(NamedTuple):
    """One call's tokens: prompt ids [P], sampled ids [G], the sampler's logprobs [G], version spans over the sampled ids.

    images: digests of the prompt's images, in order. experts: to which the engine sent the first of all these tokens.
    """

    prompt_token_ids: list[int]
    generation_token_ids: list[int]
    generation_log_probs: list[float]
    versions: list[list[int]]
    images: Sequence[str] = ()
    experts: ExpertRows | None = None


def image_digest(url: str) -> str:
    """The identity of an image in a conversation, 32 hex digits: of its URL, which for a data: URL is its content."""
    return blake2b(url.encode(), digest_size=16).hexdigest()


def continues(ids: Any, images: Sequence[str], prompt: Any, prompt_images: Sequence[str]) -> bool:
    """Whether a prompt begins with all ids of a context, and with its images: their placeholders are equal tokens."""
    return bool(prompt[: len(ids)] == ids and list(prompt_images[: len(images)]) == list(images))


def tokens_of(response: Json) -> ModelCall | None:
    """The token data of a model's response (on its last output item), or None when it carries none.

    Raises:
        ValueError: some but not all of the three fields, lengths that disagree, or values that are not ids, logprobs and
            experts.
    """
    output = response.get("output") or []
    item: Json = output[-1] if output else {}
    if _TOKEN_DATA.isdisjoint(item):
        return None
    present = [item.get(name) is not None for name in TOKEN_FIELDS]
    if not any(present):
        return None
    if not all(present):
        raise ValueError(f"token data is all or nothing; the last output item lacks one of {', '.join(TOKEN_FIELDS)}")
    prompt, generated, logprobs = (item[name] for name in TOKEN_FIELDS)
    if len(generated) != len(logprobs):
        raise ValueError(f"{len(generated)} generated tokens but {len(logprobs)} logprobs")
    check_tokens((prompt, generated), logprobs)
    record = response.get("ng") or {}
    versions = record.get("policy_version") or [[0, len(generated), 0]]
    routed = record.get(ROUTED_EXPERTS)
    experts = None if routed is None else ExpertRows.read(routed, len(prompt) + len(generated))
    return ModelCall(prompt, generated, logprobs, versions, record.get("images") or [], experts)


def shortest_float32(values: Sequence[float]) -> list[float]:
    """The same float32 numbers with the fewest digits: JSON has about 10 bytes for each instead of 18."""
    import numpy as np  # of model servers only

    raw = orjson.dumps(np.asarray(values, np.float32), option=orjson.OPT_SERIALIZE_NUMPY)
    numbers: list[float] = orjson.loads(raw)
    return numbers


def check_tokens(id_lists: Iterable[list[int]], logprobs: list[float]) -> None:
    """Raise ValueError for wrong token ids and log-probabilities."""
    try:
        for ids in id_lists:
            array("Q", ids)  # in C: 100,000 numbers take half a millisecond
        is_finite = math.isfinite(total := sum(logprobs)) and total >= -LARGEST_REWARD  # then each fits into a float32
    except (TypeError, OverflowError) as error:
        raise ValueError(f"token ids must be integers from 0 on, and logprobs numbers: {error}") from None
    if not (is_finite and max(logprobs, default=0.0) <= ROUNDING):
        raise ValueError("logprobs must be finite and at most 0")


def extend(segments: list[Segment], call: ModelCall) -> None:
    """Add a model call: it continues the last segment exactly if its prompt begins with all ids so far, else a new one starts."""
    prompt = call.prompt_token_ids
    last = segments[-1] if segments else None
    if last is not None and continues(last["token_ids"], last.get("images", []), prompt, call.images):
        segment = last
        context = prompt[len(segment["token_ids"]) :]
    else:
        segment = Segment(token_ids=[], mask=[], logprobs=[], policy_version=[])
        segments.append(segment)
        context = prompt
    if call.images:
        segment["images"] = list(call.images)
    if call.experts is not None:
        add_experts(segment, call.experts)
    ids = segment["token_ids"]
    ids += context
    start = len(ids)
    if not call.generation_token_ids:
        return
    ids += call.generation_token_ids
    segment["mask"].append([start, len(ids)])
    segment["logprobs"] += call.generation_log_probs
    segment["policy_version"] += [[start + first, start + last, version] for first, last, version in call.versions]


def add_experts(segment: Segment, experts: ExpertRows) -> None:
    """Add those of a call that continues the segment."""
    known = segment.get(ROUTED_EXPERTS)
    if known is not None:
        rows = ExpertRows.read(known, len(segment["token_ids"]))
        rows.add(experts)
        experts = rows
    segment["routed_experts"] = experts.record()


def without_tokens(items: list[Any]) -> list[Any]:
    """The items without their token data; items that carry none are not copied."""
    return [
        {key: value for key, value in item.items() if key not in _TOKEN_DATA} if "prompt_token_ids" in item else item
        for item in items
    ]


def with_latest_tokens(items: list[Any]) -> list[Any]:
    """The items with token data only on the last one that has it, which covers everything before it.

    With the data of every turn, the size of a conversation would grow with the square of its turns.
    """
    last = max((place for place, item in enumerate(items) if "prompt_token_ids" in item), default=0)
    return [*without_tokens(items[:last]), *items[last:]]


def versions_in(segments: list[Segment]) -> list[int]:
    """The policy versions that sampled these segments, ascending."""
    return sorted({version for segment in segments for _, _, version in segment["policy_version"]})


def add_usage(total: Json | None, usage: Json | None) -> Json | None:
    """The sum of two calls' usage; None if either is unknown."""
    if total is None or usage is None:
        return None
    return {key: _add(total.get(key), usage.get(key)) for key in {**total, **usage}}


def _add(left: Any, right: Any) -> Any:
    if isinstance(left, _NUMBER) and isinstance(right, _NUMBER):
        return left + right
    if isinstance(left, dict) and isinstance(right, dict):
        return add_usage(left, right)
    return None


class PriorTokens(NamedTuple):
    """The ids of an earlier call: its prompt [P] and the sampled ids [G]."""

    prompt: list[int]
    sampled: list[int]


class TurnEnds(NamedTuple):
    """any: ids that end a turn. of_requests: those that end a request (`[/INST]`), after which the answer follows."""

    any: frozenset[int]
    of_requests: frozenset[int] = frozenset()


def begins_with(rendered: list[int], seen: PriorTokens) -> bool:
    """Whether the rendering begins with exactly the seen ids."""
    middle, end = len(seen.prompt), len(seen.prompt) + len(seen.sampled)
    return rendered[:middle] == seen.prompt and rendered[middle:end] == seen.sampled


def splice(rendered: list[int], history: list[int], seen: PriorTokens, ends: TurnEnds) -> list[int] | None:
    """The seen ids, then the part of `rendered` that follows the history; None if that part is ambiguous.

    Args:
        rendered: the whole conversation, with its generation prompt.
        history: the conversation up to and including the seen answer, rendered by the same template.

    The turns are compared: history and seen ids must have the same turns in the same order, except those that the
    policy sampled. The rendering then continues after as many turns as the history has.
    """
    before = _turns(history, ends.any)
    known = _turns(seen.prompt, ends.any)
    if not before:
        return None
    # the generation prompt: every turn that the policy sampled begins with it
    start = max((place + 1 for place, token in enumerate(seen.prompt) if token in ends.any), default=0)
    opening = tuple(seen.prompt[start:])
    header = _common(opening, before[-1])  # a template may open a reasoning block that it leaves out of old answers
    if header != opening and (not known or _is_ours(known[-1], header, ends)):
        return None  # this beginning does not identify the policy's turns
    if _policy_turns(before[:-1], header, ends) != _policy_turns(known, header, ends):
        return None  # the caller edited the history, so the seen ids no longer match it
    places = [place for place, token in enumerate(rendered) if token in ends.any]
    if len(places) < len(before):
        return None
    finished = bool(seen.sampled) and seen.sampled[-1] in ends.any
    cut = places[len(before) - 1]  # the template's end of the answer; a finished answer already has one
    return seen.prompt + seen.sampled + rendered[cut + 1 if finished else cut :]


def _policy_turns(turns: list[Turn], header: Turn, ends: TurnEnds) -> list[Turn]:
    """The turns, with OURS in place of those that the policy sampled, and OURS at the end for its answer."""
    story: list[Turn] = []
    for turn in [*(OURS if _is_ours(turn, header, ends) else turn for turn in turns), OURS]:
        if turn != OURS or story[-1:] != [OURS]:
            story.append(turn)
    return story


def _is_ours(turn: Turn, header: Turn, ends: TurnEnds) -> bool:
    if header:
        return turn[: len(header)] == header
    return bool(ends.of_requests) and turn[-1] not in ends.of_requests


def _turns(ids: list[int], ends: Collection[int]) -> list[Turn]:
    """The finished turns, each including its end token."""
    turns, start = [], 0
    for place, token in enumerate(ids):
        if token in ends:
            turns.append(tuple(ids[start : place + 1]))
            start = place + 1
    return turns


def _common(one: Turn, other: Turn) -> Turn:
    """The common prefix of both."""
    return tuple(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


class Call(NamedTuple):
    """One function call. arguments: None if the model did not write a JSON object."""

    name: str
    arguments: dict[str, Any] | None
    call_id: str | None = None


def function_calls(items: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The function_call items of a trajectory. The calls of Chat messages, as some agents return them, get that form."""
    for item in items:
        if item.get("type") == "function_call":
            yield item
        elif item.get("role") == "assistant" and isinstance(item.get("tool_calls"), list):
            for call in item["tool_calls"]:
                if isinstance(call, dict) and isinstance(function := call.get("function"), dict):
                    yield {**function, "type": "function_call", "call_id": call.get("id")}


def calls_in(response: Mapping[str, Any], *, exact: bool = False) -> list[Call]:
    """Every function call of a response, except those of a cut-off last turn, which are not run.

    Args:
        exact: keep all digits of integers beyond 64 bits, which are floats otherwise. orjson cannot write them.
    """
    items = response.get("output") or []
    if response.get("status") == "incomplete":
        items = items[: _last_turn(items)]
    return [
        Call(str(item.get("name")), _arguments(item.get("arguments"), exact), item.get("call_id"))
        for item in function_calls(items)
    ]


def _last_turn(items: Sequence[Mapping[str, Any]]) -> int:
    """The index where the model's last turn begins: after the last item of a tool or a user."""
    for place in range(len(items), 0, -1):
        item = items[place - 1]
        if item.get("type") == "function_call_output" or item.get("role") not in (None, "assistant"):
            return place
    return 0


def _arguments(text: Any, exact: bool) -> dict[str, Any] | None:
    try:
        value = orjson.loads(text or "{}")
        if exact and text and LONG_NUMBER.search(text.encode()):
            value = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def transcript(row: Json, width: int = 100) -> str:
    """An output row (reference/rows.md) as lines of at most `width` characters. Control characters are escaped."""
    lines = [headline(row)]
    for label, text in turns(row):
        wrapped = [
            part
            for line in printable(text).splitlines() or [""]
            for part in textwrap.wrap(line, width - LABEL_WIDTH - 2) or [""]
        ]
        lines += [f"  {label if i == 0 else '':<{LABEL_WIDTH}}{part}" for i, part in enumerate(wrapped)]
    return "\n".join(lines)


def headline(row: Json) -> str:
    """The task, the rollout, its reward and its stop reason, in one line."""
    trace = row.get("ng") or {}
    reward = row.get("reward")
    parts = [
        f"task {row.get('_ng_task_index', '?')}, rollout {row.get('_ng_rollout_index', '?')}",
        "not scored" if reward is None else f"reward {reward:g}",
    ]
    if trace.get("stop_reason") not in (None, "answer"):
        parts.append(f"stopped: {trace['stop_reason']}")
    if "expected_answer" in row:
        parts.append(f"expected {row['expected_answer']}")
    return printable(" | ".join(parts))


def turns(row: Json) -> Iterator[tuple[str, str]]:
    """Pairs of speaker (`user`, `assistant`, `reasoning`, `tool` ...) and unchanged text, the prompt first."""
    prompt = (row.get("responses_create_params") or {}).get("input")
    items = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or [])
    for item in items + list((row.get("response") or {}).get("output") or []):
        yield from _turn(item)


def _turn(item: Json) -> Iterator[tuple[str, str]]:
    kind = item.get("type", "message")
    if kind == "function_call":
        yield _call(item)
    elif kind == "function_call_output":
        yield "tool", f"<- {_text(item.get('output'))}"
    elif kind == "reasoning":
        yield "reasoning", "\n".join(_text([part]) for part in item.get("summary") or item.get("content") or [])
    elif kind == "message":
        calls, text = [_call(call) for call in function_calls([item])], _text(item.get("content"))
        if text or not calls:
            yield item.get("role", "assistant"), text
        yield from calls
    else:
        yield kind, ""


def _call(call: Mapping[str, Any]) -> tuple[str, str]:
    return "assistant", f"-> {call.get('name')}({call.get('arguments')})"


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(_part_text(part) for part in content or [] if isinstance(part, dict))


def _part_text(part: Json) -> str:
    """The text of a part of a message, which may be empty; of another part, its type."""
    text = part.get("text", part.get("refusal"))
    return text if isinstance(text, str) else f"[{part.get('type')}]"
