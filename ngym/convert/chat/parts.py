"""What stands inside a message: Responses parts (input_text, input_image ...) <-> Chat parts (text, image_url ...)."""

from __future__ import annotations

from typing import Any

from ngym.errors import BadRequest
from ngym.schema import Json

TEXT_PARTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})


def content_text(content: Any) -> str:
    """The text of a message's content or of a tool's output: a string, or its text parts one after the other."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content or () if part["type"] in TEXT_PARTS)


def text_only(content: str | list[Json] | None, where: str) -> str:
    """The text of content that may hold nothing else; BadRequest names the type of a part that is no text."""
    check_text_only(content, where)
    return content_text(content)


def check_text_only(content: str | list[Json] | None, where: str) -> None:
    if content is None or isinstance(content, str):
        return
    for index, part in enumerate(content):
        if part["type"] not in TEXT_PARTS:
            raise BadRequest(f"{where}[{index}]: a part of type {part['type']!r} is not supported here, only text")


def chat_content(content: str | list[Json] | None, where: str) -> str | list[Json]:
    """Responses content -> Chat content; a string stays a string, parts stay parts, null is empty."""
    if content is None or isinstance(content, str):
        return content or ""
    return [_chat_part(part, f"{where}[{index}]") for index, part in enumerate(content)]


def input_content(content: str | list[Json] | None, where: str) -> str | list[Json]:
    """Chat content -> Responses content."""
    if content is None or isinstance(content, str):
        return content or ""
    return [_input_part(part, f"{where}[{index}]") for index, part in enumerate(content)]


def _chat_part(part: Json, where: str) -> Json:
    match part["type"]:
        case "input_text" | "output_text" | "text":
            return {"type": "text", "text": part["text"]}
        case "input_image":
            if not part.get("image_url"):
                raise BadRequest(f"{where}: an input_image needs an image_url (a URL or a data: URL)")
            return {"type": "image_url", "image_url": {"url": part["image_url"], **_present(part, "detail")}}
        case "input_video" if part.get("video_url"):
            given = part["video_url"]
            return {"type": "video_url", "video_url": given if isinstance(given, dict) else {"url": given}}
        case "input_audio" if isinstance(part.get("input_audio"), dict):
            return {"type": "input_audio", "input_audio": part["input_audio"]}
        case "input_file":
            return {"type": "file", "file": _present(part, "file_data", "file_id", "filename")}
        case kind:
            raise BadRequest(f"{where}: a part of type {kind!r} is not supported")


def _input_part(part: Json, where: str) -> Json:
    match part:
        case {"type": "text", "text": str(text)}:
            return {"type": "input_text", "text": text}
        case {"type": "image_url", "image_url": {"url": str(url)} as image} if url:
            return {"type": "input_image", "image_url": url, **_present(image, "detail")}
        case {"type": "video_url", "video_url": {"url": str(url)}} if url:
            return {"type": "input_video", "video_url": url}
        case {"type": "input_audio", "input_audio": dict(audio)}:
            return {"type": "input_audio", "input_audio": audio}
        case {"type": "file", "file": dict(file)}:
            return {"type": "input_file", **_present(file, "file_data", "file_id", "filename")}
        case _:
            raise BadRequest(f"{where}: a part of type {part.get('type')!r} is not supported, or lacks its content")


def _present(part: Json, *names: str) -> Json:
    return {name: part[name] for name in names if part.get(name) is not None}
