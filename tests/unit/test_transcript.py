"""A rollout as readable text."""

from ngym.rollout import Call, calls_in, transcript


def row(**changes):
    return {
        "responses_create_params": {"input": "Tom has 37 coins and buys 58 more."},
        "response": {
            "output": [
                {"type": "function_call", "name": "calculator", "arguments": '{"expression": "37+58"}', "call_id": "c"},
                {"type": "function_call_output", "call_id": "c", "output": "95"},
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "The answer is 95."}],
                },
            ]
        },
        "reward": 1.0,
        "_ng_task_index": 3,
        "_ng_rollout_index": 5,
        "expected_answer": "95",
        **changes,
    }


def test_a_rollout_reads_from_top_to_bottom():
    assert transcript(row()).splitlines() == [
        "task 3, rollout 5 | reward 1 | expected 95",
        "  user       Tom has 37 coins and buys 58 more.",
        '  assistant  -> calculator({"expression": "37+58"})',
        "  tool       <- 95",
        "  assistant  The answer is 95.",
    ]


def test_the_calls_of_chat_messages_are_shown_as_those_of_items():
    function = {"name": "calculator", "arguments": '{"expression": "37+58"}'}
    message = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    result = {"role": "tool", "tool_call_id": "c", "content": "95"}
    output = [{**message, "content": None}, result, {**message, "content": "Again."}]
    assert transcript(row(response={"output": output})).splitlines()[2:] == [
        '  assistant  -> calculator({"expression": "37+58"})',
        "  tool       95",
        "  assistant  Again.",
        '  assistant  -> calculator({"expression": "37+58"})',
    ]


def test_an_empty_answer_is_empty_and_a_refusal_has_its_text():
    parts = [{"type": "output_text", "text": ""}, {"type": "refusal", "refusal": "No."}, {"type": "input_image"}]
    texts = [transcript(row(response={"output": [{"type": "message", "content": [part]}]})) for part in parts]
    assert [text.splitlines()[-1].strip() for text in texts] == [
        "assistant",
        "assistant  No.",
        "assistant  [input_image]",
    ]


def test_escape_sequences_of_a_model_do_not_reach_the_terminal():
    hostile = row(response={"output": [{"type": "message", "role": "assistant", "content": "\x1b[2Jgone\u202e"}]})
    assert "\x1b" not in transcript(hostile) and "\u202e" not in transcript(hostile)


def test_an_unscored_rollout_says_so_and_long_text_is_wrapped():
    text = transcript(row(reward=None, response={"output": [{"type": "message", "content": "word " * 100}]}), width=60)
    assert "not scored" in text
    assert max(map(len, text.splitlines())) <= 60


def test_the_calls_of_a_trajectory_are_read_from_items_and_from_chat_messages_alike():
    item = {"type": "function_call", "name": "add", "arguments": '{"amount": 1}', "call_id": "a"}
    functions = [
        {"id": name, "function": {"name": "add", "arguments": text}} for name, text in (("b", "{}"), ("c", "["))
    ]
    message = {"role": "assistant", "content": "", "tool_calls": [*functions, "damaged", {"id": "d"}]}
    result = {"role": "tool", "tool_call_id": "b", "content": "5"}
    response = {"output": [item, message, result, {"role": "assistant", "tool_calls": functions[:1]}]}
    first = [Call("add", {"amount": 1}, "a"), Call("add", {}, "b"), Call("add", None, "c")]
    assert calls_in(response) == [*first, Call("add", {}, "b")]
    assert calls_in({**response, "status": "incomplete"}) == first  # calls of a turn that was cut off are not run
