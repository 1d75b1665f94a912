"""Anthropic's Messages API: requests and answers equal those of the other two APIs."""

import json
from contextlib import suppress
from copy import deepcopy
from typing import Any

import pytest
from chat_cases import TOOL, broken, completion, conversations, turns
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_cases import THINKING, all_of, answers, completion_of, expected

from ngym.convert import (
    MessageChunks,
    MessagesStream,
    chat_from_message,
    chat_from_messages_api,
    chat_from_response,
    chat_request,
    check_chat_request,
    check_create_params,
    check_messages_request,
    create_params_from_messages_api,
    items_from_messages,
    messages_api_from_chat,
    messages_api_request,
    messages_from_items,
    overflow_response,
    response_from_chat,
)
from ngym.errors import BadRequest, UpstreamError
from ngym.schema import TOKEN_FIELDS, Json

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
ADD = {"name": "add", "description": "d", "input_schema": {"type": "object"}}
WHOLE: Json = {
    "model": "m",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "be kind"}, {"type": "text", "text": "be brief", "cache_control": {}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "see"}, IMAGE]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "sig"},
                {"type": "redacted_thinking", "data": "xyz"},
                {"type": "text", "text": "let me see"},
                {"type": "tool_use", "id": "a", "name": "add", "input": {"x": 1}},
                {"type": "tool_use", "id": "b", "name": "add", "input": {"INVALID_JSON": "{x"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "b", "content": "broken", "is_error": True},
                {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "3"}]},
                {"type": "text", "text": "go on"},
            ],
        },
    ],
    "tools": [ADD],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "temperature": 0.5,
    "top_k": 5,
    "top_p": 0.9,
    "stop_sequences": ["END"],
    "metadata": {"user_id": "u"},
    "service_tier": "standard_only",
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
}


def test_a_messages_request_says_the_same_as_a_chat_request() -> None:
    calls = [
        {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}},
        {"id": "b", "type": "function", "function": {"name": "add", "arguments": "{x"}},
    ]
    blocks = [{"type": "thinking", "thinking": "hm", "signature": "sig"}, {"type": "redacted_thinking", "data": "xyz"}]
    message = {"role": "assistant", "content": "let me see", "reasoning_content": "hm", "thinking_blocks": blocks}
    content = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]
    format_ = {"name": "answer", "schema": {"type": "object"}, "strict": True}
    assert chat_from_messages_api(check_messages_request(WHOLE)) == {
        "model": "m",
        "max_completion_tokens": 9,
        "messages": [
            {"role": "system", "content": "be kind\n\nbe brief"},
            {"role": "user", "content": content},
            message | {"tool_calls": calls},
            {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "3"}]},
            {"role": "tool", "tool_call_id": "b", "content": "broken", "is_error": True},
            {"role": "user", "content": [{"type": "text", "text": "go on"}]},
        ],
        "tools": [{"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"} | {"strict": False}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0.5,
        "top_k": 5,
        "top_p": 0.9,
        "stop": ["END"],
        "user": "u",
        "service_tier": "default",
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": format_},
    }


def test_a_messages_request_survives_the_way_through_chat() -> None:
    there = messages_api_request(check_chat_request(chat_from_messages_api(WHOLE)), max_tokens=1)
    expected_request = deepcopy(WHOLE)
    expected_request["system"] = "be kind\n\nbe brief"
    results = expected_request["messages"].pop()["content"]
    first, second = results[1], {k: v for k, v in results[0].items()}
    expected_request["messages"] += [
        {"role": "user", "content": [first, second]},
        {"role": "user", "content": [{"type": "text", "text": "go on"}]},
    ]
    assert there == expected_request


@pytest.mark.parametrize(
    ("choice", "expected_fields"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "add"}, {"tool_choice": {"type": "function", "function": {"name": "add"}}}),
        ({"type": "auto", "disable_parallel_tool_use": True}, {"tool_choice": "auto", "parallel_tool_calls": False}),
    ],
)
def test_each_way_to_choose_a_tool_survives(choice: Json, expected_fields: Json) -> None:
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": "hi"}], "tools": [ADD], "tool_choice": choice}
    request = chat_from_messages_api(check_messages_request(body))
    assert {k: request[k] for k in ("tool_choice", "parallel_tool_calls") if k in request} == expected_fields
    assert messages_api_request(request, max_tokens=1) == body


def test_thinking_that_is_switched_off_is_switched_off_for_every_model() -> None:
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": "hi"}], "thinking": {"type": "disabled"}}
    request = chat_from_messages_api(check_messages_request(body))
    assert request["reasoning_effort"] == "none"
    assert messages_api_request(request, max_tokens=1) == body


# ---------------------------------------------------------------- round trips


SAID = st.text("ab \n<é", min_size=1, max_size=6)
INPUTS = st.dictionaries(st.sampled_from(["x", "é"]), st.integers(0, 9) | SAID | st.lists(st.booleans()), max_size=2)
OUTPUTS = SAID | st.lists(st.builds(lambda text: {"type": "text", "text": text}, SAID) | st.just(IMAGE), min_size=1)


@st.composite
def turns_of_anthropic(draw: st.DrawFn, number: int) -> list[Json]:
    """A user's message, the model's, and what its tools gave, as Anthropic's clients write them."""
    text_blocks = [{"type": "text", "text": draw(SAID)}] if draw(st.booleans()) else []
    blocks = draw(st.just([]) | THINKING) + text_blocks
    calls = draw(st.integers(0 if blocks else 1, 3))
    ids = [f"call_{number}_{index}" for index in range(calls)]
    blocks += [{"type": "tool_use", "id": one, "name": "add", "input": draw(INPUTS)} for one in ids]
    results = [{"type": "tool_result", "tool_use_id": one, "content": draw(OUTPUTS)} for one in ids]
    for result in results:
        result |= {"is_error": True} if draw(st.booleans()) else {}
    messages = [{"role": "user", "content": draw(OUTPUTS)}, {"role": "assistant", "content": blocks}]
    return messages + ([{"role": "user", "content": results}] if results else [])


@st.composite
def bodies_of_anthropic(draw: st.DrawFn) -> Json:
    turns_said = [draw(turns_of_anthropic(number)) for number in range(draw(st.integers(0, 3)))]
    messages = [message for turn in turns_said for message in turn]
    system = {"system": draw(SAID)} if draw(st.booleans()) else {}
    return {"max_tokens": 3, **system, "messages": [*messages, {"role": "user", "content": draw(SAID)}]}


@given(bodies_of_anthropic())
def test_a_conversation_of_anthropics_survives_the_way_through_chat(body: Json) -> None:
    assert messages_api_request(chat_from_messages_api(check_messages_request(body)), max_tokens=1) == body


@given(bodies_of_anthropic())
def test_a_conversation_of_anthropics_survives_the_way_through_items(body: Json) -> None:
    params = create_params_from_messages_api(body)
    check_create_params(params)
    assert messages_api_request(chat_request(params, tokens=True), max_tokens=1) == body


def keep_signed(messages: list[Json]) -> list[Json]:
    """Only signed reasoning goes to Anthropic; the turns of `conversations` are not signed."""
    dropped = ("reasoning_content", *TOKEN_FIELDS)
    return [{k: v for k, v in message.items() if k not in dropped} for message in messages]


@given(conversations())
def test_a_conversation_survives_the_way_to_anthropic_and_back(messages: list[Json]) -> None:
    messages = [m for m in keep_signed(messages) if m["role"] != "assistant" or m.get("content") or m.get("tool_calls")]
    back = chat_from_messages_api(messages_api_request({"messages": messages}, max_tokens=1))["messages"]
    expected_messages = messages_from_items(items_from_messages(messages))  # outputs in the order of their calls
    assert [arguments_read(m | {"content": text_of(m)}) for m in back] == [arguments_read(m) for m in expected_messages]


def text_of(message: Json) -> Any:
    """Anthropic has blocks where there was text."""
    content = message["content"]
    if message["role"] != "assistant" or not isinstance(content, list):
        return content
    return "".join(part["text"] for part in content)


def arguments_read(message: Json) -> Json:
    """Anthropic's servers say arguments as an object: their whitespace is gone, an empty text is an empty object."""
    calls = deepcopy(message.get("tool_calls", []))
    for call in calls:
        with suppress(ValueError):
            read = json.loads(call["function"]["arguments"] or "{}")
            call["function"]["arguments"] = read.get("INVALID_JSON", read) if isinstance(read, dict) else str(read)
    return message | {"tool_calls": calls}


@given(turns().map(lambda turn: turn[0]), st.none() | THINKING)
def test_an_answer_that_comes_back_is_the_answer_that_was_given(message: Json, blocks: list[Json] | None) -> None:
    if blocks:
        message["thinking_blocks"] = blocks
    answer = messages_api_from_chat(completion(message))
    request = check_messages_request(json.loads(json.dumps(_next(answer["content"]))))
    back = chat_from_messages_api(request)["messages"][1]
    again = chat_from_response(response_from_chat(completion(message), {}))["choices"][0]["message"]
    empty = (None, "")  # an answer in which nothing was said is an empty block
    assert {k: v for k, v in back.items() if v not in empty} == {k: v for k, v in again.items() if v not in empty}


def _next(content: list[Json]) -> Json:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]
    return {"max_tokens": 1, "messages": [*messages, {"role": "user", "content": "go on"}]}


def test_reasoning_in_tags_comes_back_byte_for_byte() -> None:
    content = "\n<think> a </think>\n\n<think>b</think>\n4"
    answer = messages_api_from_chat(completion({"content": content}), style="tags")
    assert [block["type"] for block in answer["content"]] == ["thinking", "thinking", "text"]
    request = chat_from_messages_api(check_messages_request(_next(answer["content"])), style="tags")
    assert request["messages"][1] == {"role": "assistant", "content": content}


def test_token_data_is_on_the_last_block_and_comes_back_with_it() -> None:
    tokens = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-0.5]}
    answer = messages_api_from_chat(completion({"content": "a", **tokens}, ng={"policy_version": [3]}))
    assert answer["content"][-1].items() >= tokens.items()
    assert answer["ng"] == {"policy_version": [3]}
    assert (
        chat_from_messages_api(check_messages_request(_next(answer["content"])))["messages"][1].items()
        >= tokens.items()
    )


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize(
    ("finish", "more", "reason"),
    [
        ("stop", {}, "end_turn"),
        ("length", {}, "max_tokens"),
        ("content_filter", {}, "refusal"),
        ("stop", {"stop_reason": "END"}, "stop_sequence"),
        ("stop", {"stop_reason": 151645}, "end_turn"),
        ("tool_calls", {}, "tool_use"),
    ],
)
def test_why_the_model_stopped_is_reported(finish: str, more: Json, reason: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    message = {"content": "a"} | ({"tool_calls": [call]} if finish == "tool_calls" else {})
    answer = messages_api_from_chat(completion(message, finish, choice=more))
    assert answer["stop_reason"] == reason
    assert answer["stop_sequence"] == ("END" if reason == "stop_sequence" else None)
    assert chat_from_message(answer)["choices"][0]["finish_reason"] == finish


SERVER_TOOL: Json = {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {}}


@pytest.mark.parametrize(
    ("change", "detail", "retryable"),
    [
        ({"stop_reason": None}, "without a stop_reason", True),
        ({"stop_reason": "pause_turn"}, "stopped with 'pause_turn': a paused turn: server tools", False),
        ({"stop_reason": "new_one"}, "stopped with 'new_one': not the end of an answer", False),
        ({"content": [SERVER_TOOL]}, "a block 'server_tool_use': server tools, which Anthropic runs itself", False),
    ],
)
def test_an_answer_of_anthropic_that_is_not_finished_is_an_error(change: Json, detail: str, retryable: bool) -> None:
    answer = messages_api_from_chat(completion({"content": "a"}))
    message = {**answer, "usage": {"input_tokens": 1, "output_tokens": 1}, **change}
    events = [{"type": "message_start", "message": {**message, "content": [], "stop_reason": None}}]
    for index, block in enumerate(message["content"]):
        events.append({"type": "content_block_start", "index": index, "content_block": block})
        events.append({"type": "content_block_stop", "index": index})
    ended = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    events += [{"type": "message_delta", "delta": ended, "usage": {"output_tokens": 1}}, {"type": "message_stop"}]

    def read_stream() -> None:
        converter = MessageChunks()
        for event in events:
            list(converter.take(event))

    for convert in (lambda: chat_from_message(message), read_stream):
        with pytest.raises(UpstreamError, match=detail) as error:
            convert()
        assert (error.value.retryable, error.value.failure) == (retryable, "model_error")


def test_a_prompt_that_does_not_fit_is_reported_as_by_anthropic() -> None:
    response = overflow_response({"input": "long"}, response_id="resp_1", model="m")
    answer = messages_api_from_chat(chat_from_response(response))
    assert answer["stop_reason"] == "model_context_window_exceeded"
    assert answer["content"] == [{"type": "text", "text": "", "citations": None}]


def test_the_cached_part_of_the_input_is_counted_apart() -> None:
    usage = {
        "prompt_tokens": 10,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 4},
        "total_tokens": 12,
    }
    answer = messages_api_from_chat(completion({"content": "a"}, usage=usage))
    assert (answer["usage"]["input_tokens"], answer["usage"]["cache_read_input_tokens"]) == (6, 4)
    back = chat_from_message(answer)["usage"]
    assert (back["prompt_tokens"], back["prompt_tokens_details"]["cached_tokens"], back["total_tokens"]) == (10, 4, 12)
    unknown = messages_api_from_chat(completion({"content": "a"}))["usage"]
    assert set(unknown.values()) == {None}


@pytest.mark.parametrize(
    "arguments", ["", "{}", "no json", "[1]", '{"a": NaN}', '{"a":1}', '{"a": 1.0, "a": 2}', "{" * 9000]
)
def test_arguments_come_back_as_the_model_wrote_them(arguments: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": arguments}}
    answer = messages_api_from_chat(completion({"content": None, "tool_calls": [call]}))
    assert isinstance(answer["content"][0]["input"], dict)
    result = {"type": "tool_result", "tool_use_id": "a", "content": "ok"}
    body = {"max_tokens": 1, "messages": [{"role": "assistant", "content": answer["content"]}]}
    body["messages"].append({"role": "user", "content": [result]})
    assert chat_from_messages_api(check_messages_request(body))["messages"][0]["tool_calls"] == [call]


@given(answers())
def test_anthropics_stream_as_chunks_adds_up_to_its_answer_as_a_completion(
    answer: tuple[Any, Json, list[Json]],
) -> None:
    style, full, chunks = answer
    events = all_of(MessagesStream(style=style), chunks)
    for event in events:
        event.pop("ng", None)
    began = events[0]["message"]["usage"]
    assert all(isinstance(began[name], int) for name in ("input_tokens", "output_tokens")), "clients require them"
    began |= {name: None for name in ("input_tokens", "output_tokens") if began[name] == 0}  # not known yet
    message = messages_api_from_chat({k: v for k, v in full.items() if k != "ng"}, style=style)
    streamed = completion_of(all_of(MessageChunks(), events))
    whole_answer = expected(chat_from_message(message))
    assert arguments_read(streamed["message"]) == arguments_read(whole_answer["message"])
    assert {**streamed, "message": 0, "created": 0} == {**whole_answer, "message": 0, "created": 0}


# ---------------------------------------------------------------- requests that are wrong


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": None}, "field 'max_tokens': is missing"),
        ({"messages": []}, "field 'messages': is missing"),
        ({"tool_choice": {"type": "tool", "name": "sub"}}, "field 'tool_choice': there is no tool 'sub'"),
        ({"messages": None}, "field 'messages': is missing"),
        ({"max_token": 3}, "field 'max_token': is not known (did you mean 'max_tokens'?)"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "field 'context_management': is not supported, except clear_thinking",
        ),
        ({"container": "x"}, "field 'container': is not supported: no code is run here; declare a tool"),
        ({"tool_choice": {"type": "required"}}, "field 'tool_choice': must be {'type': 'auto'}"),
        ({"tools": [], "tool_choice": {"type": "any"}}, "asks for a tool call, but there are no tools"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "is run by Anthropic"),
        ({"thinking": {"type": "enabled"}}, "field 'thinking': must be {'type': 'enabled', 'budget_tokens': ...}"),
        ({"output_config": {"efort": "low"}}, "has no member 'efort' (did you mean 'effort'?)"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "field 'messages[0].content[0]'"),
        ({"messages": [{"role": "user", "content": [{"type": "txt"}]}]}, "(did you mean 'text'?)"),
        ({"messages": [{"role": "assistant", "content": "Sure,"}]}, "end with a user message"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": "", "ng": {"tags": 1}}]}]},
            "field 'messages[0].content[0].ng': must be sent back as it came",
        ),
        ({"messages": [{"role": "tool", "content": ""}]}, "field 'messages[0]'"),
    ],
)
def test_a_wrong_messages_request_is_refused_with_its_field(change: Json, message: str) -> None:
    with pytest.raises(BadRequest) as caught:
        check_messages_request(WHOLE | change)
    assert message in caught.value.detail


@settings(max_examples=300)
@given(broken(WHOLE))
def test_no_broken_messages_request_is_answered_with_anything_but_a_result_or_a_named_reason(body: Json) -> None:
    try:
        create_params_from_messages_api(check_messages_request(body))
        chat_from_messages_api(check_messages_request(body))
    except BadRequest as error:
        assert error.detail


@settings(max_examples=300)
@given(broken(chat_from_messages_api(WHOLE)))
def test_what_anthropic_does_not_have_is_refused_by_name(request: Json) -> None:
    try:
        messages_api_request(check_chat_request(request), max_tokens=1)
    except BadRequest as error:
        assert error.detail


@pytest.mark.parametrize(
    ("field", "value"), [("seed", 1), ("logprobs", True), ("min_p", 0.1), ("frequency_penalty", 1)]
)
def test_a_field_that_anthropic_lacks_is_named(field: str, value: Any) -> None:
    with pytest.raises(BadRequest, match=field):
        messages_api_request({"messages": [{"role": "user", "content": "hi"}], field: value}, max_tokens=1)


def test_a_value_that_changes_nothing_is_not_refused() -> None:
    request = {"messages": [{"role": "user", "content": "hi"}], "frequency_penalty": 0, "n": 1, "logprobs": False}
    assert messages_api_request(request, max_tokens=1) == {"max_tokens": 1, "messages": request["messages"]}


def test_a_turn_in_which_nothing_was_said_is_left_out_because_anthropic_refuses_it() -> None:
    user, silent = {"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "reasoning_content": "hm"}
    assert messages_api_request({"messages": [user, silent, user]}, max_tokens=1)["messages"] == [user, user]


def test_documents_of_a_message_survive_the_way_to_a_back_end_and_back() -> None:
    text = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "hi"}}
    pdf = {"type": "base64", "media_type": "application/pdf", "data": "aGk="}
    file = {"type": "document", "title": "a.pdf", "source": pdf}
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": [text, file]}]}
    (item,) = create_params_from_messages_api(body)["input"]
    assert item["content"] == [
        {"type": "input_text", "text": "hi"},
        {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,aGk="},
    ]
    sent = messages_api_request(chat_from_messages_api(body), max_tokens=5)
    assert sent["messages"][0]["content"] == [{"type": "text", "text": "hi"}, file]
    body["messages"][0]["content"].append({"type": "video"})
    with pytest.raises(BadRequest, match=r"messages\[0\].content\[2\]': a block of type 'video'"):
        create_params_from_messages_api(body)
