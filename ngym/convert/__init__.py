"""Conversion between the three APIs of a model server, as pure functions on plain JSON.

| from                      | to                       | function                          |
|---------------------------|--------------------------|-----------------------------------|
| Responses create params   | Chat Completions request | `chat_request`                    |
| Chat Completions request  | Responses create params  | `create_params`                   |
| items (+ instructions)    | messages                 | `messages_from_items`             |
| messages                  | items                    | `items_from_messages`             |
| Chat Completion           | Response                 | `response_from_chat`              |
| Response                  | Chat Completion          | `chat_from_response`              |
| Anthropic's request       | Chat Completions request | `chat_from_messages_api`          |
| Anthropic's request       | Responses create params  | `create_params_from_messages_api` |
| Chat Completion           | Anthropic's message      | `messages_api_from_chat`          |
| Chat Completions request  | Anthropic's request      | `messages_api_request`            |
| Anthropic's message       | Chat Completion          | `chat_from_message`               |

Streams, from finished answers or incrementally (one event or chunk in, the resulting events out):

| from                      | to                       | finished answer   | incremental      |
|---------------------------|--------------------------|-------------------|------------------|
| Chat                      | Responses events         | `response_events` | `ResponseStream` |
| Responses                 | Chat chunks              | `chat_chunks`     | `ChunkStream`    |
| Chat                      | Anthropic's events       |                   | `MessagesStream` |
| Anthropic                 | Chat chunks              |                   | `MessageChunks`  |

A field without a counterpart is refused by name (BadRequest), or is in the list of dropped fields in `chat_requests`,
`anthropic_serving` and `anthropic_upstream`; it is never lost silently. Unknown token counts are null, never 0. All
fields of each API are in docs/model-apis.md.
"""

from ngym.convert.anthropic_blocks import check_messages_request
from ngym.convert.anthropic_serving import (
    MessagesStream,
    chat_from_messages_api,
    create_params_from_messages_api,
    messages_api_from_chat,
)
from ngym.convert.anthropic_upstream import MessageChunks, chat_from_message, messages_api_request
from ngym.convert.chat_items import (
    chat_content,
    content_text,
    items_from_messages,
    last_user_text,
    message_item,
    messages_from_items,
    output_text,
)
from ngym.convert.chat_requests import (
    MaxTokensField,
    chat_from_response,
    chat_request,
    create_params,
    extra_body,
    finish_reason,
    new_response,
    overflow_response,
    refuse_token_ids,
    response_from_chat,
    unfinished,
    usage_from_chat,
    usage_to_chat,
    with_token_ids,
    without_allowed_tools,
)
from ngym.convert.reasoning import ENDED_EARLY, ReasoningStyle, join_think, split_think
from ngym.convert.request_validation import check_chat_request, check_create_params
from ngym.convert.streams import (
    FINISHED_EVENTS,
    SSE_DONE,
    ChunkStream,
    ResponseStream,
    chat_chunks,
    response_events,
    sse,
)

__all__ = [
    "ENDED_EARLY", "FINISHED_EVENTS", "SSE_DONE", "ChunkStream", "MaxTokensField", "MessageChunks", "MessagesStream", "ReasoningStyle",
    "ResponseStream", "chat_chunks", "chat_content", "chat_from_message", "chat_from_messages_api", "chat_from_response",
    "chat_request", "check_chat_request", "check_create_params", "check_messages_request", "content_text",
    "create_params", "create_params_from_messages_api", "extra_body", "finish_reason", "items_from_messages",
    "join_think", "last_user_text", "message_item", "messages_api_from_chat", "messages_api_request",
    "messages_from_items", "new_response", "output_text", "overflow_response", "refuse_token_ids", "response_events",
    "response_from_chat", "split_think", "sse", "unfinished", "usage_from_chat", "usage_to_chat", "with_token_ids",
    "without_allowed_tools",
]  # fmt: skip
