"""Results of tools and observations of environments: JSON, or texts and images for a model that reads images."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response

from ngym.errors import BadRequest, ServiceError, ToolError
from ngym.schema import PARTS, TOOL_OUTPUT_HEADER, Json
from ngym.services.base.app import JsonResponse

FILE_BEGINS = ((b"\x89PNG\r\n\x1a\n", "png"), (b"\xff\xd8\xff", "jpeg"), (b"GIF8", "gif"))


class Image:
    """An image that the model sees, alone or in a list with texts.

    Args:
        data: a PNG, JPEG, GIF or WebP file, or an image of Pillow, which becomes a PNG file.

    Raises:
        ValueError: it is another file. TypeError: it is something else.
    """

    def __init__(self, data: Any) -> None:
        content = _png_file(data) if callable(getattr(data, "save", None)) else data
        if not isinstance(content, bytes):
            raise TypeError(f"Image() takes the bytes of a file or an image of Pillow, not {type(data).__name__}")
        self.url = f"data:image/{_format_of(content)};base64,{base64.b64encode(content).decode()}"

    def part(self) -> Json:
        """The image as content of the Responses API."""
        return {"type": "input_image", "image_url": self.url, "detail": "auto"}


Observation = str | Image | Sequence[str | Image]


def _png_file(picture: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, "PNG")
    return out.getvalue()


def _format_of(content: bytes) -> str:
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "webp"
    found = next((name for begin, name in FILE_BEGINS if content.startswith(begin)), None)
    if found is None:
        raise ValueError(f"Image(): the {len(content):,} bytes are not a PNG, JPEG, GIF or WebP file")
    return found


def has_image(result: Any) -> bool:
    """Whether a result is an image or a list with one."""
    return any(isinstance(member, Image) for member in as_members(result))


def content_parts(result: Any) -> list[Json]:
    """A result as content of the Responses API: texts as they are, images, and other values as JSON."""
    return [member.part() if isinstance(member, Image) else _text_part(member) for member in as_members(result)]


def content_of(observation: Any) -> Any:
    """The content of a message with this observation; of another type than Observation: as it is."""
    is_shown = isinstance(observation, Image | list | tuple)
    if is_shown and all(isinstance(member, str | Image) for member in as_members(observation)):
        return content_parts(observation)
    return observation


def as_members(result: Any) -> Sequence[Any]:
    """The members of a list, or the result alone."""
    return result if isinstance(result, list | tuple) else (result,)


def _text_part(value: Any) -> Json:
    text = value if isinstance(value, str) else bytes(ToolResponse(value).body).decode()
    return {"type": "input_text", "text": text}


class ToolResponse(JsonResponse):
    """The result of a tool as JSON, which the model reads with all digits."""

    long_integers = "number"


def tool_response(result: Any, name: str, line: str) -> Response:
    """The answer of a tool: its return value as JSON, or, with images, as parts.

    Args:
        name, line: of the tool, for errors.

    Raises:
        ServiceError: the value is not JSON. ToolError: it is nested too deeply.
    """
    try:
        if has_image(result):
            return JsonResponse(content_parts(result), headers={TOOL_OUTPUT_HEADER: PARTS})
        response = ToolResponse(result)
        if b"null" in response.body and has_nan(result):  # JSON has no NaN: the model would read null
            raise ValueError("it contains NaN or an infinity")
        return response
    except Exception as error:
        if isinstance(error, BadRequest) and not _contains_itself(result):  # too deep, as the model's arguments can be
            raise ToolError(f"{name}: {error.detail}") from None
        reason = "it contains itself" if isinstance(error, BadRequest) else error
        where = f" ({line})" if line else ""
        raise ServiceError(
            f"{name} returned a value that is not JSON: {reason}{where}", failure="tool_error"
        ) from error


def has_nan(value: Any) -> bool:
    """Whether a value that becomes JSON contains NaN or an infinity."""
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, BaseModel):
        value = value.model_dump()
    elif is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    elif hasattr(value, "tolist"):  # numpy
        value = value.tolist()
    if isinstance(value, Mapping):
        return any(map(has_nan, value.values()))
    return isinstance(value, list | tuple) and any(map(has_nan, value))


def _contains_itself(value: Any) -> bool:
    try:
        json.dumps(value, default=str, skipkeys=True)
    except RecursionError:
        return False
    except ValueError as error:
        return "Circular" in str(error)
    return False
