"""What did the model finally say? The last answer's text, and answers read out of it by a stated policy."""

from __future__ import annotations

from ngym.schema import Json


def last_text(response: Json) -> str:
    """The text of the response's last assistant message; empty when there is none."""
    for item in reversed(response.get("output") or []):
        if item.get("type", "message") == "message" and item.get("role", "assistant") == "assistant":
            content = item.get("content")
            if isinstance(content, str):
                return content
            return "".join(part.get("text") or "" for part in content or [] if part.get("type") in ("output_text", "text"))
    return ""
