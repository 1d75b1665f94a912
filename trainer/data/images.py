"""Images in conversations: the files in a rollout's row, and the places of their placeholder tokens in its ids.

An engine that reads images writes one placeholder into the prompt's ids for each vector that the vision encoder makes of
an image. All placeholders are the same token, so ids alone do not show which image they belong to.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Protocol, TypeAlias
from urllib.parse import unquote_to_bytes

from ngym.rollout import image_digest
from ngym.schema import Json

IMAGES = frozenset({"input_image", "image_url", "image"})  # the last one: of Hugging Face's messages
MEDIA = IMAGES | {"input_audio", "input_video", "input_file", "audio_url", "video_url", "file"}


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image of a segment.

    content: the file (PNG, JPEG and others). places: of its placeholders in the segment's token ids, ascending. key: a
    negative number that equal images share, and no token has.
    """

    content: bytes = field(repr=False)
    places: tuple[int, ...] = field(repr=False)
    key: int

    @classmethod
    def at(cls, content: bytes, places: Sequence[int]) -> PlacedImage:
        """The image with its key."""
        digest = blake2b(content, digest_size=7).digest()
        return cls(content, tuple(places), -1 - int.from_bytes(digest))

    def moved(self, offset: int) -> PlacedImage:
        """The image with its placeholders so many tokens further back."""
        return replace(self, places=tuple(place + offset for place in self.places))


class ImageTokens(Protocol):
    """How a model reads images as tokens. token_id: the placeholder. marker: its text, which a chat template writes once
    for each image.
    """

    token_id: int
    marker: str

    def count(self, content: bytes) -> int:
        """The number of placeholders of an image.

        Raises:
            ValueError: it cannot be read.
        """

    def identify(self, content: bytes) -> None:
        """Reads the header of an image. Raises ValueError as `count`."""

    def token_ids(self, text: str, contents: Sequence[bytes]) -> list[int]:
        """The ids of a text with one marker for each of these images, with all their placeholders."""


TEXT_ONLY = "the model reads text only"
Images: TypeAlias = ImageTokens | str  # how a model reads images, or the reason why it does not


def images_of(row: Json) -> dict[str, bytes]:
    """The images in the conversation of a rollout, by their `image_digest`.

    Raises:
        ValueError: one is not a data: URL, or the conversation has other media.
    """
    return {image_digest(url): _content(url, where) for where, url in _urls(row)}


def media_problem(row: Json, images: Images) -> str | None:
    """The reason why the conversation of a row has images or other media that cannot be trained on; files are not read."""
    media = next((f"{where} has a part of type {part['type']!r}" for where, part in _media(row)), None)
    if media is None:
        return None
    if isinstance(images, str):
        return f"{media}: {images}"
    try:
        list(_urls(row))
    except ValueError as error:
        return str(error)
    return None


def task_media_problem(row: Json, images: Images) -> str | None:
    """The reason why rollouts of a task could not be trained on, as `media_problem`; the headers of images are read."""
    if (problem := media_problem(row, images)) or isinstance(images, str):
        return problem
    if problem := marker_problem(row, images):
        return problem
    for where, url in _urls(row):
        try:
            images.identify(_content(url, where))
        except ValueError as error:
            return str(error) if str(error).startswith(where) else f"{where}: {error}"
    return None


def marker_problem(row: Json, images: ImageTokens) -> str | None:
    """The text that has an image's marker: it becomes a placeholder, and an engine may put an image there."""
    where = next((where for where, text in _texts(row) if images.marker in text), None)
    return where and (
        f"{where} has the text {images.marker!r}, which the model reads as the place of an image: remove it from the task, "
        "or from what the environment returns"
    )


def image_content(part: Json, where: str) -> bytes:
    """The image in a part of a message.

    Raises:
        ValueError: it is not a data: URL, or the part is not an image.
    """
    return _content(_url(part, where), where)


def _urls(row: Json) -> Iterator[tuple[str, str]]:
    for where, part in _media(row):
        yield where, _url(part, where)


def _url(part: Json, where: str) -> str:
    kind = part.get("type")
    url: Any = part.get("image" if kind == "image" else "image_url")
    url = url.get("url") if isinstance(url, dict) else url
    if kind not in IMAGES or not isinstance(url, str):
        raise ValueError(
            f"{where} has a part of type {kind!r:.40}, and only text and images at data: URLs are trained on"
        )
    if url[:5].lower() != "data:":
        raise ValueError(
            f"{where} has an image at {url!r:.60}; the trainer fetches nothing: put images into rows as data: URLs"
        )
    return url


def _media(row: Json) -> Iterator[tuple[str, Json]]:
    """The parts that are not text, and where each is."""
    for where, item in _items(row):
        for part in _content_parts(item):
            if str(part.get("type")) in MEDIA:
                yield where, part


def _texts(row: Json) -> Iterator[tuple[str, str]]:
    """The texts that were not sampled, and where each is."""
    instructions = (row.get("responses_create_params") or {}).get("instructions")
    if isinstance(instructions, str):
        yield "responses_create_params.instructions", instructions
    for where, item in _items(row):
        if isinstance(item, str):
            yield where, item
        elif isinstance(item, dict) and item.get("role") != "assistant":
            content = item.get("output", item.get("content"))
            parts = [content] if isinstance(content, str) else [part.get("text") for part in _content_parts(item)]
            yield from ((where, text) for text in parts if isinstance(text, str))


def _items(row: Json) -> Iterator[tuple[str, Any]]:
    """The items of the conversation, and where each is."""
    for owner, key in (("responses_create_params", "input"), ("response", "output")):
        record = row.get(owner)
        items = record.get(key) if isinstance(record, dict) else None
        if isinstance(items, str):
            yield f"{owner}.{key}", items
        for place, item in enumerate(items if isinstance(items, list) else ()):
            yield f"{owner}.{key}[{place}]", item


def _content_parts(item: Any) -> list[Json]:
    """The parts of a message's content or of a tool's output, if it has parts."""
    if not isinstance(item, dict):
        return []
    content = item.get("output" if item.get("type") == "function_call_output" else "content")
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


def _content(url: str, where: str) -> bytes:
    """The file in a data: URL (RFC 2397)."""
    header, comma, data = url.partition(",")
    try:
        if not comma:
            raise ValueError("no comma")
        raw = unquote_to_bytes(data)
        return base64.b64decode(raw, validate=True) if header.lower().endswith(";base64") else raw
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{where} has a data: URL that cannot be decoded ({error})") from None


def place_images(
    token_ids: Sequence[int],
    sampled: Sequence[tuple[int, int]],
    digests: Sequence[str],
    contents: Mapping[str, bytes],
    tokens: ImageTokens,
) -> tuple[PlacedImage, ...]:
    """The images of a segment.

    Args:
        sampled: spans of the tokens that the policy sampled; a placeholder there is no image.
        digests: of the segment's images, in order.
        contents: files by digest.

    Raises:
        ValueError: a file is missing or cannot be read, or the images have other placeholders than the segment.
    """
    if missing := next((digest for digest in digests if digest not in contents), None):
        raise ValueError(
            f"the model got an image (digest {missing}) that is not in the row: its agent must return the images of its "
            "conversation in the response, as agents/simple does"
        )
    inside = {place for start, end in sampled for place in range(start, end)}
    places = [place for place, token in enumerate(token_ids) if token == tokens.token_id and place not in inside]
    return _split([contents[digest] for digest in digests], places, tokens)


def place_in_order(
    token_ids: Sequence[int], start: int, contents: Sequence[bytes], tokens: ImageTokens
) -> tuple[PlacedImage, ...]:
    """The images whose placeholders are in `token_ids` from `start` on. Raises ValueError as `place_images`."""
    places = [place for place in range(start, len(token_ids)) if token_ids[place] == tokens.token_id]
    return _split(contents, places, tokens)


def _split(contents: Sequence[bytes], places: Sequence[int], tokens: ImageTokens) -> tuple[PlacedImage, ...]:
    if places and not contents:
        raise ValueError(
            f"a segment has {len(places)} image placeholders, and the model server did not record the images of the call, "
            "as models/vllm does"
        )
    counts = [tokens.count(content) for content in contents]
    if sum(counts) != len(places):
        raise ValueError(
            f"a segment has {len(places)} image placeholders, but its images need {' + '.join(map(str, counts))}: "
            "the engine and the trainer prepare images differently; set the processor's options in the checkpoint's "
            "preprocessor_config.json, which both read"
        )
    ends = accumulate(counts)
    return tuple(
        PlacedImage.at(content, places[end - count : end])
        for content, count, end in zip(contents, counts, ends, strict=True)
    )
