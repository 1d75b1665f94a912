"""Token segments: each token once, and a new segment exactly where the context was broken."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ngym.rollout import ModelCall, extend, shortest_float32, tokens_of, versions_in, with_latest_tokens, without_tokens
from ngym.routed_experts import ExpertRows

ids = st.lists(st.integers(0, 9), max_size=6)


def call(prompt: list[int], generated: list[int], version: int = 0) -> ModelCall:
    return ModelCall(prompt, generated, [-0.5] * len(generated), [[0, len(generated), version]])


@given(st.lists(st.floats(-1000, 0, width=32)))
def test_the_shortest_text_of_a_float32_is_the_same_number(values: list[float]):
    shortest = shortest_float32(values)
    assert all(len(repr(value)) <= 16 for value in shortest)
    assert struct.pack(f"{len(values)}f", *shortest) == struct.pack(f"{len(values)}f", *values)


def test_a_call_that_continues_the_context_extends_its_segment():
    segments = []
    extend(segments, call([1, 2], [3, 4]))
    extend(segments, call([1, 2, 3, 4, 5, 6], [7], version=1))
    assert segments == [
        {
            "token_ids": [1, 2, 3, 4, 5, 6, 7],
            "mask": [[2, 4], [6, 7]],
            "logprobs": [-0.5] * 3,
            "policy_version": [[2, 4, 0], [6, 7, 1]],
        }
    ]
    assert versions_in(segments) == [0, 1]


def test_a_broken_prefix_starts_a_new_segment():
    segments = []
    extend(segments, call([1, 2], [3]))
    extend(segments, call([1, 9, 3, 4], [5]))
    assert [segment["token_ids"] for segment in segments] == [[1, 2, 3], [1, 9, 3, 4, 5]]


def test_a_call_with_another_image_in_place_of_an_earlier_one_starts_a_new_segment():
    """The placeholders of all images are the same token."""
    segments = []
    for images in (["red"], ["red", "blue"], ["green", "blue"]):
        extend(
            segments,
            call([1, 5, 5, 2], [3])._replace(images=images)
            if not segments
            else call([1, 5, 5, 2, 3, 5, 5], [4])._replace(images=images),
        )
    assert [(len(segment["mask"]), segment["images"]) for segment in segments] == [
        (2, ["red", "blue"]),
        (1, ["green", "blue"]),
    ]


def experts(*rows: int) -> ExpertRows:
    """Of one layer and one expert for each token."""
    return ExpertRows(1, 1, "uint8", bytearray(rows))


def test_each_token_keeps_the_experts_that_it_was_sampled_with():
    segments = []
    extend(segments, call([1, 2], [3])._replace(experts=experts(8, 9)))
    extend(segments, call([1, 2, 3, 4], [5])._replace(experts=experts(7, 7, 7, 6)))
    assert ExpertRows.read(segments[0]["routed_experts"], 5) == experts(8, 9, 7, 6)
    extend(segments, call([1, 9], [3])._replace(experts=experts(5)))
    assert ExpertRows.read(segments[1]["routed_experts"], 3) == experts(5)


@pytest.mark.parametrize(
    "record",
    [
        [[1]],
        {"shape": [2, 1, 1], "dtype": "uint8"},
        {"shape": [4, 1, 1], "dtype": "uint8", "data": "AAAAAA=="},
        {"shape": [2, 1, 1], "dtype": "uint8", "data": "AAAA"},
        {"shape": [2, 1, 1], "dtype": "uint8", "data": "A?=="},
        {"shape": [2, 0, 1], "dtype": "uint8", "data": ""},
        {"shape": [2, 1, 1], "dtype": "float64", "data": "AAA="},
    ],
)
def test_wrong_experts_are_refused(record):
    with pytest.raises(ValueError, match="routed_experts"):
        ExpertRows.read(record, 3)


@given(ids, st.lists(st.tuples(ids, ids), max_size=5))
def test_an_unbroken_rollout_is_one_segment_whose_masked_tokens_are_the_sampled_ones(prompt, turns):
    segments, context, sampled = [], list(prompt), []
    for generated, observation in turns:
        extend(segments, call(context, generated))
        context = context + generated + observation
        sampled += generated
    assert len(segments) == min(1, len(turns))
    for segment in segments:
        masked = [token for start, end in segment["mask"] for token in segment["token_ids"][start:end]]
        assert masked == sampled
        assert len(segment["logprobs"]) == len(masked)
        assert context[: len(segment["token_ids"])] == segment["token_ids"]


def test_token_data_is_all_or_nothing():
    complete = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-1.0]}
    assert tokens_of({"output": [{"type": "message"}, complete], "ng": {"policy_version": [[0, 1, 7]]}}).versions == [
        [0, 1, 7]
    ]
    seen = {"output": [complete], "ng": {"policy_version": [[0, 1, 7]], "images": ["a"]}}
    assert tokens_of(seen).images == ["a"]
    assert tokens_of({"output": [{"type": "message"}]}) is None
    assert tokens_of({"output": []}) is None
    with pytest.raises(ValueError, match="all or nothing"):
        tokens_of({"output": [{"prompt_token_ids": [1], "generation_token_ids": [2]}]})
    with pytest.raises(ValueError, match="1 generated tokens but 2 logprobs"):
        tokens_of({"output": [{**complete, "generation_log_probs": [-1.0, -2.0]}]})


def test_items_are_shown_to_verifiers_without_their_token_data():
    item = {"type": "message", "prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-1.0]}
    assert without_tokens([item, {"type": "reasoning"}]) == [{"type": "message"}, {"type": "reasoning"}]
    of_nemo_gym = {**item, "routed_experts": None}  # which its servers refuse on an item without token ids
    assert without_tokens([of_nemo_gym]) == [{"type": "message"}]


def test_of_a_conversation_only_the_last_token_data_are_sent_back():
    tokens = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-1.0]}
    call, result = {"type": "function_call"}, {"type": "function_call_output"}
    items = [{**call, **tokens}, result, {**call, **tokens, "prompt_token_ids": [1, 2, 3]}, result]
    assert with_latest_tokens(items) == [call, result, items[2], result]
    assert items[0] == {**call, **tokens}, "what was sampled keeps its own"
    assert with_latest_tokens([result, call]) == [result, call]
    assert with_latest_tokens([]) == []
