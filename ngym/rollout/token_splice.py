"""Continues a conversation after the exact ids that the engine has seen, followed by what the template adds.

    seen      |<- prompt of the last call ->|<- sampled ->|
    rendered  |<- history, tokenised again ->...turn end  |<- glue, tool results, generation prompt ->|
    result    |<- seen ------------------------------------|<- the same ------------------------------>|

Tokenising a history again may give other ids than those sampled, and a template may leave out old reasoning or write a
tool call with other spaces. The policy must be trained on exactly the ids that it saw.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import takewhile
from typing import NamedTuple

Turn = tuple[int, ...]

OURS: Turn = ()
"""Stands for one or more consecutive turns that the policy sampled; their contents are not compared."""


class Seen(NamedTuple):
    """The ids of an earlier call: its prompt [P] and the sampled ids [G]."""

    prompt: list[int]
    sampled: list[int]


class Ends(NamedTuple):
    """any: ids that end a turn. of_requests: those that end a request (`[/INST]`), after which the answer follows."""

    any: frozenset[int]
    of_requests: frozenset[int] = frozenset()


def begins_with(rendered: list[int], seen: Seen) -> bool:
    """Whether the rendering begins with exactly the seen ids."""
    middle, end = len(seen.prompt), len(seen.prompt) + len(seen.sampled)
    return rendered[:middle] == seen.prompt and rendered[middle:end] == seen.sampled


def splice(rendered: list[int], history: list[int], seen: Seen, ends: Ends) -> list[int] | None:
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
    opening = _after_last_turn(seen.prompt, ends.any)
    header = _common(opening, before[-1])  # a template may open a reasoning block that it leaves out of old answers
    if header != opening and (not known or _is_ours(known[-1], header, ends)):
        return None  # this beginning does not identify the policy's turns
    if _story(before[:-1], header, ends) != _story(known, header, ends):
        return None  # the caller edited the history, so the seen ids no longer match it
    places = [place for place, token in enumerate(rendered) if token in ends.any]
    if len(places) < len(before):
        return None
    finished = bool(seen.sampled) and seen.sampled[-1] in ends.any
    cut = places[len(before) - 1]  # the template's end of the answer; a finished answer already has one
    return seen.prompt + seen.sampled + rendered[cut + 1 if finished else cut :]


def _story(turns: list[Turn], header: Turn, ends: Ends) -> list[Turn]:
    """The turns, with OURS in place of those that the policy sampled, and OURS at the end for its answer."""
    story: list[Turn] = []
    for turn in [*(OURS if _is_ours(turn, header, ends) else turn for turn in turns), OURS]:
        if turn != OURS or story[-1:] != [OURS]:
            story.append(turn)
    return story


def _is_ours(turn: Turn, header: Turn, ends: Ends) -> bool:
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


def _after_last_turn(prompt: list[int], ends: Collection[int]) -> Turn:
    """The generation prompt: every turn that the policy sampled begins with it."""
    start = max((place + 1 for place, token in enumerate(prompt) if token in ends), default=0)
    return tuple(prompt[start:])


def _common(one: Turn, other: Turn) -> Turn:
    """The common prefix of both."""
    return tuple(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
