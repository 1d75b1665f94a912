"""A conversation continues after the ids that the engine has seen; if they are unknown, it is rendered again."""

from __future__ import annotations

import pytest

from ngym.rollout import PriorTokens, TurnEnds, splice

END, ASKED = 9, 5
ENDS = TurnEnds(frozenset({END}))
SYSTEM, HELLO, OPENING = [1, 2, END], [3, 4, END], [7, 8]


def test_the_seen_ids_are_kept_and_what_the_template_adds_follows_them() -> None:
    prior = PriorTokens(SYSTEM + HELLO + OPENING, [50, 51, END])
    history = SYSTEM + HELLO + OPENING + [60, END]  # the same text in another spelling
    rendered = [*history, 0, 30, END, *OPENING]
    assert splice(rendered, history, prior, ENDS) == [*prior.prompt, *prior.sampled, 0, 30, END, *OPENING]


def test_an_answer_that_was_cut_off_is_closed_as_the_template_closes_it() -> None:
    prior = PriorTokens(SYSTEM + HELLO + OPENING, [50, 51])
    history = SYSTEM + HELLO + OPENING + [60, END]
    assert splice([*history, 0, *OPENING], history, prior, ENDS) == [*prior.prompt, 50, 51, END, 0, *OPENING]


def test_a_template_may_leave_out_old_reasoning() -> None:
    thought = [*OPENING, 40, 41, 60, END]
    prior = PriorTokens(SYSTEM + HELLO + thought + HELLO + OPENING, [40, 61, END])
    history = SYSTEM + HELLO + [*OPENING, 60, END] + HELLO + [*OPENING, 40, 61, END]
    rendered = SYSTEM + HELLO + [*OPENING, 60, END] + HELLO + [*OPENING, 61, END] + HELLO + OPENING
    assert splice(rendered, history, prior, ENDS) == [*prior.prompt, *prior.sampled, *HELLO, *OPENING]


def test_a_template_may_open_a_thought_for_a_new_answer_only() -> None:
    prior = PriorTokens([*SYSTEM, *HELLO, *OPENING, 40], [41, 60, END])
    history = SYSTEM + HELLO + [*OPENING, 60, END]
    assert splice([*history, *HELLO, *OPENING, 40], history, prior, ENDS) == [
        *prior.prompt, *prior.sampled, *HELLO, *OPENING, 40,
    ]  # fmt: skip


def test_an_answer_may_be_written_as_several_turns_of_which_a_template_leaves_some_out() -> None:
    """So harmony: reasoning and answer each with an end, and old reasoning left out."""
    prior = PriorTokens(SYSTEM + HELLO + OPENING, [40, 41, END, *OPENING, 50, END])
    history = SYSTEM + HELLO + [*OPENING, 50, END]
    rendered = [*history, *HELLO, *OPENING]
    assert splice(rendered, history, prior, ENDS) == [*prior.prompt, *prior.sampled, *HELLO, *OPENING]
    again = PriorTokens([*prior.prompt, *prior.sampled, *HELLO, *OPENING], [42, END, *OPENING, 51, END])
    history = [*history, *HELLO, *OPENING, 51, END]
    assert splice([*history, *HELLO, *OPENING], history, again, ENDS) == [
        *again.prompt, *again.sampled, *HELLO, *OPENING,
    ]  # fmt: skip


def test_answers_without_a_header_follow_the_end_of_a_request() -> None:
    """So Mistral: `[INST] question [/INST] answer </s>`."""
    ends = TurnEnds(frozenset({END, ASKED}), frozenset({ASKED}))
    prior = PriorTokens([1, 2, ASKED, 50, END, 3, ASKED], [51, END])
    history = [1, 2, ASKED, 60, END, 3, ASKED, 61, END]
    assert splice([*history, 4, ASKED], history, prior, ends) == [*prior.prompt, *prior.sampled, 4, ASKED]
    edited = [1, 20, *history[2:]]
    assert splice([*edited, 4, ASKED], edited, prior, ends) is None


@pytest.mark.parametrize(
    "history",
    [
        pytest.param([5, END, *HELLO, *OPENING, 60, END], id="another system prompt"),
        pytest.param([*HELLO, *OPENING, 60, END], id="a message left out"),
        pytest.param([*SYSTEM, *HELLO, *HELLO, *OPENING, 60, END], id="a message put in"),
        pytest.param([*SYSTEM, 3, 40, END, *OPENING, 60, END], id="a message edited"),
        pytest.param([*SYSTEM, 1, 2, 3], id="no turn that ends"),
    ],
)
def test_a_history_that_is_not_the_seen_one_is_never_spliced(history: list[int]) -> None:
    prior = PriorTokens(SYSTEM + HELLO + OPENING, [50, 51, END])
    assert splice([*history, *HELLO, *OPENING], history, prior, ENDS) is None


def test_what_begins_like_every_turn_shows_nothing() -> None:
    prior = PriorTokens([7, 1, END, 7, 2, END, 7, 8], [50, END])
    history = [7, 1, END, 7, 3, END, 7, 60, END]
    assert splice([*history, 7, 4, END, 7, 8], history, prior, ENDS) is None
