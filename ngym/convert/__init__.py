"""Responses API <-> Chat Completions, both ways, as pure functions on plain JSON: dict in, dict out, nothing invented.

| from                      | to                       | function                |
|---------------------------|--------------------------|-------------------------|
| Responses create params   | Chat Completions request | `chat_request`          |
| Chat Completions request  | Responses create params  | `create_params`         |
| items (+ instructions)    | messages                 | `messages_from_items`   |
| messages                  | items                    | `items_from_messages`   |
| Chat Completion           | Response                 | `response_from_chat`    |
| Response                  | Chat Completion          | `chat_from_response`    |
| Response                  | Responses SSE events     | `response_events`       |
| Chat Completion           | Chat SSE chunks          | `chat_chunks`           |

What has no counterpart on the other side is refused with the field's name (BadRequest), or is in the list of dropped
fields in `requests`; it never vanishes silently. Unknown token counts are null, never 0.
"""

from ngym.convert.fields import check_chat_request, check_create_params
from ngym.convert.items import items_from_messages, message_item, output_text
from ngym.convert.messages import last_user_text, messages_from_items
from ngym.convert.parts import content_text
from ngym.convert.requests import MaxTokensField, chat_request, create_params, extra_body
from ngym.convert.responses import (
    chat_from_response,
    is_context_overflow,
    new_response,
    overflow_response,
    response_from_chat,
    usage_from_chat,
    usage_to_chat,
)
from ngym.convert.stream import SSE_DONE, chat_chunks, response_events, sse
from ngym.convert.think import ReasoningStyle, join_think, split_think

__all__ = [
    "SSE_DONE",
    "MaxTokensField",
    "ReasoningStyle",
    "chat_chunks",
    "chat_from_response",
    "chat_request",
    "check_chat_request",
    "check_create_params",
    "content_text",
    "create_params",
    "extra_body",
    "is_context_overflow",
    "items_from_messages",
    "join_think",
    "last_user_text",
    "message_item",
    "messages_from_items",
    "new_response",
    "output_text",
    "overflow_response",
    "response_events",
    "response_from_chat",
    "split_think",
    "sse",
    "usage_from_chat",
    "usage_to_chat",
]
