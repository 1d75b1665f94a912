"""Streams: the parts of an answer add up to the whole answer, for any cuts."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stream_cases import HEAD, TAGGED, all_of, answers, chunk, completion_of, cut_anywhere, expected

from ngym.convert import (
    ChunkStream,
    MessageChunks,
    MessagesStream,
    ReasoningStyle,
    ResponseStream,
    chat_from_response,
    messages_api_from_chat,
    response_events,
    response_from_chat,
    split_think,
)
from ngym.convert.reasoning import Block, Split, ThinkSplitter
from ngym.errors import UpstreamError
from ngym.schema import TOKEN_FIELDS, Json


def drop_times(response: Json) -> Json:
    return {name: value for name, value in response.items() if name != "completed_at"}


# ---------------------------------------------------------------- think tags in pieces


def split_in_pieces(pieces: list[str]) -> Split:
    splitter = ThinkSplitter()
    parts = [one for piece in pieces for one in splitter.take(piece)] + list(splitter.end())
    found: list[list[str]] = []
    for kind, text in parts:
        if kind == "think":
            found.append(["", text, ""])
        elif kind != "text":
            found[-1][0 if kind == "reasoning" else 2] += text
    return Split([Block(*block) for block in found], "".join(text for kind, text in parts if kind == "text"))


@given(TAGGED, st.data())
def test_think_tags_are_found_wherever_the_stream_was_cut(content: str, data: st.DataObject) -> None:
    assert split_in_pieces(cut_anywhere(data.draw, content)) == split_think(content)


@pytest.mark.parametrize(
    "content",
    [
        "  \n<think> one </think>\n\n<think>two</think> and then the answer </think> <think>",
        "reasoning that the template opened</think>answer",
        "an answer that mentions <think> and </think> somewhere in the middle",
        "an answer about nothing in particular",
        "<thin reasoning is no reasoning</think>and this is",
        "<think>cut off in the middle </thi",
        "        \n\n          ",
    ],
)
def test_think_tags_are_found_at_each_single_cut(content: str) -> None:
    assert split_in_pieces(list(content)) == split_think(content)
    for place in range(len(content)):
        assert split_in_pieces([content[:place], content[place:]]) == split_think(content)


def test_reasoning_streams_as_soon_as_it_is_certain() -> None:
    splitter = ThinkSplitter()
    parts = [
        [text for _, text in splitter.take(piece)] for piece in ["<thi", "nk>a", "b</", "thin", "c</think>", "\n", "d"]
    ]
    assert parts == [[], ["<think>", "a"], ["b"], [], ["</thinc", "</think>"], [], ["\nd"]]


# ---------------------------------------------------------------- chunks -> Responses events


def assemble(events: list[Json]) -> list[Json]:
    """The answer that a client assembles from the deltas alone."""
    output: list[Json] = []
    for event in events:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert event["output_index"] == len(output)
                output.append(json.loads(json.dumps(event["item"])))
            case "content_part.added":
                assert event["content_index"] == len(output[event["output_index"]]["content"])
                output[event["output_index"]]["content"].append(dict(event["part"]))
            case "output_text.delta" | "reasoning_text.delta":
                output[event["output_index"]]["content"][event["content_index"]]["text"] += event["delta"]
            case "refusal.delta":
                output[event["output_index"]]["content"][event["content_index"]]["refusal"] += event["delta"]
            case "function_call_arguments.delta":
                output[event["output_index"]]["arguments"] += event["delta"]
    return output


def drop_metadata(items: list[Json]) -> list[Json]:
    dropped = {"status", "ng", "encrypted_content", *TOKEN_FIELDS}
    return [{k: v for k, v in item.items() if k not in dropped} for item in items]


@given(answers())
def test_the_events_of_a_streamed_answer_add_up_to_the_answer(answer: tuple[ReasoningStyle, Json, list[Json]]) -> None:
    style, completion, chunks = answer
    response = response_from_chat(completion, {"model": "m"}, style=style)
    events = all_of(ResponseStream({"model": "m"}, style=style), chunks)
    assert drop_times(events[-1]["response"]) == drop_times(response)
    assert events[-1]["type"] == f"response.{response['status']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert drop_metadata(assemble(events)) == drop_metadata(response["output"])
    assert all(event["delta"] for event in events if event["type"].endswith(".delta"))
    finished = {e["output_index"]: e["item"] for e in events if e["type"] == "response.output_item.done"}
    assert [finished[index] for index in sorted(finished)] == response["output"]


@given(answers())
def test_a_streamed_answer_has_the_same_kinds_of_events_as_a_finished_one(
    answer: tuple[ReasoningStyle, Json, list[Json]],
) -> None:
    style, completion, chunks = answer
    unary = response_events(response_from_chat(completion, {}, style=style))
    streamed = all_of(ResponseStream({}, style=style), chunks)

    def kinds(events: list[Json]) -> list[str]:
        return sorted(event["type"] for event in events if not event["type"].endswith(".delta"))

    assert kinds(streamed) == kinds(list(unary))
    for event in streamed:
        assert event["type"] in _FIELDS_OF
        assert set(event) == {"type", "sequence_number", *_FIELDS_OF[event["type"]]}


_PLACE = {"item_id", "output_index"}
_FIELDS_OF = {
    "response.created": {"response"},
    "response.in_progress": {"response"},
    "response.output_item.added": {"output_index", "item"},
    "response.output_item.done": {"output_index", "item"},
    "response.content_part.added": {*_PLACE, "content_index", "part"},
    "response.content_part.done": {*_PLACE, "content_index", "part"},
    "response.output_text.delta": {*_PLACE, "content_index", "delta", "logprobs"},
    "response.output_text.done": {*_PLACE, "content_index", "text", "logprobs"},
    "response.reasoning_text.delta": {*_PLACE, "content_index", "delta"},
    "response.reasoning_text.done": {*_PLACE, "content_index", "text"},
    "response.refusal.delta": {*_PLACE, "content_index", "delta"},
    "response.refusal.done": {*_PLACE, "content_index", "refusal"},
    "response.function_call_arguments.delta": {*_PLACE, "delta"},
    "response.function_call_arguments.done": {*_PLACE, "name", "arguments"},
    "response.completed": {"response"},
    "response.incomplete": {"response"},
}


# ---------------------------------------------------------------- chunks -> Anthropic events


def message_of(events: list[Json]) -> Json:
    """The message that Anthropic's client assembles, and our own fields beside it."""
    message = json.loads(json.dumps(events[0]["message"]))
    partial: dict[int, str] = {}
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(json.loads(json.dumps(event["content_block"])))
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "signature_delta":
                        block["signature"] = delta["signature"]
                    case "input_json_delta":
                        partial[event["index"]] = partial.get(event["index"], "") + delta["partial_json"]
            case "content_block_stop":
                if event["index"] in partial:
                    message["content"][event["index"]]["input"] = json.loads(partial[event["index"]])
                message["content"][event["index"]] |= {"ng": event["ng"]} if "ng" in event else {}
            case "message_delta":
                message |= event["delta"]
                message["usage"] = event["usage"]
                message["content"][-1] |= {name: event[name] for name in TOKEN_FIELDS if name in event}
                message |= {"ng": event["ng"]} if "ng" in event else {}
    return message


@given(answers())
def test_the_events_of_a_streamed_message_add_up_to_the_message(
    answer: tuple[ReasoningStyle, Json, list[Json]],
) -> None:
    style, completion, chunks = answer
    events = all_of(MessagesStream(style=style), chunks)
    assert message_of(events) == messages_api_from_chat(completion, style=style)
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    assert "ng" not in completion or events[-2]["ng"] == completion["ng"]
    starts = [event["index"] for event in events if event["type"] == "content_block_start"]
    assert starts == [event["index"] for event in events if event["type"] == "content_block_stop"]


# ---------------------------------------------------------------- Responses events -> chunks


@given(answers(), st.booleans())
def test_the_chunks_made_of_events_add_up_to_the_completion(
    answer: tuple[ReasoningStyle, Json, list[Json]], synthetic: bool
) -> None:
    style, _, chunks = answer
    events = all_of(ResponseStream({}, style=style), chunks)
    response = events[-1]["response"]
    if synthetic:  # as servers do that make their stream from a finished answer
        types = ("response.created", "response.output_item.done", events[-1]["type"])
        events = [event for event in events if event["type"] in types]
    completed = chat_from_response(response)
    assert completion_of(all_of(ChunkStream(include_usage=True), events)) == expected(completed)


# ---------------------------------------------------------------- what back ends do


def piece_of_call(arguments: str, **more: Any) -> Json:
    return chunk({"tool_calls": [{**more, "function": {**more.pop("function", {}), "arguments": arguments}}]})


def test_the_first_events_can_be_sent_before_the_back_end_says_anything() -> None:
    stream = ResponseStream({"model": "m"}, "resp_1")
    assert [event["type"] for event in stream.start()] == ["response.created", "response.in_progress"]
    first, *_ = stream.take(chunk({"content": "a"}))
    assert first["type"] == "response.output_item.added"
    assert list(stream.start()) == []
    last = list(stream.take(chunk({}, "stop"))) + list(stream.end())
    assert last[-1]["response"]["output"][0]["id"] == "msg_1"
    messages = MessagesStream("m")
    assert [event["type"] for event in messages.start()] == ["message_start", "ping"]
    first, *_ = messages.take(chunk({"content": "a"}))
    assert first["type"] == "content_block_start"


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        ([], "ended its stream before"),
        ([{"error": {"message": "out of memory", "code": 500}}], "out of memory"),
        ([chunk({}, "abort")], "gave up (abort)"),
    ],
)
def test_an_answer_that_breaks_off_is_reported_as_an_error_by_every_api(last: list[Json], reason: str) -> None:
    chunks = [chunk({"content": "hal"}), *last]
    events = all_of(ResponseStream({}), chunks)
    assert events[-1]["type"] == "response.failed"
    assert reason in events[-1]["response"]["error"]["message"]
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "hal"
    message = all_of(MessagesStream(), chunks)[-1]
    assert (message["type"], message["error"]["type"]) == ("error", "api_error")
    assert reason in message["error"]["message"]
    (error,) = [one for one in all_of(ChunkStream(), events) if "error" in one]
    assert reason in error["error"]["message"]


def test_a_response_stream_without_an_end_is_an_error() -> None:
    events = all_of(ResponseStream({}), [chunk({"content": "hal"}), chunk({}, "stop")])[:-1]
    assert "error" in all_of(ChunkStream(), events)[-1]


def test_an_error_of_anthropic_goes_through_to_every_client() -> None:
    error = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    (error_chunk,) = MessageChunks().take(error)
    assert all_of(ResponseStream({}), [error_chunk])[-1]["response"]["error"]["message"] == "Overloaded"


@pytest.mark.parametrize("index", [{}, {"index": 0}])
def test_calls_that_a_back_end_does_not_number_are_distinguished_by_their_ids(index: Json) -> None:
    chunks = [
        piece_of_call("{}", id="a", function={"name": "f"}, **index),
        piece_of_call('{"x"', id="b", function={"name": "g"}, **index),
        piece_of_call(": 1}", **index),
        chunk({}, "tool_calls"),
    ]
    output = all_of(ResponseStream({}), chunks)[-1]["response"]["output"]
    assert [(one["call_id"], one["name"], one["arguments"]) for one in output] == [
        ("a", "f", "{}"),
        ("b", "g", '{"x": 1}'),
    ]


def test_parallel_calls_may_come_at_once_and_repeat_their_names() -> None:
    def part(index: int, text: str) -> Json:
        return piece_of_call(text, index=index, id=f"c{index}", function={"name": "f"})

    chunks = [part(0, '{"a"'), part(1, '{"b"'), part(0, ": 0}"), part(1, ": 1}"), chunk({}, "tool_calls")]
    output = all_of(ResponseStream({}), chunks)[-1]["response"]["output"]
    assert [one["arguments"] for one in output] == ['{"a": 0}', '{"b": 1}']
    assert [one["name"] for one in output] == ["f", "f"]


def test_reasoning_between_texts_stays_where_it_was_said() -> None:
    chunks = [chunk({"reasoning_content": "1"}), chunk({"content": "a"}), chunk({"reasoning_content": "2"})]
    chunks += [chunk({"content": "b"}), chunk({}, "stop")]
    output = all_of(ResponseStream({}), chunks)[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "reasoning", "message"]
    assert len({item["id"] for item in output}) == 4


def test_logprobs_come_with_the_text_only_where_they_were_asked_for() -> None:
    def text_chunk(text: str) -> Json:
        return chunk({"content": text}, logprobs={"content": [{"token": text, "logprob": -1.0}]})

    chunks = [text_chunk("a"), text_chunk("b"), chunk({}, "stop")]
    events = all_of(ResponseStream({"top_logprobs": 1}), chunks)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [[entry["token"] for entry in delta["logprobs"]] for delta in deltas] == [["a"], ["b"]]
    assert len(events[-1]["response"]["output"][0]["content"][0]["logprobs"]) == 2
    assert [event for event in all_of(ResponseStream({}), chunks) if event.get("logprobs")] == []


def test_tokens_as_vllm_streams_them_become_token_data() -> None:
    def token_chunk(text: str, token: int, finish: str | None = None) -> Json:
        logprobs = {"content": [{"token": text, "logprob": -float(token)}]}
        return chunk({"content": text}, finish, logprobs=logprobs, token_ids=[token])

    chunks = [
        chunk({"role": "assistant"}) | {"prompt_token_ids": [1, 2]},
        token_chunk("a", 3),
        token_chunk("b", 4, "stop"),
    ]
    item = all_of(ResponseStream({}), chunks)[-1]["response"]["output"][-1]
    assert [item[name] for name in TOKEN_FIELDS] == [[1, 2], [3, 4], [-3.0, -4.0]]
    with pytest.raises(UpstreamError, match="2 token ids but 1 logprobs"):
        all_of(ResponseStream({}), [*chunks[:2], chunk({}, "stop", token_ids=[4])])


def test_a_tool_of_anthropics_api_gets_its_input_as_one_object() -> None:
    chunks = [piece_of_call('{"x"', index=0, id="a", function={"name": "f"}), piece_of_call(": 1", index=0)]
    events = all_of(MessagesStream(), [*chunks, piece_of_call("}", index=0), chunk({}, "tool_calls")])
    (delta,) = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert delta == {"type": "input_json_delta", "partial_json": '{"x": 1}'}
    cut_off = all_of(MessagesStream(), [*chunks, chunk({}, "length")])
    assert message_of(cut_off)["content"][0]["input"] == {"INVALID_JSON": '{"x": 1'}


def test_each_part_of_an_item_that_came_whole_is_sent() -> None:
    parts = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []} for text in "ab"]
    item = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": parts}
    response = response_from_chat({**HEAD, "choices": [{"message": {"content": "ab"}, "finish_reason": "stop"}]}, {})
    events = [{"type": "response.created", "response": response}]
    events.append({"type": "response.output_item.done", "output_index": 0, "item": item})
    events.append({"type": "response.completed", "response": response | {"output": [item]}})
    assert completion_of(all_of(ChunkStream(), events))["message"]["content"] == "ab"


def test_a_summary_of_reasoning_is_sent_once() -> None:
    events: list[Json] = [{"type": "response.created", "response": {"id": "resp_1", "created_at": 5, "model": "m"}}]
    place = {"output_index": 0, "summary_index": 0}
    events += [{"type": "response.reasoning_summary_text.delta", "delta": text, **place} for text in ("in ", "short")]
    events.append(
        {"type": "response.reasoning_text.delta", "delta": "at length", "output_index": 0, "content_index": 0}
    )
    stream = ChunkStream()
    deltas = [one["choices"][0]["delta"] for event in events for one in stream.take(event)]
    assert deltas[1:] == [{"reasoning_content": "in "}, {"reasoning_content": "short"}]
