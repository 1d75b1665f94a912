"""ngym.chat_codec: text from ids, reasoning and tool calls in text, whole and in pieces; prompts that continue
earlier ones."""

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stub_engines import tokenizer

from ngym import chat_codec
from ngym.chat_codec import AnswerParser, AnswerPiece, Detokenizer, Stops, Template, turn_ends
from ngym.errors import BadRequest
from ngym.schema import TOKEN_FIELDS
from ngym.services.models.token_capture import take_prior_call

TOKENS = tokenizer()
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
ADDED = AnswerPiece("call", '{"a": 2}', "add")


def answer_pieces(parts: list[str], *, in_thought: bool = False, tools: bool = True) -> list[AnswerPiece]:
    """The pieces, neighbours of one kind put together."""
    answer_parser = AnswerParser(in_thought=in_thought, tools=tools)
    result: list[AnswerPiece] = []
    for piece in [piece for part in parts for piece in answer_parser.take(part)] + list(answer_parser.end()):
        if result and piece.kind == result[-1].kind != "call":
            result[-1] = AnswerPiece(piece.kind, result[-1].text + piece.text)
        else:
            result.append(piece)
    return result


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("hello", [AnswerPiece("text", "hello")]),
        ("\n\nhello \n", [AnswerPiece("text", "\n\nhello \n")]),
        ("<think>\nhm\n</think>\n\n4", [AnswerPiece("reasoning", "\nhm\n"), AnswerPiece("text", "\n\n4")]),
        ("<think>cut off", [AnswerPiece("reasoning", "cut off")]),
        (f"<think>hm</think>\n{CALL}", [AnswerPiece("reasoning", "hm"), ADDED]),
        (f"I add.\n{CALL}\n{CALL}", [AnswerPiece("text", "I add."), ADDED, ADDED]),
        (f"{CALL}\n", [ADDED]),
        ("<tool_call>{oops</tool_call>", [AnswerPiece("text", "<tool_call>{oops</tool_call>")]),
        ('<tool_call>{"name": "add"', [AnswerPiece("text", '<tool_call>{"name": "add"')]),
        (
            '<tool_call>{"name": 3, "arguments": {}}</tool_call>!',
            [AnswerPiece("text", '<tool_call>{"name": 3, "arguments": {}}</tool_call>!')],
        ),
        *(
            (text, [AnswerPiece("text", text)])
            for text in (
                '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>',
                '<tool_call>{"name": "\\udfff", "arguments": {}}</tool_call>',
                '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 5000 + "</tool_call>",
                '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 300 + "]" * 300 + "}}</tool_call>",
            )
        ),
        ("a < b <thin", [AnswerPiece("text", "a < b <thin")]),
        ("code: <think> no", [AnswerPiece("text", "code: <think> no")]),
        ("", []),
    ],
)
def test_what_a_text_is_made_of_does_not_depend_on_how_it_is_cut(text: str, pieces: list[AnswerPiece]):
    draw = random.Random(0)
    assert answer_pieces([text]) == pieces
    assert answer_pieces(list(text)) == pieces
    for _ in range(20):
        cuts = [0, *sorted(draw.randrange(len(text) + 1) for _ in range(3)), len(text)]
        assert answer_pieces([text[start:end] for start, end in pairwise(cuts)]) == pieces


def test_a_thought_that_the_template_opened_is_reasoning_from_the_start():
    assert answer_pieces(["hm", "</thi", "nk>4"], in_thought=True) == [
        AnswerPiece("reasoning", "hm"),
        AnswerPiece("text", "4"),
    ]


def test_without_tools_a_call_is_text():
    assert answer_pieces([CALL, " "], tools=False) == [AnswerPiece("text", CALL + " ")]


@given(st.text(), st.integers(0, 5))
def test_text_is_sent_in_whole_characters_and_completely(text: str, step: int):
    ids = TOKENS.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(TOKENS)
    parts = [detokenizer.take(ids[at : at + step + 1]) for at in range(0, len(ids), step + 1)]
    assert "".join(parts) + detokenizer.end() == TOKENS.decode(ids)
    is_text = "\N{REPLACEMENT CHARACTER}" not in text
    assert not is_text or not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)


@given(st.text("abc"), st.lists(st.text("abc", min_size=1, max_size=3), max_size=3), st.integers(1, 3))
def test_nothing_is_sent_from_the_first_stop_string_on(text: str, stops: list[str], step: int):
    one = Stops(tuple(stops))
    text_sent = "".join(one.take(text[at : at + step]) for at in range(0, len(text), step)) + one.end()
    places = [text.find(stop) for stop in stops if stop in text]
    assert (one.match is not None) == bool(places)
    assert text.startswith(text_sent)
    assert text_sent == text if not places else not any(stop in text_sent for stop in stops)


def prompt(messages: list[dict[str, Any]], **more: Any) -> list[int]:
    messages = [dict(message) for message in messages]
    prior = take_prior_call(messages)
    return Template(TOKENS, turn_ends(TOKENS, 2)).prompt({"messages": messages} | more, prior)


def test_a_prompt_continues_from_the_ids_that_were_seen_though_the_template_would_write_them_again():
    user = {"role": "user", "content": "hi"}
    first = prompt([user])
    sampled = TOKENS.encode(f"<think>hm</think>\n{CALL}<|im_end|>", add_special_tokens=False)
    arguments = {"name": "add", "arguments": '{"a": 2}'}
    call = {"id": "c", "type": "function", "function": arguments}
    answer = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]}
    tool = {"role": "tool", "tool_call_id": "c", "content": "5"}
    anew = prompt([user, answer, tool])
    tokens = dict(zip(TOKEN_FIELDS, (first, sampled, [0.0] * len(sampled)), strict=True))
    spliced = prompt([user, answer | tokens, tool])
    assert spliced[: len(first) + len(sampled)] == first + sampled
    assert anew[: len(first) + len(sampled)] != first + sampled
    rest = TOKENS.decode(spliced[len(first) + len(sampled) :])
    assert rest == "\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"
    edited = [{"role": "user", "content": "something else"}, answer | tokens, tool]
    assert prompt(edited) == prompt([edited[0], answer, tool])


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"tool_choice": "required"}, "field 'tool_choice': this back end cannot force a call"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "text only"),
        ({"chat_template_kwargs": {"chat_template": "{{ messages }}"}}, "chat_template is not supported"),
    ],
)
def test_what_a_template_cannot_say_is_refused(request_: dict[str, Any], message: str):
    with pytest.raises(BadRequest, match=message):
        prompt(request_.pop("messages", [{"role": "user", "content": "hi"}]), **request_)


def test_what_a_template_refuses_is_the_callers_fault():
    broken = tokenizer()
    broken.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(BadRequest, match="chat template refuses the conversation: roles must alternate"):
        Template(broken, turn_ends(broken, 2)).prompt({"messages": [{"role": "user", "content": "hi"}]}, None)


def test_equal_conversations_are_rendered_once_and_others_are_not_mixed_up(monkeypatch: pytest.MonkeyPatch):
    """A group of rollouts asks with the same prompt."""
    template_tokenizer, rendered = tokenizer(), []
    render = template_tokenizer.apply_chat_template
    monkeypatch.setattr(
        template_tokenizer, "apply_chat_template", lambda *args, **more: rendered.append(1) or render(*args, **more)
    )
    template = Template(template_tokenizer, turn_ends(template_tokenizer, 2))
    monkeypatch.setattr(chat_codec.time, "time", lambda: 600.0)
    hi, bye = ({"messages": [{"role": "user", "content": word}]} for word in ("hi", "bye"))
    first = template.prompt(hi, None)
    assert first == prompt(hi["messages"])
    expected = list(first)
    first.append(7)  # a caller's list is its own
    assert template.prompt(hi, None) == expected and len(rendered) == 1
    assert template.prompt(bye, None) == prompt(bye["messages"]) and len(rendered) == 2
    assert template.prompt(hi | {"chat_template_kwargs": {"x": 1}}, None) == expected and len(rendered) == 3
    assert template.whole(hi) == expected[: len(template.whole(hi))] and len(rendered) == 4
    monkeypatch.setattr(chat_codec.time, "time", lambda: 660.0)  # a template may write the time
    assert template.prompt(hi, None) == expected and len(rendered) == 5
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": f'{{"a": {2**70}}}'}}
    large = {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}
    assert template.prompt(large, None) == template.prompt(large, None) and len(rendered) == 7
