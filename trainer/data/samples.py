"""Samples, which every algorithm trains on, and rollouts as samples.

A demonstration is one sample, with one segment as long as each turn's prompt continues the turn before. The segments of
a sample always share a micro-batch.

Left out and counted: failed attempts, and null rewards ("could not be scored" is not a 0). Refused: rows without
tokens, rows with images or other media that the model does not read, and rows that were not sampled from the plain
distribution at the recipe's temperature, because then the sampler's logprobs are not the policy's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NamedTuple

import numpy as np

from ngym.convert import extra_body
from ngym.errors import BadRequest, UsageError
from ngym.files import jsonl
from ngym.rollout import check_tokens
from ngym.routed_experts import ExpertRows
from ngym.schema import ROUTED_EXPERTS, Json, RolloutCopies, agent_name, is_failed_attempt, row_problem
from ngym.stats import all_equal

from .images import TEXT_ONLY, Images, PlacedImage, images_of, marker_problem, media_problem, place_images

# name -> the values that leave the model's distribution unchanged
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "repetition_penalty": (None, 1),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "min_tokens": (None, 0),
    "structured_outputs": (None, {}),
    "text.format": (None, "text"),
    "tool_choice": (None, "auto", "none"),
}
NO_MODEL_CALL = (
    "let the agent call its model by ngym's URL, and use a model server that returns token ids, such as models/vllm"
)


class Routers(NamedTuple):
    """The routers of a mixture of experts: `layers` of the decoder, each with `chosen` of `experts` for a token."""

    layers: int
    chosen: int
    experts: int


@dataclass(frozen=True, slots=True)
class Segment:
    """One unbroken context.

    token_ids: [T]. spans: [start, end) of the trained tokens; start >= 1, because the first token has no prediction.
    images: in the order of their placeholders. experts: of its first tokens, if its routing is replayed.
    """

    token_ids: list[int]
    spans: list[tuple[int, int]]
    images: tuple[PlacedImage, ...] = ()
    experts: ExpertRows | None = None

    @property
    def prefix_ids(self) -> list[int]:
        """The token ids, where each placeholder is the key of its image: equal for equal contexts only."""
        if not self.images:
            return self.token_ids
        ids = list(self.token_ids)
        for image in self.images:
            for place in image.places:
                ids[place] = image.key
        return ids

    @property
    def trained(self) -> int:
        """The number of trained tokens."""
        return sum(end - start for start, end in self.spans)


@dataclass(frozen=True, slots=True)
class Sample:
    segments: tuple[Segment, ...]

    @property
    def tokens(self) -> int:
        """The number of tokens that the model computes."""
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def longest(self) -> int:
        """The number of tokens of the longest segment."""
        return max(len(segment.token_ids) for segment in self.segments)

    @property
    def trained(self) -> int:
        return sum(segment.trained for segment in self.segments)


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples that are trained between two reports.

    updates: the samples of each optimizer step. values: metrics known beforehand, for the log.
    """

    updates: Sequence[Sequence[Sample]]
    values: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSegment(Segment):
    """A segment that a policy sampled. Each field is [trained], over its sampled tokens; None until `prepare` fills it.

    sampler: log p from the engine that sampled. old: from the trainer before its first update. reference: under the
    reference policy. teacher: under the teacher of a distillation. values: the critic's before the first update; returns: their targets.
    """

    sampler: list[float]
    advantages: list[float] | None = None
    old: list[float] | None = None
    reference: list[float] | None = None
    teacher: list[float] | None = None
    values: list[float] | None = None
    returns: list[float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSample(Sample):
    """One attempt at a task, with only the segments that have sampled tokens; there may be none.

    group: the task. truncated: it was cut off. id: of the row. agent: its name. task: the fields of its task that were
    asked for, as text.
    """

    segments: tuple[SampledSegment, ...]
    group: str
    reward: float
    components: dict[str, float]
    truncated: bool
    turns: int
    tool_calls: int
    tool_errors: int
    id: str = ""
    agent: str = ""
    task: dict[str, str] = field(default_factory=dict)


@dataclass
class ReadRollouts:
    """The usable rollouts, and the counts of the others.

    first_failure: the service, class and message of the first failed one; "" if none failed. fields: of the tasks, that
    samples keep.
    """

    rollouts: list[RolloutSample] = field(default_factory=list)
    unscored: int = 0
    failed: int = 0
    first_failure: str = ""
    fields: frozenset[str] = frozenset()


def read_rollouts(
    path: Path,
    temperature: float,
    fields: frozenset[str] = frozenset(),
    images: Images = TEXT_ONLY,
    routers: Routers | None = None,
) -> ReadRollouts:
    """The rollouts of a JSONL file.

    fields: of their tasks, that samples keep; `a.b` is a member of a field. images: how the model reads images, or the
    reason why it does not. routers: of the model, if it replays the routing of rollouts.

    Raises:
        UsageError: rows that are not rollouts, have another temperature, or occur twice; each is named.
    """
    result, copies = ReadRollouts(fields=fields), RolloutCopies()

    def wrong(row: Json) -> str | None:
        return problem(row, temperature, fields, images, routers) or copies.problem(row)

    for line in jsonl.check_lines(path, wrong):
        add_row(line.row, result, images, routers)
    return result


def check_model_calls(rollouts: Sequence[RolloutSample]) -> None:
    """
    Raises:
        UsageError: there are rollouts, and none of them has a model call: the agent does not use ngym's URL, which no
            further step would change.
    """
    if rollouts and all(rollout.turns == 0 for rollout in rollouts):
        raise UsageError(f"none of {len(rollouts):,} rollouts has a model call; {NO_MODEL_CALL}")


def trainable_rollouts(
    path: Path,
    temperature: float,
    fields: frozenset[str],
    images: Images = TEXT_ONLY,
    routers: Routers | None = None,
) -> list[Sample]:
    """The rollouts of a file with a reward and sampled tokens; see `read_rollouts`.

    Raises:
        UsageError: as `read_rollouts`, or none of the rollouts can be trained on.
    """
    result = read_rollouts(path, temperature, fields, images, routers)
    samples: list[Sample] = [rollout for rollout in result.rollouts if rollout.trained]
    if not samples and (result.rollouts or result.failed or result.unscored):
        uncalled = sum(rollout.turns == 0 for rollout in result.rollouts)
        why = f" ({uncalled:,} without a model call: {NO_MODEL_CALL})" if uncalled else ""
        raise UsageError(
            f"{path}: no rollout to train on: {result.failed:,} failed, {result.unscored:,} have the reward null, "
            f"{len(result.rollouts):,} have no sampled tokens{why}"
        )
    return samples


def add_row(row: Json, result: ReadRollouts, images: Images = TEXT_ONLY, routers: Routers | None = None) -> None:
    """Add a row without problems to the result."""
    if is_failed_attempt(row):
        result.failed += 1
        failure = row["failure"]
        result.first_failure = result.first_failure or " ".join(
            f"{failure.get('service')}: {failure.get('class')}: {failure.get('message')}".split()
        )
    elif row["reward"] is None:
        result.unscored += 1
    else:
        result.rollouts.append(_rollout(row, result.fields, images, routers))


def problem(
    row: Json,
    temperature: float,
    fields: frozenset[str] = frozenset(),
    images: Images = TEXT_ONLY,
    routers: Routers | None = None,
) -> str | None:
    """The reason why a row that should be usable is not; None if it is usable or may be left out."""
    if is_failed_attempt(row):
        return None
    if "reward" not in row or not isinstance(row.get("ng"), dict):
        return "not a scored rollout: it needs a reward and an ng record, as ng_collect_rollouts writes them"
    if unreadable := row_problem(row):
        return unreadable
    if row["reward"] is None:
        return None
    params, segments = row.get("responses_create_params") or {}, row["ng"].get("segments") or []
    if not isinstance(params, dict) or not isinstance(segments, list):
        return "responses_create_params must be an object, and ng.segments a list"
    if bent := distorted_sampling(params, temperature):
        return bent
    if not segments and not sampled_nothing(row):
        return "no token ids (ng.segments is empty): use a model server that returns them, such as models/vllm"
    return (
        next(filter(None, map(_segment_problem, segments)), None)
        or (routers and next(filter(None, (_experts_problem(segment, routers) for segment in segments)), None))
        or _images_problem(row, segments, images)
        or missing_field(row, fields)
    )


def _images_problem(row: Json, segments: Sequence[Json], images: Images) -> str | None:
    """The reason why the images or other media of a rollout cannot be trained on."""
    if problem := media_problem(row, images):
        return problem
    if isinstance(images, str):
        return f"a segment has images: {images}" if any(segment.get("images") for segment in segments) else None
    try:
        _segment_images(row, images)
    except ValueError as error:
        return marker_problem(row, images) or str(error)
    return None


def _segment_images(row: Json, images: Images) -> list[tuple[PlacedImage, ...]]:
    """The images of each segment."""
    segments = row["ng"].get("segments") or ()
    if isinstance(images, str):
        return [() for _ in segments]
    contents = images_of(row)
    return [
        place_images(segment["token_ids"], segment["mask"], segment.get("images", ()), contents, images)
        for segment in segments
    ]


def sampled_nothing(row: Json) -> bool:
    """Whether no token of a rollout was sampled: already its prompt did not fit the model's context, or its agent did
    not call the model.
    """
    reasons = row["ng"].get("finish_reasons") or []
    too_long = bool(reasons) and all(reason == "context" for reason in reasons)
    return too_long or (row["ng"].get("turns") == 0 and not row["ng"].get("policy_version"))


def missing_field(row: Json, fields: Iterable[str]) -> str | None:
    """The message of the first of these fields that a task's row does not have; None if it has all."""
    missing = next((name for name in sorted(fields) if task_field(row, name) is None), None)
    return missing and f"the task has no field {missing!r}, which algorithm.teacher.hint names"


def task_field(row: Json, name: str) -> str | None:
    """The text of a field, or of a member of one (`a.b`); None if the row does not have it."""
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def distorted_sampling(params: Json, temperature: float) -> str | None:
    """The reason why rollouts with these Responses create params are not samples of the policy at this temperature, or
    None.
    """
    try:
        settings = {**params, **extra_body(params)}
    except BadRequest as error:
        return error.detail
    match settings:
        case {"text": {"format": {"type": kind}}}:
            settings["text.format"] = kind
    match settings:
        # Of some tools, or of one that must be called.
        case {"tool_choice": {"mode": kind}} | {"tool_choice": {"type": kind}}:
            settings["tool_choice"] = kind
    for name, neutral in NEUTRAL.items():
        if settings.get(name) not in neutral:
            return (
                f"{name} is {settings[name]!s:.60}: the sampler's logprobs would belong to another distribution than the one "
                f"that is trained; leave {name} out of training rollouts"
            )
    sampled_at = 1.0 if settings.get("temperature") is None else settings["temperature"]
    if sampled_at != temperature:
        return f"temperature is {sampled_at}, but the recipe trains at {temperature}; set algorithm.temperature"
    return None


def _segment_problem(segment: Any) -> str | None:
    try:
        ids, mask, logprobs = segment["token_ids"], segment["mask"], segment["logprobs"]
        check_tokens((ids, *mask), logprobs)
        end = 1  # there is no prediction of the first token
        for start, stop in mask:
            if not end <= start < stop <= len(ids):
                return f"a segment's mask has the span [{start}, {stop}): spans ascend within [1, {len(ids)})"
            end = stop
        masked = sum(stop - start for start, stop in mask)
        if len(logprobs) != masked:
            return f"a segment has {len(logprobs)} logprobs for {masked} sampled tokens"
        if not all(len(span) == 3 for span in segment["policy_version"]):
            return "a segment's policy_version must be spans [start, end, version]"
    except (KeyError, TypeError, ValueError) as error:
        return f"a segment is malformed (token_ids, mask, logprobs, policy_version): {type(error).__name__} {error}"
    return None


def _experts_problem(segment: Json, routers: Routers) -> str | None:
    """The reason why the routing of a segment cannot be replayed."""
    if not segment["mask"]:
        return None
    if ROUTED_EXPERTS not in segment:
        return (
            "a segment has no routed_experts, which algorithm.routing_replay needs: let the model server record them "
            "(models/vllm: engine.enable_return_routed_experts, models/transformers: routed_experts)"
        )
    try:
        rows = ExpertRows.read(segment[ROUTED_EXPERTS], len(segment["token_ids"]))
    except ValueError as error:
        return f"a segment's {error}"
    if (rows.layers, rows.chosen) != (routers.layers, routers.chosen):
        return (
            f"a segment has {rows.chosen} experts of each of {rows.layers} layers, and the policy has {routers.chosen} of "
            f"{routers.layers}: another model sampled it"
        )
    needed = segment["mask"][-1][1] - 1  # the last token is predicted, and computes nothing
    if rows.rows < needed:
        return f"a segment has routed_experts of {rows.rows:,} tokens, and {needed:,} are needed"
    if (largest := int(np.frombuffer(rows.raw, rows.dtype).max(initial=0))) >= routers.experts:
        return f"a segment has the expert {largest}, and the policy has {routers.experts}"
    return None


def _rollout(row: Json, fields: frozenset[str], images: Images, routers: Routers | None) -> RolloutSample:
    trace = row["ng"]
    segments = tuple(
        _sampled_segment(segment, placed, images, routers)
        for segment, placed in zip(trace.get("segments") or (), _segment_images(row, images), strict=True)
        if segment["mask"]
    )
    return RolloutSample(
        segments=segments,
        group=f"{trace.get('task_id')} {row.get('_ng_task_index')}",
        reward=float(row["reward"]),
        components=trace.get("reward_components") or {},
        truncated=trace.get("status") == "truncated",
        turns=trace.get("turns") or 0,
        tool_calls=trace.get("tool_calls") or 0,
        tool_errors=trace.get("tool_errors") or 0,
        id=trace.get("rollout_id") or "",
        agent=agent_name(row) or "",
        task={name: task_field(row, name) or "" for name in fields},
    )


def _sampled_segment(
    segment: Json, placed: tuple[PlacedImage, ...], images: Images, routers: Routers | None
) -> SampledSegment:
    """A segment of a row. It ends with a placeholder that the policy sampled: the network would read the next ids with
    an image there.
    """
    ids, spans, logprobs = segment["token_ids"], [(start, end) for start, end in segment["mask"]], segment["logprobs"]
    if not isinstance(images, str):
        inside = (place for start, end in spans for place in range(start, end))
        if (last := next((place for place in inside if ids[place] == images.token_id), None)) is not None:
            ids = ids[: last + 1]
            spans = [(start, min(end, len(ids))) for start, end in spans if start < len(ids)]
            logprobs = logprobs[: sum(end - start for start, end in spans)]
            placed = tuple(image for image in placed if image.places[-1] < last)
    experts = None if routers is None else ExpertRows.read(segment[ROUTED_EXPERTS], len(segment["token_ids"]))
    return SampledSegment(ids, spans, placed, experts, sampler=logprobs)


def with_values(rollouts: Sequence[RolloutSample], name: str, values: Sequence[Sequence[Any]]) -> list[RolloutSample]:
    """The rollouts with this field of their segments. values: by rollout and segment."""
    fields_by_rollout: list[list[dict[str, Any]]] = [[{name: value} for value in of_segments] for of_segments in values]
    return [
        replace(
            rollout,
            segments=tuple(replace(segment, **field) for segment, field in zip(rollout.segments, fields, strict=True)),
        )
        for rollout, fields in zip(rollouts, fields_by_rollout, strict=True)
    ]


def group_by_task(rollouts: Iterable[RolloutSample]) -> list[list[RolloutSample]]:
    """The rollouts grouped by task, in the order of each task's first."""
    groups: dict[str, list[RolloutSample]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout)
    return list(groups.values())


def rollout_metrics(result: ReadRollouts) -> dict[str, float]:
    """Metrics of the collected rollouts."""
    rollouts = result.rollouts
    counts: dict[str, float] = {
        "num_unscored": result.unscored,
        "frac_unscored": result.unscored / max(1, result.unscored + len(rollouts)),
        "num_failed": result.failed,
        "num_valid_samples": len(rollouts),
    }
    if not rollouts:
        return counts
    groups = group_by_task(rollouts)
    rewards = [rollout.reward for rollout in rollouts]
    lengths = [rollout.trained for rollout in rollouts]
    equal = [all_equal([rollout.reward for rollout in group]) for group in groups]
    logprobs = [logprob for rollout in rollouts for segment in rollout.segments for logprob in segment.sampler]
    parts: dict[str, list[float]] = {}
    for name, value in (component for rollout in rollouts for component in rollout.components.items()):
        parts.setdefault(name, []).append(value)
    return {
        **counts,
        **{f"reward_component/{name}": fmean(values) for name, values in parts.items()},
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        "frac_reward_zero_std": fmean(equal),
        "completions/mean_length": fmean(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": fmean(rollout.truncated for rollout in rollouts),
        "num_turns": fmean(rollout.turns for rollout in rollouts),
        "tool_calls": fmean(rollout.tool_calls for rollout in rollouts),
        "tool_errors": fmean(rollout.tool_errors for rollout in rollouts),
        # on average over sampled tokens, -log p is the entropy
        "approx_entropy": -fmean(logprobs) if logprobs else 0.0,
    }
