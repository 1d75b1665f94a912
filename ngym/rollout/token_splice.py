"""Where does a conversation go on? After the very ids that the engine has seen, with what the template adds.

    seen      |<- prompt of the last call ->|<- sampled ->|
    rendered  |<- history, tokenised again ->...turn end  |<- glue, tool results, generation prompt ->|
    result    |<- seen ------------------------------------|<- the same ------------------------------>|

Tokenising a history again need not give the sampled ids back, and a template may leave out old reasoning or write a
tool call with other spaces. What the policy is trained on must be what it saw.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import takewhile
from typing import NamedTuple

Turn = tuple[int, ...]

OURS: Turn = ()
"""In the place of one or more turns in a row that the policy sampled: what they are is not compared."""


class Seen(NamedTuple):
    """The ids of an earlier call: its prompt [P] and what was sampled [G]."""

    prompt: list[int]
    sampled: list[int]


class Ends(NamedTuple):
    """The ids that end a turn: any; and those of them that end a request (`[/INST]`), where answers follow at once."""

    any: frozenset[int]
    of_requests: frozenset[int] = frozenset()


def begins_with(rendered: list[int], seen: Seen) -> bool:
    """Whether the rendering goes on from the seen ids as it is."""
    middle, end = len(seen.prompt), len(seen.prompt) + len(seen.sampled)
    return rendered[:middle] == seen.prompt and rendered[middle:end] == seen.sampled


def splice(rendered: list[int], history: list[int], seen: Seen, ends: Ends) -> list[int] | None:
    """The seen ids, then the part of `rendered` that follows the history. None where that cannot be told for certain.

    Args:
        rendered: the whole conversation, with its generation prompt.
        history: the conversation up to and including the seen answer, rendered by the same template.

    The turns are the measure: history and seen ids must have the same ones, in the same order, but for what the policy
    sampled; the rendering then goes on after as many turns as the history has.
    """
    before = _turns(history, ends.any)
    known = _turns(seen.prompt, ends.any)
    if not before:
        return None
    opening = _after_last_turn(seen.prompt, ends.any)
    header = _common(opening, before[-1])  # a template may open a thought that it leaves out of old answers
    if header != opening and (not known or _is_ours(known[-1], header, ends)):
        return None  # what begins so can be anybody's turn
    if _story(before[:-1], header, ends) != _story(known, header, ends):
        return None  # somebody edited the history: what was seen is no longer what is meant
    places = [place for place, token in enumerate(rendered) if token in ends.any]
    if len(places) < len(before):
        return None
    finished = bool(seen.sampled) and seen.sampled[-1] in ends.any
    cut = places[len(before) - 1]  # where the template ends the answer, which a finished one has done itself
    return seen.prompt + seen.sampled + rendered[cut + 1 if finished else cut :]


def _story(turns: list[Turn], header: Turn, ends: Ends) -> list[Turn]:
    """The turns, with OURS for those that the policy sampled, and after the last of them, where its answer follows."""
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
    """The finished turns, each with its end."""
    turns, start = [], 0
    for place, token in enumerate(ids):
        if token in ends:
            turns.append(tuple(ids[start : place + 1]))
            start = place + 1
    return turns


def _after_last_turn(prompt: list[int], ends: Collection[int]) -> Turn:
    """The generation prompt: with it every turn begins that the policy sampled."""
    start = max((place + 1 for place, token in enumerate(prompt) if token in ends), default=0)
    return tuple(prompt[start:])


def _common(one: Turn, other: Turn) -> Turn:
    """What both begin with."""
    return tuple(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
