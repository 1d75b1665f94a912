"""The token ids of a rollout as segments (one unbroken context each, every token stored once), and its token usage."""

from __future__ import annotations

from typing import Any, NamedTuple

from ngym.schema import TOKEN_FIELDS, Json, Segment


class ModelCall(NamedTuple):
    """One call's tokens: prompt ids [P], sampled ids [G], the sampler's logprobs [G], version spans over the sampled ids."""

    prompt_token_ids: list[int]
    generation_token_ids: list[int]
    generation_log_probs: list[float]
    versions: list[list[int]]


def tokens_of(response: Json) -> ModelCall | None:
    """The token data of a model's response (on its last output item), or None when it carries none.

    Raises:
        ValueError: some but not all of the three fields, or lengths that disagree.
    """
    output = response.get("output") or []
    item: Json = output[-1] if output else {}
    present = [item.get(name) is not None for name in TOKEN_FIELDS]
    if not any(present):
        return None
    if not all(present):
        raise ValueError(f"token data is all or nothing; the last output item lacks one of {', '.join(TOKEN_FIELDS)}")
    prompt, generated, logprobs = (item[name] for name in TOKEN_FIELDS)
    if len(generated) != len(logprobs):
        raise ValueError(f"{len(generated)} generated tokens but {len(logprobs)} logprobs")
    versions = (response.get("ng") or {}).get("policy_version") or [[0, len(generated), 0]]
    return ModelCall(prompt, generated, logprobs, versions)


def extend(segments: list[Segment], call: ModelCall) -> None:
    """Add a model call: it continues the last segment exactly if its prompt begins with all ids so far, else a new one starts."""
    prompt = call.prompt_token_ids
    if segments and prompt[: len(segments[-1]["token_ids"])] == segments[-1]["token_ids"]:
        segment = segments[-1]
        context = prompt[len(segment["token_ids"]) :]
    else:
        segment = Segment(token_ids=[], mask=[], logprobs=[], policy_version=[])
        segments.append(segment)
        context = prompt
    ids = segment["token_ids"]
    ids += context
    start = len(ids)
    if not call.generation_token_ids:
        return
    ids += call.generation_token_ids
    segment["mask"].append([start, len(ids)])
    segment["logprobs"] += call.generation_log_probs
    segment["policy_version"] += [[start + first, start + last, version] for first, last, version in call.versions]


def without_tokens(items: list[Any]) -> list[Any]:
    """The items without their token data; items that carry none are not copied."""
    return [
        {key: value for key, value in item.items() if key not in TOKEN_FIELDS} if "prompt_token_ids" in item else item
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


def added(total: Json | None, usage: Json | None) -> Json | None:
    """The sum of two calls' usage; None if either is unknown."""
    if total is None or usage is None:
        return None
    return {key: _added(total.get(key), usage.get(key)) for key in total.keys() | usage.keys()}


def _added(left: Any, right: Any) -> Any:
    if isinstance(left, dict) and isinstance(right, dict):
        return {key: _added(left.get(key), right.get(key)) for key in left.keys() | right.keys()}
    if isinstance(left, int | float) and isinstance(right, int | float):
        return left + right
    return None
