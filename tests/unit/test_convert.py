"""The converter between the two APIs keeps everything that models and callers wrote."""

from typing import Any

import pytest
from chat_cases import TOOL, broken, completion, conversations, turns
from hypothesis import given, settings
from hypothesis import strategies as st

from ngym.convert import (
    chat_chunks,
    chat_from_response,
    chat_request,
    check_chat_request,
    check_create_params,
    create_params,
    finish_reason,
    items_from_messages,
    join_think,
    messages_from_items,
    overflow_response,
    response_events,
    response_from_chat,
    split_think,
    usage_from_chat,
    usage_to_chat,
    without_allowed_tools,
)
from ngym.errors import BadRequest, UpstreamError
from ngym.peer_answers import is_context_overflow
from ngym.schema import TOKEN_FIELDS, Json

USER = {"role": "user", "content": "hi"}


def assistant_message(text: str) -> Json:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def call(call_id: str, name: str = "add", arguments: str = "{}") -> Json:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def output(call_id: str, text: str = "ok") -> Json:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def reasoning_item(text: str) -> Json:
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


# ---------------------------------------------------------------- think tags

PIECES = st.sampled_from(["<think>", "</think>", "\n", " ", "\n\n", "a", "`<think>`", "x y", "\r\n", "\u00a0", "é"])
TAGGED = st.lists(PIECES, max_size=12).map("".join) | st.text(max_size=30)


@given(TAGGED)
def test_every_byte_around_think_tags_survives(content: str) -> None:
    assert join_think(*split_think(content)) == content
    answer = completion({"content": content})
    response = response_from_chat(answer, {}, style="tags")
    assert messages_from_items(response["output"], style="tags") == [{"role": "assistant", "content": content or ""}]


@pytest.mark.parametrize(
    ("content", "reasoning", "text"),
    [
        ("<think>\nso\n</think>\n\n4", ["\nso\n"], "\n\n4"),
        ("<think>a</think> <think>b</think>c", ["a", "b"], "c"),
        ("<think>cut off", ["cut off"], ""),
        ("opened by the template</think>4", ["opened by the template"], "4"),
        ("<think>a<think>b</think>c</think>d", ["a<think>b"], "c</think>d"),
        ("use `<think>` in code", [], "use `<think>` in code"),
        ("<thinking>no</thinking>", [], "<thinking>no</thinking>"),
        ("<think></think>", [""], ""),
        ("", [], ""),
    ],
)
def test_only_leading_reasoning_is_reasoning(content: str, reasoning: list[str], text: str) -> None:
    split = split_think(content)
    assert [block.text for block in split.blocks] == reasoning
    assert split.text == text


def test_tags_stay_text_where_the_back_end_parses_reasoning_itself() -> None:
    response = response_from_chat(completion({"content": "<think>a</think>b"}), {})
    assert [item["type"] for item in response["output"]] == ["message"]
    assert response["output"][0]["content"][0]["text"] == "<think>a</think>b"


# ---------------------------------------------------------------- round trips


@given(conversations())
def test_messages_survive_the_way_to_items_and_back(messages: list[Json]) -> None:
    assert messages_from_items(items_from_messages(messages), tokens=True) == messages


@given(conversations())
def test_items_survive_the_way_to_messages_and_back(messages: list[Json]) -> None:
    items = items_from_messages(messages)
    assert items_from_messages(messages_from_items(items, tokens=True)) == items


@given(st.permutations(["a", "b", "c", "d"]))
def test_outputs_that_arrive_out_of_order_are_put_in_the_order_of_their_calls(order: list[str]) -> None:
    items = [USER, *map(call, "abcd"), *(output(one, f"for {one}") for one in order)]
    messages = messages_from_items(items)
    assert [one["id"] for one in messages[1]["tool_calls"]] == list("abcd")
    assert [(m["tool_call_id"], m["content"]) for m in messages[2:]] == [(one, f"for {one}") for one in "abcd"]


def test_outputs_of_repeated_call_ids_keep_their_order() -> None:
    items = [call("a"), call("b"), call("a"), output("b", "B"), output("a", "A1"), output("a", "A2"), output("x", "?")]
    assert [m["content"] for m in messages_from_items(items)[1:]] == ["A1", "B", "A2", "?"]


def test_sequential_calls_stay_sequential() -> None:
    roles = [m["role"] for m in messages_from_items([call("a"), output("a"), call("b"), output("b")])]
    assert roles == ["assistant", "tool", "assistant", "tool"]


def test_a_run_of_assistant_items_is_one_message() -> None:
    (message,) = messages_from_items([reasoning_item("hm"), assistant_message("let me see"), call("a"), call("b")])
    assert message["reasoning_content"] == "hm"
    assert message["content"] == "let me see"
    assert [one["id"] for one in message["tool_calls"]] == ["a", "b"]


def test_a_second_message_starts_a_new_message_unless_calls_are_open() -> None:
    assert [m["content"] for m in messages_from_items([assistant_message("a"), assistant_message("b")])] == ["a", "b"]
    (message,) = messages_from_items([assistant_message("a"), call("c"), assistant_message("b")])
    assert [part["text"] for part in message["content"]] == ["a", "b"]


def test_interleaved_reasoning_stays_with_what_follows_it() -> None:
    messages = messages_from_items(
        [reasoning_item("1"), assistant_message("a"), reasoning_item("2"), call("c"), output("c")]
    )
    assert [(m.get("reasoning_content"), m["content"]) for m in messages] == [("1", "a"), ("2", None), (None, "ok")]


def test_an_assistant_message_without_calls_has_no_empty_list_of_them() -> None:
    assert messages_from_items([assistant_message("a")]) == [{"role": "assistant", "content": "a"}]


def test_chat_shaped_messages_among_the_items_are_understood() -> None:
    message = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "add", "arguments": "{}"}}]}
    messages = messages_from_items([USER, message, {"role": "tool", "tool_call_id": "a", "content": "3"}])
    assert [m["role"] for m in messages] == ["user", "assistant", "tool"]
    assert messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": "{}"}


def test_instructions_and_leading_system_messages_are_one_message() -> None:
    items = [
        {"role": "system", "content": "b"},
        {"role": "developer", "content": "c"},
        USER,
        {"role": "system", "content": "d"},
    ]
    messages = messages_from_items(items, "a")
    assert messages[0] == {"role": "system", "content": "a\n\nb\n\nc"}
    assert messages[2] == {"role": "system", "content": "d"}
    assert messages_from_items([USER]) == [USER]


def test_images_keep_their_detail() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "low"}
    (message,) = messages_from_items([{"role": "user", "content": [{"type": "input_text", "text": "see"}, image]}])
    assert message["content"][1] == {"type": "image_url", "image_url": {"url": image["image_url"], "detail": "low"}}
    assert items_from_messages([message])[0]["content"][1] == image


def test_videos_are_passed_on() -> None:
    url = {"type": "video_url", "video_url": {"url": "http://x/y.mp4"}}
    for video in (url["video_url"], "http://x/y.mp4"):
        item = {"role": "user", "content": [{"type": "input_video", "video_url": video}]}
        (message,) = messages_from_items([item])
        assert message["content"] == [url]
    assert items_from_messages([message])[0]["content"] == [{"type": "input_video", "video_url": "http://x/y.mp4"}]


@pytest.mark.parametrize(
    ("item", "named"),
    [
        ({"role": "user", "content": [{"type": "input_image", "image_url": ""}]}, "input[0].content[0]"),
        ({"role": "user", "content": [{"type": "input_video"}]}, "'input_video'"),
        ({"role": "system", "content": [{"type": "input_image", "image_url": "secret"}]}, "'input_image'"),
        ({"type": "function_call_output", "call_id": "a", "output": [{"type": "input_file"}]}, "'input_file'"),
        ({"type": "web_search_call", "query": "secret"}, "'web_search_call'"),
        ({"role": "critic", "content": "secret"}, "'critic'"),
    ],
)
def test_what_chat_cannot_say_is_refused_by_its_type_and_never_shown(item: Json, named: str) -> None:
    with pytest.raises(BadRequest) as caught:
        messages_from_items([item])
    assert named in caught.value.detail
    assert "secret" not in caught.value.detail


def test_parts_of_a_tools_output_stay_apart() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    message = messages_from_items([call("c"), {"type": "function_call_output", "call_id": "c", "output": parts}])[1]
    assert message["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def test_summaries_replace_reasoning_and_encrypted_reasoning_says_nothing() -> None:
    summary = [{"type": "summary_text", "text": "in short"}]
    assert (
        messages_from_items([{"type": "reasoning", "summary": summary}, assistant_message("a")])[0]["reasoning_content"]
        == "in short"
    )
    assert messages_from_items(
        [{"type": "reasoning", "summary": [], "encrypted_content": "x"}, assistant_message("a")]
    ) == [{"role": "assistant", "content": "a"}]


def test_reasoning_without_text_says_nothing() -> None:
    for item in ({"type": "reasoning", "summary": []}, {"type": "reasoning", "summary": [], "content": None}):
        assert messages_from_items([item, assistant_message("a")]) == [{"role": "assistant", "content": "a"}]


def test_a_turn_in_which_nothing_was_said_stays_a_turn() -> None:
    tokens = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-1.0]}
    items = [
        USER,
        reasoning_item("hm") | tokens,
        USER,
        {"role": "assistant", "content": []},
        {"role": "user", "content": None},
    ]
    messages = messages_from_items(items, tokens=True)
    assert messages[1] == {"role": "assistant", "content": None, "reasoning_content": "hm", **tokens}
    assert messages[3:] == [{"role": "assistant", "content": None}, {"role": "user", "content": ""}]
    assert items_from_messages(messages)[1].items() >= tokens.items()


def test_reasoning_that_the_back_end_parsed_is_kept_where_tags_were_expected() -> None:
    output = response_from_chat(completion({"content": "<think>b</think>c", "reasoning": "a"}), {}, style="tags")[
        "output"
    ]
    assert [item["content"][0]["text"] for item in output] == ["a", "b", "c"]
    assert [item["type"] for item in output] == ["reasoning", "reasoning", "message"]


def test_what_only_our_own_servers_understand_stays_home_unless_asked_for() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA"}
    failed = {"type": "function_call_output", "call_id": "c", "output": [image], "ng": {"is_error": True}}
    items = [reasoning_item("hm") | {"encrypted_content": "sig"}, call("c"), failed]
    answer, result = messages_from_items(items, tokens=True)
    assert answer["thinking_blocks"] == [{"type": "thinking", "thinking": "hm", "signature": "sig"}]
    assert result["is_error"]
    assert items_from_messages([answer, result])[0]["encrypted_content"] == "sig"
    with pytest.raises(BadRequest, match="'input_image' is not supported here"):
        messages_from_items(items)
    foreign = messages_from_items([*items[:2], output("c") | {"ng": {"is_error": True}}])
    assert "thinking_blocks" not in foreign[0] and "is_error" not in foreign[1]


def test_allowed_tools_can_be_said_by_the_list_of_tools() -> None:
    tools = [{"type": "function", "name": name} for name in ("add", "sub")]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "sub"}]}
    request = chat_request(check_create_params({"input": "hi", "tools": tools, "tool_choice": choice}))
    assert request["tool_choice"]["type"] == "allowed_tools"
    plain = without_allowed_tools(request)
    assert ([tool["function"]["name"] for tool in plain["tools"]], plain["tool_choice"]) == (["sub"], "required")
    assert without_allowed_tools(plain) == plain


def test_token_data_stays_with_its_turn_and_stays_home_unless_asked_for() -> None:
    tokens = {"prompt_token_ids": [], "generation_token_ids": [7], "generation_log_probs": [-1.0]}
    items = [USER, assistant_message("a") | tokens, USER, assistant_message("b")]
    messages = messages_from_items(items, tokens=True)
    assert [set(TOKEN_FIELDS) <= set(m) for m in messages] == [False, True, False, False]
    assert messages[1]["prompt_token_ids"] == []
    assert not any(set(TOKEN_FIELDS) & set(m) for m in messages_from_items(items))


# ---------------------------------------------------------------- requests


def test_a_responses_request_says_the_same_as_a_chat_request() -> None:
    params = {
        "model": "m",
        "input": "hi",
        "instructions": "be kind",
        "max_output_tokens": 9,
        "temperature": 0.5,
        "seed": 3,
        "reasoning": {"effort": "low"},
        "tools": [TOOL],
        "tool_choice": {"type": "function", "name": "add"},
        "parallel_tool_calls": False,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}, "strict": True}, "verbosity": "low"},
        "top_logprobs": 2,
    }
    request = chat_request(check_create_params(params))
    assert request == {
        "model": "m",
        "messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}],
        "max_completion_tokens": 9,
        "temperature": 0.5,
        "seed": 3,
        "reasoning_effort": "low",
        "tools": [{"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}}],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "parallel_tool_calls": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": True}},
        "verbosity": "low",
        "logprobs": True,
        "top_logprobs": 2,
    }
    back = create_params(check_chat_request(request))
    for name in params.keys() - {"input", "instructions"}:
        assert back[name] == params[name]


def test_tool_choice_means_nothing_without_tools() -> None:
    for tools in ({}, {"tools": []}):
        request = chat_request({"input": "hi", "tool_choice": "auto", "parallel_tool_calls": True, **tools})
        assert set(request) == {"messages"}
    with pytest.raises(BadRequest, match="no tools"):
        check_create_params({"input": "hi", "tool_choice": "required"})


@pytest.mark.parametrize("effort", ["minimal", "low", "medium", "high"])
def test_effort_survives(effort: str) -> None:
    assert create_params(chat_request({"input": "hi", "reasoning": {"effort": effort}}))["reasoning"] == {
        "effort": effort
    }


def test_a_row_may_ask_the_engine_in_its_metadata_but_never_over_its_own_fields() -> None:
    metadata = {"extra_body": '{"top_k": 5, "temperature": 2}', "chat_template_kwargs": '{"enable_thinking": false}'}
    request = chat_request({"input": "hi", "temperature": 1.0, "metadata": metadata})
    assert request["top_k"] == 5
    assert request["temperature"] == 1.0
    assert request["chat_template_kwargs"] == {"enable_thinking": False}
    with pytest.raises(BadRequest, match=r"metadata\.extra_body"):
        chat_request({"input": "hi", "metadata": {"extra_body": "[1]"}})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": "x", "temprature": 1}, "field 'temprature': is not known (did you mean 'temperature'?)"),
        ({}, "field 'input': is missing"),
        ({"input": 3}, "field 'input': must be a string or a list of items"),
        ({"input": "x", "temperature": "hot"}, "field 'temperature': must be a number from 0 to 2, not 'hot'"),
        ({"input": "x", "stream": "yes"}, "field 'stream': must be true or false"),
        ({"input": "x", "conversation": "conv_1"}, "field 'conversation': is not supported"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "send the item itself"),
        ({"input": [{"type": "funtion_call"}]}, "(did you mean 'function_call'?)"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "field 'input[0].arguments'"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "field 'input[0].content[0]'"),
        ({"input": [{"role": ["user"], "content": ""}]}, "field 'input[0].role'"),
        ({"input": [7]}, "field 'input[0]': must be an object, not 7"),
        ({"input": "x", "tools": [{"type": "function"}]}, "field 'tools[0].name': must name the function"),
        ({"input": "x", "metadata": {"a": 1}}, "field 'metadata'"),
        (
            {"input": [reasoning_item("a") | {"ng": {"tags": ["<think>"]}}]},
            "'input[0].ng': must be sent back as it came",
        ),
        ({"input": [reasoning_item("a") | {"encrypted_content": 1}]}, "field 'input[0].encrypted_content'"),
        ({"input": [output("a") | {"ng": 1}]}, "'input[0].ng': must be sent back as it came"),
        (
            {"input": [assistant_message("a") | {"prompt_token_ids": []}]},
            "all of them or none; there is prompt_token_ids",
        ),
        (
            {"input": [assistant_message("a") | dict(zip(TOKEN_FIELDS, ([1], [2, 3], [-1.0]), strict=True))]},
            "must be equally long",
        ),
    ],
)
def test_a_wrong_request_is_refused_with_its_field(body: Json, message: str) -> None:
    with pytest.raises(BadRequest) as caught:
        check_create_params(body)
    assert message in caught.value.detail
    assert caught.value.extra["errors"]


def test_each_wrong_field_is_named_at_once() -> None:
    with pytest.raises(BadRequest) as caught:
        check_create_params({"input": "x", "top_p": 2, "modle": "m", "store": 1})
    assert [problem["field"] for problem in caught.value.extra["errors"]] == ["top_p", "modle", "store"]


def test_null_is_the_same_as_left_out() -> None:
    assert check_create_params({"input": "x", "tools": None, "temperature": None}) == {"input": "x"}


def test_a_wrong_chat_request_is_refused_with_its_field() -> None:
    for body, named in [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [USER], "n": 0}, "n"),
        ({"messages": [USER], "functions": []}, "functions"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages[0].tool_calls[0]"),
    ]:
        with pytest.raises(BadRequest) as caught:
            check_chat_request(body)
        assert [problem["field"] for problem in caught.value.extra["errors"]] == [named]


IMAGE = {"type": "input_image", "image_url": "http://x/y.png", "detail": "low"}
SOUND_PARAMS: Json = {
    "input": [
        {"role": "system", "content": "s"},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "t"}, IMAGE, {"type": "input_file", "file_id": "f"}],
        },
        reasoning_item("hm") | {"ng": {"tags": ["<think>", ""]}},
        assistant_message("a") | {name: [] for name in TOKEN_FIELDS},
        call("c"),
        output("c"),
        {"role": "assistant", "content": None, "tool_calls": [{"id": "d", "function": {"name": "f", "arguments": ""}}]},
        {"role": "tool", "tool_call_id": "d", "content": [{"type": "text", "text": "x"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ],
    "tools": [TOOL],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
    "reasoning": {"effort": "low"},
    "metadata": {"extra_body": "{}", "chat_template_kwargs": "{}"},
    "include": ["message.output_text.logprobs"],
    "stop": ["x"],
}


@settings(max_examples=500)
@given(broken(SOUND_PARAMS), broken(chat_request(SOUND_PARAMS, tokens=True)))
def test_no_broken_body_is_answered_with_anything_but_a_result_or_a_named_reason(params: Json, request: Json) -> None:
    for body, check, convert in (
        (params, check_create_params, chat_request),
        (request, check_chat_request, create_params),
    ):
        try:
            convert(check(body))
        except BadRequest as error:
            assert error.detail


# ---------------------------------------------------------------- answers


def test_a_completion_becomes_a_response() -> None:
    tool_call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "not json"}}
    answer = completion({"content": " a\n", "reasoning": "r", "tool_calls": [tool_call]}, "tool_calls")
    response = response_from_chat(answer, {"model": "m", "temperature": 0.5, "tools": [TOOL]})
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call"]
    assert response["output"][1]["content"][0]["text"] == " a\n"
    assert response["output"][2] | {"id": ""} == call("call_1", "add", "not json") | {"id": "", "status": "completed"}
    assert (response["id"], response["object"], response["status"], response["created_at"]) == (
        "resp_7",
        "response",
        "completed",
        5,
    )
    assert (response["temperature"], response["tools"], response["top_p"]) == (0.5, [TOOL], 1)
    assert response["usage"] is None
    assert "status" not in response["output"][0]  # OpenAI refuses a reasoning item that comes back with one


@pytest.mark.parametrize(("finish", "reason"), [("length", "max_output_tokens"), ("content_filter", "content_filter")])
def test_an_answer_that_was_cut_off_is_incomplete(finish: str, reason: str) -> None:
    response = response_from_chat(completion({"content": "a"}, finish), {})
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": reason})
    assert response["output"][-1]["status"] == "incomplete"
    assert chat_from_response(response)["choices"][0]["finish_reason"] == finish


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"status": "failed", "error": {"code": "server_error", "message": "no GPU"}}, "the error 'no GPU'"),
        ({"status": "failed", "error": "no GPU"}, "the error 'no GPU'"),
        ({"status": "failed", "error": None}, "the status 'failed'"),
        ({"status": "in_progress"}, "the status 'in_progress'"),
        ({"status": "cancelled"}, "the status 'cancelled'"),
    ],
)
def test_a_response_that_is_not_an_answer_does_not_become_one(fields: Json, problem: str) -> None:
    response = response_from_chat(completion({"content": "a"}), {}) | fields
    with pytest.raises(UpstreamError, match=problem):
        chat_from_response(response)


@pytest.mark.parametrize("content", [None, ""])
def test_an_empty_answer_is_one_empty_message(content: str | None) -> None:
    (item,) = response_from_chat(completion({"content": content}), {})["output"]
    assert (item["type"], item["content"][0]["text"]) == ("message", "")


def test_call_ids_that_repeat_or_are_missing_in_an_answer_become_distinct() -> None:
    function = {"name": "add", "arguments": "{}"}
    calls = [{"id": "a", "function": function}, {"id": "a", "function": function}, {"id": "", "function": function}]
    output = response_from_chat(completion({"content": None, "tool_calls": calls}), {})["output"]
    assert output[0]["call_id"] == "a"
    assert len({item["call_id"] for item in output}) == 3
    assert all(item["call_id"] for item in output)


def test_what_is_unknown_about_usage_stays_unknown() -> None:
    usage = usage_from_chat({"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 19, "cached_tokens": 3})
    assert usage == {
        "input_tokens": 11,
        "input_tokens_details": {"cached_tokens": None},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": None},
        "total_tokens": 19,
    }
    assert usage_from_chat({"completion_tokens": 5})["total_tokens"] is None
    assert usage_from_chat({"prompt_tokens": 1, "completion_tokens": 2})["total_tokens"] == 3
    assert usage_from_chat(None) is None


COUNT = st.none() | st.integers(0, 9)


@given(
    st.none()
    | st.fixed_dictionaries(
        {f"{name}_tokens": COUNT for name in ("prompt", "completion")} | {"total_tokens": st.integers(0, 9)}
    )
)
def test_usage_survives_both_ways(usage: Json | None) -> None:
    there = usage_from_chat(usage)
    assert usage_from_chat(usage_to_chat(there)) == there


def test_tokens_of_a_back_end_go_to_the_last_item_all_or_none() -> None:
    logprobs = {"content": [{"token": "x", "logprob": -0.1}, {"token": "y", "logprob": -0.2}]}
    tool_call = {"id": "c", "function": {"name": "f", "arguments": ""}}
    answer = completion(
        {"content": "x", "tool_calls": [tool_call]},
        choice={"token_ids": [4, 5], "logprobs": logprobs},
        prompt_token_ids=[1, 2, 3],
    )
    first, last = response_from_chat(answer, {})["output"]
    assert [last[name] for name in TOKEN_FIELDS] == [[1, 2, 3], [4, 5], [-0.1, -0.2]]
    assert not set(TOKEN_FIELDS) & set(first)
    message = chat_from_response(response_from_chat(answer, {}))["choices"][0]["message"]
    assert [message[name] for name in TOKEN_FIELDS] == [[1, 2, 3], [4, 5], [-0.1, -0.2]]
    answer["choices"][0]["logprobs"] = None
    with pytest.raises(UpstreamError, match="2 token ids but 0 logprobs"):
        response_from_chat(answer, {})


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 1024 tokens. However, your prompt contains 2000 input tokens",
        "You passed 1015 input tokens and requested 10 output tokens. However, the model's context length is only 1024",
        "The decoder prompt (length 9000) is longer than the maximum model length of 8192.",
        "The engine prompt length 9 exceeds the max_model_len 8. Please reduce prompt.",
        "the request exceeds the available context size, try increasing it",
        "prompt is too long: 210000 tokens > 200000 maximum",
        "'max_tokens' is too large: 5000",
        "Your input exceeds the context window of this model.",
    ],
)
def test_a_prompt_that_does_not_fit_is_recognised(message: str) -> None:
    assert is_context_overflow(400, None, message)
    assert not is_context_overflow(500, None, message)


def test_other_errors_are_not_an_overflow() -> None:
    assert is_context_overflow(400, "context_length_exceeded", "")
    assert not is_context_overflow(400, "invalid_value", "temperature must be at most 2")
    assert not is_context_overflow(400, None, "max_tokens must be at least 1, got -5.")


@pytest.mark.parametrize(
    ("status", "details", "sampled", "finish"),
    [
        ("completed", None, 3, "tool_calls"),
        ("incomplete", {"reason": "max_output_tokens"}, 3, "length"),
        ("incomplete", {"reason": "content_filter"}, 3, "content_filter"),
        ("incomplete", None, 3, "length"),  # vLLM's own server tells no details
        ("incomplete", None, 0, "context"),
    ],
)
def test_an_incomplete_response_with_a_whole_call_calls_no_tool(
    status: str, details: Any, sampled: int, finish: str
) -> None:
    call = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": "{}"}
    response = {"id": "resp_1", "created_at": 1, "model": "m", "status": status, "incomplete_details": details}
    response |= {"output": [call], "usage": {"output_tokens": sampled}}
    completion = chat_from_response(response)
    assert completion["choices"][0]["finish_reason"] == ("length" if finish == "context" else finish)
    assert finish_reason(response) == finish_reason(completion) == finish


def test_an_overflow_is_an_incomplete_response_in_which_nothing_was_sampled() -> None:
    response = overflow_response({"input": "long"}, response_id="resp_1", model="m")
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["usage"]["output_tokens"] == 0
    assert response["usage"]["input_tokens"] is None


@pytest.mark.parametrize("finish", ["abort", "error"])
def test_an_engine_that_gave_up_is_an_error_that_may_be_retried(finish: str) -> None:
    with pytest.raises(UpstreamError) as raised:
        response_from_chat(completion({"content": "a"}, finish), {})
    assert raised.value.retryable


@given(turns().map(lambda turn: turn[0]))
def test_an_answer_survives_the_way_to_a_response_and_back(message: Json) -> None:
    ids = [one["id"] for one in message.get("tool_calls", [])]
    answer = completion(message, "tool_calls" if ids else "stop")
    back = chat_from_response(response_from_chat(answer, {}))["choices"][0]
    if len(set(ids)) == len(ids):
        assert {k: v for k, v in back["message"].items() if v is not None} == {
            k: v for k, v in message.items() if v is not None
        }
    assert back["finish_reason"] == answer["choices"][0]["finish_reason"]


# ---------------------------------------------------------------- streams


@given(turns().map(lambda turn: turn[0]))
def test_the_events_of_a_stream_add_up_to_the_response(message: Json) -> None:
    response = response_from_chat(completion(message), {})
    events = list(response_events(response))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in (events[0], events[1], events[-1])] == [
        "response.created",
        "response.in_progress",
        "response.completed",
    ]
    assert events[-1]["response"] == response
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == response["output"]
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert text == (message["content"] or "")
    added = sum(event["type"].endswith(".added") for event in events)
    assert added == sum(
        event["type"] in ("response.output_item.done", "response.content_part.done") for event in events
    )


@given(turns().map(lambda turn: turn[0]))
def test_the_chunks_of_a_stream_add_up_to_the_completion(message: Json) -> None:
    full = chat_from_response(response_from_chat(completion(message), {}))
    chunks = list(chat_chunks(full, include_usage=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas) == (message["content"] or "")
    calls = full["choices"][0]["message"].get("tool_calls", [])
    for index, one in enumerate(calls):
        pieces = [call for delta in deltas for call in delta.get("tool_calls", ()) if call["index"] == index]
        assert "".join(piece["function"]["arguments"] for piece in pieces) == one["function"]["arguments"]
        assert pieces[0]["id"] == one["id"]
    assert chunks[-2]["choices"][0]["finish_reason"] == full["choices"][0]["finish_reason"]
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], None)


@pytest.mark.parametrize("content", [[{"type": "x"}], "text", [1], 5])
def test_a_reasoning_item_whose_parts_have_no_text_is_refused_by_name(content: object) -> None:
    with pytest.raises(BadRequest, match=r"input\[0\]\.content"):
        check_create_params({"input": [{"type": "reasoning", "summary": [], "content": content}]})


def test_token_data_goes_onto_an_item_whole_or_not_at_all():
    message = {"role": "assistant", "content": "hi", "prompt_token_ids": [1], "generation_token_ids": [2]}
    answer = {"id": "chatcmpl-1", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    half = response_from_chat(answer, {})["output"][-1]
    assert not set(TOKEN_FIELDS) & half.keys()
    message["generation_log_probs"] = [-0.5]
    assert set(TOKEN_FIELDS) <= response_from_chat(answer, {})["output"][-1].keys()


def test_fields_of_vllms_chat_api_are_refused_by_name_where_the_back_end_speaks_responses():
    request = {"messages": [USER], "n": 2, "prompt_logprobs": 1}
    with pytest.raises(BadRequest, match=r"field 'n': .*models/vllm.*field 'prompt_logprobs'"):
        create_params(check_chat_request(request))
    assert create_params(check_chat_request({"messages": [USER], "n": 1}))["input"]
