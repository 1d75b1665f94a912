"""Each field of the official clients is supported or refused by name, as docs/model-apis.md says."""

import re
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest
from paths import ROOT

from ngym.convert import check_chat_request, check_create_params, check_messages_request
from ngym.convert.anthropic_blocks import MESSAGES, MESSAGES_REFUSED
from ngym.convert.request_validation import CHAT, CHAT_REFUSED, RESPONSES, RESPONSES_REFUSED, SAMPLING
from ngym.errors import BadRequest
from ngym.schema import Json

HEADERS = {"betas", "user_profile_id", "workspace_id"}  # the client sends these beside the body
USER = {"role": "user", "content": "hi"}
RESPONSES_BODY: Json = {"input": "hi"}
CHAT_BODY: Json = {"messages": [USER]}
MESSAGES_BODY: Json = {"messages": [USER], "max_tokens": 1}
TABLES = {
    "/v1/responses": RESPONSES | RESPONSES_REFUSED,
    "/v1/chat/completions": CHAT | CHAT_REFUSED,
    "/v1/messages": MESSAGES | MESSAGES_REFUSED,
}


def fields_of(params: Any) -> set[str]:
    return set(get_type_hints(params)) - HEADERS


def test_no_field_of_openais_responses_is_forgotten() -> None:
    module = pytest.importorskip("openai.types.responses.response_create_params")
    assert fields_of(module.ResponseCreateParamsStreaming) <= TABLES["/v1/responses"].keys()


def test_no_field_of_openais_chat_completions_is_forgotten() -> None:
    module = pytest.importorskip("openai.types.chat.completion_create_params")
    assert fields_of(module.CompletionCreateParamsStreaming) <= TABLES["/v1/chat/completions"].keys()


@pytest.mark.parametrize("name", ["anthropic.types", "anthropic.types.beta"])
def test_no_field_of_anthropics_messages_is_forgotten(name: str) -> None:
    module = pytest.importorskip(f"{name}.message_create_params")
    assert fields_of(module.MessageCreateParamsStreaming) <= TABLES["/v1/messages"].keys()


@pytest.mark.parametrize("path", TABLES)
def test_the_documentation_describes_each_field(path: str) -> None:
    page = (ROOT / "docs" / "model-apis.md").read_text()
    table = page.split(f"| `{path}` | |\n", 1)[1].split("\n\n", 1)[0]
    names = {name for row in table.splitlines() for name in re.findall(r"`([a-z_]+)`", row.split("|")[1])}
    beyond = SAMPLING.keys() | {"thinking"}  # of vLLM and Anthropic; told below the tables
    assert names - TABLES[path].keys() == set()
    assert TABLES[path].keys() - beyond == names - beyond


@pytest.mark.parametrize(
    ("check", "body", "remedies"),
    [
        (check_create_params, RESPONSES_BODY, RESPONSES_REFUSED),
        (check_chat_request, CHAT_BODY, CHAT_REFUSED),
        (check_messages_request, MESSAGES_BODY, MESSAGES_REFUSED),
    ],
)
def test_what_is_refused_says_what_to_do_instead(
    check: Callable[[Json], Json], body: Json, remedies: dict[str, str]
) -> None:
    for name, remedy in remedies.items():
        with pytest.raises(BadRequest, match=f"field '{name}': is not supported: {re.escape(remedy)}"):
            check({**body, name: "x"})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"reasoning": {"efort": "low"}}, "field 'reasoning': has no member 'efort' (did you mean 'effort'?)"),
        ({"reasoning": {"effort": 3}}, "field 'reasoning': effort must be a string"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "format must have its name and schema"),
        ({"text": {"format": {"type": "xml"}}}, "format must have the type text, json_schema or json_object"),
        ({"include": ["message.output_text.logprob"]}, "(did you mean 'message.output_text.logprobs'?)"),
        ({"stream_options": {"usage": True}}, "field 'stream_options': has no member 'usage'"),
        ({"background": True}, "field 'background': is not supported: send the request and wait for its answer"),
        ({"truncation": "middle"}, "field 'truncation': must be 'auto' or 'disabled', not 'middle'"),
        ({"tool_choice": {"type": "function", "name": "ad"}}, "there is no tool 'ad' (did you mean 'add'?)"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "sub"}]}},
            "there is no tool 'sub'",
        ),
    ],
)
def test_what_is_inside_a_field_is_looked_at(more: Json, message: str) -> None:
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    with pytest.raises(BadRequest) as caught:
        check_create_params({"input": "hi", "tools": [tool], **more})
    assert message in caught.value.detail


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"response_format": {"type": "json_schema"}}, "json_schema must have its name and schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "shema": {}}}}, "'schema'"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "field 'tools[0].type': must be 'function'"),
        ({"modalities": ["text", "audio"]}, "field 'modalities': 'audio' is not known"),
        ({"messages": [{"role": "assistant", "content": None, "function_call": {}}]}, "use tool_calls"),
        ({"messages": [{"role": "assistant", "content": "", "thinking_blocks": [{}]}]}, "messages[0].thinking_blocks"),
        ({"stream_options": {"include_usage": "yes"}}, "include_usage must be true or false"),
    ],
)
def test_what_is_inside_a_chat_field_is_looked_at(more: Json, message: str) -> None:
    with pytest.raises(BadRequest) as caught:
        check_chat_request({**CHAT_BODY, **more})
    assert message in caught.value.detail


def test_fields_that_clients_send_by_habit_are_taken() -> None:
    check_create_params(
        {"input": "hi", "include": ["reasoning.encrypted_content"], "background": False, "store": False}
    )
    check_create_params({"input": "hi", "reasoning": {"effort": "low", "summary": None}, "text": {"format": None}})
    check_chat_request({**CHAT_BODY, "n": 1, "modalities": ["text"], "stream_options": {"include_usage": True}})
    check_messages_request({**MESSAGES_BODY, "cache_control": {"type": "ephemeral"}, "system": "", "tools": []})
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    check_messages_request({**MESSAGES_BODY, "context_management": edits, "thinking": {"type": "adaptive"}})
