"""Where does a conversation go on? After the very ids that the engine has seen, with what the template adds.

    seen      |<- prompt of the last call ->|<- sampled ->|
    rendered  |<- history, tokenised again ->...turn end  |<- glue, tool results, generation prompt ->|
    result    |<- seen ------------------------------------|<- the same ------------------------------>|

Tokenising a history again need not give the sampled ids back, and a template may leave out old reasoning or write a
tool call with other spaces. What the policy is trained on must be what it saw.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class Seen(NamedTuple):
    """The ids of an earlier call: its prompt [P] and what was sampled [G]."""

    prompt: list[int]
    sampled: list[int]


def begins_with(rendered: list[int], seen: Seen) -> bool:
    """Whether the rendering goes on from the seen ids as it is."""
    middle, end = len(seen.prompt), len(seen.prompt) + len(seen.sampled)
    return rendered[:middle] == seen.prompt and rendered[middle:end] == seen.sampled


def splice(rendered: list[int], history: list[int], seen: Seen, turn_ends: Collection[int]) -> list[int] | None:
    """The seen ids, then the part of `rendered` that follows the history. None where that cannot be told for certain.

    Args:
        rendered: the whole conversation, with its generation prompt.
        history: the conversation up to and including the seen answer, rendered by the same template.
        turn_ends: the ids that end a turn (the end-of-sequence ids of the model).

    The turns are the measure: history and seen ids must have the same turns, and the same ids in each turn that the
    policy did not sample; the rendering then goes on after as many turns.
    """
    before = _turns(history, turn_ends)
    known = _turns(seen.prompt + seen.sampled, turn_ends)
    finished = bool(seen.sampled) and seen.sampled[-1] in turn_ends
    if not finished:
        known.append(())  # the unfinished answer, which the template closes
    if not before or len(before) != len(known):
        return None
    opening = _after_last_turn(seen.prompt, turn_ends)
    for rendered_turn, known_turn in zip(before[:-1], known[:-1], strict=True):
        ours = bool(opening) and known_turn[: len(opening)] == opening
        if rendered_turn != known_turn and not ours:
            return None  # somebody edited the history: what was seen is no longer what is meant
    ends = [place for place, token in enumerate(rendered) if token in turn_ends]
    if len(ends) < len(before):
        return None
    cut = ends[len(before) - 1]
    return seen.prompt + seen.sampled + rendered[cut + 1 if finished else cut :]


def _turns(ids: list[int], turn_ends: Collection[int]) -> list[tuple[int, ...]]:
    """The finished turns, each with its end."""
    turns, start = [], 0
    for place, token in enumerate(ids):
        if token in turn_ends:
            turns.append(tuple(ids[start : place + 1]))
            start = place + 1
    return turns


def _after_last_turn(prompt: list[int], turn_ends: Collection[int]) -> tuple[int, ...]:
    """The generation prompt: with it every turn begins that the policy sampled."""
    start = max((place + 1 for place, token in enumerate(prompt) if token in turn_ends), default=0)
    return tuple(prompt[start:])
