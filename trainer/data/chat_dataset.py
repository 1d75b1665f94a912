"""Samples from conversations: every assistant turn is trained as if it had been sampled, and nothing else is.

In a demonstration these are all its assistant turns, in a preference pair those after the prompt.

For each assistant turn the chat template renders the prompt that an inference server would have seen, and the text that
includes the turn. The difference is what the policy says, its end-of-turn token included. A turn whose prompt continues
the text so far extends the segment, any other begins a new one. Rollouts follow the same rule, so templates that drop
old reasoning work as at inference.

Arguments of tool calls that are a JSON string become the object that they encode, as in an inference server: a template
that prints them with `tojson` would quote the string again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ngym.errors import UsageError
from ngym.export.conversation import arguments
from ngym.files import jsonl

from ..recipe.objective import Supervision
from .images import IMAGES, TEXT_ONLY, Images, PlacedImage, image_content, place_in_order
from .samples import Sample, Segment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SIDES = ("chosen", "rejected")


class TextPiece(NamedTuple):
    """A stretch of text that is tokenized separately, as its writer (template or policy) wrote it.

    images: those whose markers are in the text, in order.
    """

    text: str
    trained: bool
    images: tuple[bytes, ...] = ()


# the pieces of each segment
Conversation: TypeAlias = list[list[TextPiece]]


class Pair(NamedTuple):
    """Two continuations of the same prompt."""

    chosen: Sample
    rejected: Sample


class JudgedAnswer(NamedTuple):
    """A whole conversation for a reward model, as the chat template renders it. length: tokens after the prompt."""

    token_ids: list[int]
    length: int
    label: bool


class JudgedRow(NamedTuple):
    """A pair (chosen, rejected), an answer, or the steps of one. margin: None if the row has no number there."""

    answers: tuple[JudgedAnswer, ...]
    margin: float | None = None


class LabeledAnswer(NamedTuple):
    """An answer that is good or bad. mismatched: its prompt with the answer to another prompt."""

    answer: Sample
    mismatched: Sample
    label: bool


def read_demonstrations(path: Path, tokenizer: PreTrainedTokenizerBase, images: Images = TEXT_ONLY) -> list[Sample]:
    """The samples of a JSONL file of `{"messages": [...], "tools": [...]}`.

    images: how the model reads images, or the reason why it does not; here and below.

    Raises:
        UsageError: a line is not a demonstration, or the chat template cannot render it; all such lines are named.
    """

    def rendered(row: dict[str, Any]) -> list[Conversation]:
        return [list(_segments(row["messages"], 0, row.get("tools"), tokenizer, images))]

    return _tokenize(_read(path, partial(_problem, images=images), rendered), tokenizer, images)


def read_pairs(path: Path, tokenizer: PreTrainedTokenizerBase, images: Images = TEXT_ONLY) -> list[Pair]:
    """The pairs of a JSONL file of `{"prompt": [...], "chosen": [...], "rejected": [...], "tools": [...]}`.

    Raises:
        UsageError: a line is not a pair, its sides are equal, or the chat template cannot render it; all are named.
    """

    def rendered(row: dict[str, Any]) -> list[Conversation]:
        start = len(row["prompt"])
        sides = [
            list(_segments(row["prompt"] + row[side], start, row.get("tools"), tokenizer, images)) for side in SIDES
        ]
        if sides[0] == sides[1]:
            raise _Unrenderable("chosen and rejected are equal, so there is no learning signal; drop the row")
        return sides

    samples = _tokenize(_read(path, partial(_pair_problem, images=images), rendered), tokenizer, images)
    return [Pair(*sides) for sides in zip(samples[::2], samples[1::2], strict=True)]


def read_labeled(path: Path, tokenizer: PreTrainedTokenizerBase, images: Images = TEXT_ONLY) -> list[LabeledAnswer]:
    """The answers of a JSONL file of `{"prompt": [...], "completion": [...], "label": true, "tools": [...]}`.

    Raises:
        UsageError: a line is not a labeled answer, the chat template cannot render it, or all prompts are equal.
    """
    rows: list[dict[str, Any]] = []

    def rendered(row: dict[str, Any]) -> list[Conversation]:
        rows.append(row)
        return [_conversation(row, row["completion"], tokenizer, images)]

    conversations = _read(path, partial(_labeled_problem, images=images), rendered)
    partners = _partners([row["prompt"] for row in rows], path)
    try:
        conversations += [
            _conversation(row, rows[partner]["completion"], tokenizer, images)
            for row, partner in zip(rows, partners, strict=True)
        ]
    except _Unrenderable as error:
        raise UsageError(f"{path}: a prompt with the completion of another row: {error}") from error
    samples = _tokenize(conversations, tokenizer, images)
    half = len(rows)
    return [
        LabeledAnswer(*fields)
        for fields in zip(samples[:half], samples[half:], (row["label"] for row in rows), strict=True)
    ]


def read_judged(path: Path, tokenizer: PreTrainedTokenizerBase, supervision: Supervision) -> list[JudgedRow]:
    """The rows of a JSONL file for a reward model.

    Raises:
        UsageError: a line does not have the format of `supervision`, or the chat template cannot render it.
    """
    problem = {"pairs": _pair_problem, "outcomes": _labeled_problem, "steps": _steps_problem}[supervision]
    texts: list[list[tuple[str, str, bool]]] = []  # of each row: its prompts, whole conversations and labels
    margins: list[float | None] = []

    def check(row: dict[str, Any]) -> str | None:
        if (reason := problem(row)) is not None:
            return reason
        try:
            texts.append(
                [(*_judged_texts(row, messages, tokenizer), label) for messages, label in _answers(row, supervision)]
            )
        except _Unrenderable as error:
            return str(error)
        margin = row.get("margin")
        is_number = isinstance(margin, int | float) and not isinstance(margin, bool) and math.isfinite(margin)
        margins.append(float(margin) if is_number else None)  # type: ignore[arg-type]
        if supervision == "pairs" and texts[-1][0][1] == texts[-1][1][1]:
            return "chosen and rejected are equal, so there is no learning signal; drop the row"
        return None

    for _ in jsonl.check_lines(path, check):
        pass
    ids_of = _ids_of({text for row in texts for answer in row for text in answer[:2]}, tokenizer)
    answers_by_row = [
        [JudgedAnswer(ids_of[w], max(0, len(ids_of[w]) - len(ids_of[p])), label) for p, w, label in row]
        for row in texts
    ]
    return [JudgedRow(tuple(answers), margin) for answers, margin in zip(answers_by_row, margins, strict=True)]


def _answers(row: dict[str, Any], supervision: Supervision) -> Iterator[tuple[list[Any], bool]]:
    """The messages after the prompt that are scored, with their labels. Keys of another supervision are ignored."""
    if supervision == "pairs":
        yield row["chosen"], True
        yield row["rejected"], False
    elif supervision == "steps":
        turns = (end for end, message in enumerate(row["completion"], 1) if message["role"] == "assistant")
        for end, label in zip(turns, row["labels"], strict=True):
            yield row["completion"][:end], label
    else:
        yield row["completion"], row["label"]


def _judged_texts(row: dict[str, Any], completion: list[Any], tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """The prompt, and the conversation up to the end of the completion."""
    prompt, tools = row["prompt"], row.get("tools")
    return _render(prompt, tools, tokenizer, prompt=True), _render(prompt + completion, tools, tokenizer, prompt=False)


def _conversation(
    row: dict[str, Any], completion: list[Any], tokenizer: PreTrainedTokenizerBase, images: Images
) -> Conversation:
    return list(_segments(row["prompt"] + completion, len(row["prompt"]), row.get("tools"), tokenizer, images))


def _partners(prompts: Sequence[Any], path: Path) -> list[int]:
    """For each row, the nearest earlier row with another prompt; the first rows take one from the end."""
    last, partners = -1, []
    for index in range(-len(prompts), len(prompts)):  # twice, so that the first rows know the last ones
        row = index % len(prompts)
        if prompts[row] != prompts[row - 1]:
            last = (row - 1) % len(prompts)
        if index >= 0:
            partners.append(last)
    if -1 in partners:
        raise UsageError(f"{path}: all prompts are equal; kto compares answers with those to other prompts")
    return partners


def _read(
    path: Path,
    problem: Callable[[dict[str, Any]], str | None],
    rendered: Callable[[dict[str, Any]], list[Conversation]],
) -> list[Conversation]:
    """The rendered rows, one after the other."""
    conversations: list[Conversation] = []

    def check(row: dict[str, Any]) -> str | None:
        reason = problem(row)
        if reason is None:
            try:
                conversations.extend(rendered(row))
            except _Unrenderable as error:
                return str(error)
        return reason

    for _ in jsonl.check_lines(path, check):
        pass
    return conversations


class _Unrenderable(Exception):
    """The chat template cannot render this conversation."""


def _problem(row: dict[str, Any], images: Images) -> str | None:
    if not _are_messages(row.get("messages")):
        return 'not a demonstration: it needs "messages", a list of {"role", "content"}'
    if error := _message_problem("messages", row["messages"], images):
        return error
    if row["messages"] and row["messages"][0]["role"] == "assistant":
        return "the assistant speaks first: a prompt must come before it"
    if not _has_assistant(row["messages"]):
        return "nothing to train on: no message has the role 'assistant'"
    return None


def _pair_problem(row: dict[str, Any], images: Images = TEXT_ONLY) -> str | None:
    return _answers_problem(row, "preference pair", SIDES, images)


def _labeled_problem(row: dict[str, Any], images: Images = TEXT_ONLY) -> str | None:
    error = _answers_problem(row, "labeled answer", ("completion",), images)
    if error is None and not isinstance(row.get("label"), bool):
        return f"the label is {row.get('label')!r:.60}; it must be true or false"
    return error


def _steps_problem(row: dict[str, Any]) -> str | None:
    error = _answers_problem(row, "conversation with labeled steps", ("completion",))
    if error is not None:
        return error
    labels, turns = row.get("labels"), sum(message["role"] == "assistant" for message in row["completion"])
    if not isinstance(labels, list) or len(labels) != turns or not all(isinstance(label, bool) for label in labels):
        return f"the labels are {labels!r:.60}; it needs true or false for each of the {turns} assistant messages"
    return None


def _answers_problem(
    row: dict[str, Any], kind: str, answers: tuple[str, ...], images: Images = TEXT_ONLY
) -> str | None:
    for key in ("prompt", *answers):
        if not _are_messages(row.get(key)):
            return f'not a {kind}: it needs "{key}", a list of {{"role", "content"}}'
        if error := _message_problem(key, row[key], images):
            return error
    if not row["prompt"]:
        return "the prompt is empty: it needs at least one message"
    for key in answers:
        if not _has_assistant(row[key]):
            return f"nothing to train on: no message of {key!r} has the role 'assistant'"
    return None


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(message, dict) and "role" in message for message in value)


def _message_problem(key: str, messages: list[dict[str, Any]], images: Images) -> str | None:
    """The part of a message that a chat template cannot render, and does not explain."""
    for index, message in enumerate(messages):
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            if error := _part_problem(part, f"{key}[{index}].content", message["role"], images):
                return error
        for call in message["tool_calls"] if isinstance(message.get("tool_calls"), list) else ():
            function = call.get("function", call) if isinstance(call, dict) else call
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                return (
                    f'{key}[{index}].tool_calls: a call needs {{"function": {{"name", "arguments"}}}}, not {call!r:.60}'
                )
    return None


def _part_problem(part: Any, where: str, role: Any, images: Images) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind == "text" and isinstance(part.get("text"), str):
        return None
    if kind not in IMAGES or not isinstance(part, dict):
        return f'{where}: a part of type {kind!r:.40}; only {{"type": "text", "text"}} and images are trained on'
    if isinstance(images, str):
        return f"{where}: a part of type {kind!r}: {images}"
    if role == "assistant":
        return f"{where}: an image of the assistant: the model writes text only"
    try:
        images.count(image_content(part, where))
    except ValueError as error:
        return str(error)
    return None


def _has_assistant(messages: list[dict[str, Any]]) -> bool:
    return any(message["role"] == "assistant" for message in messages)


def _segments(
    messages: list[dict[str, Any]], first: int, tools: Any, tokenizer: PreTrainedTokenizerBase, images: Images
) -> Iterator[list[TextPiece]]:
    """The segments that hold the assistant turns from message `first` on."""
    contents = [_contents(message) for message in messages]
    segment: list[TextPiece] = []
    so_far, seen = "", 0  # text and messages of the segment
    for index in range(first, len(messages)):
        if messages[index]["role"] != "assistant":
            continue
        prompt = _render(messages[:index], tools, tokenizer, images, prompt=True)
        rendered = _render(messages[: index + 1], tools, tokenizer, images, prompt=False)
        if not rendered.startswith(prompt):
            raise _Unrenderable(
                f"message {index}: the chat template does not begin the turn with its own generation prompt"
            )
        # white space between two turns belongs to the next prompt
        answer = rendered[len(prompt) :].rstrip()
        if not (segment and prompt.startswith(so_far)):
            if segment:
                yield segment
            segment, so_far, seen = [], "", 0
        new_images = tuple(chain.from_iterable(contents[seen:index]))
        segment.append(_context(prompt[len(so_far) :], new_images, images, index))
        segment.append(_answer(answer, images, index))
        so_far, seen = prompt + answer, index
    yield segment


def _context(text: str, contents: tuple[bytes, ...], images: Images, index: int) -> TextPiece:
    """What the assistant did not write."""
    markers = 0 if isinstance(images, str) else text.count(images.marker)
    if markers != len(contents):
        raise _Unrenderable(
            f"message {index}: the chat template writes {markers} image markers before it for {len(contents)} images"
        )
    return TextPiece(text, False, contents)


def _answer(text: str, images: Images, index: int) -> TextPiece:
    if not isinstance(images, str) and images.marker in text:
        raise _Unrenderable(f"message {index}: the assistant's text has the image marker {images.marker}")
    return TextPiece(text, True)


def _contents(message: dict[str, Any]) -> list[bytes]:
    """The images in a message."""
    content = message.get("content")
    parts = content if isinstance(content, list) else ()
    return [image_content(part, "a message") for part in parts if part.get("type") in IMAGES]


def _render(
    messages: list[Any], tools: Any, tokenizer: PreTrainedTokenizerBase, images: Images = TEXT_ONLY, *, prompt: bool
) -> str:
    """prompt: with the generation prompt of the next turn."""
    from jinja2 import TemplateError

    messages = [_normalize(message, as_parts=not isinstance(images, str)) for message in messages]
    try:
        return str(
            tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, add_generation_prompt=prompt)
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise _Unrenderable(f"the chat template refuses it: {error}") from error


def _normalize(message: dict[str, Any], *, as_parts: bool) -> dict[str, Any]:
    """A message with its calls in OpenAI's form with arguments as objects.

    as_parts: its content as a list, which templates of models with images read; otherwise it is one text.
    """
    content, calls = message.get("content"), message.get("tool_calls")
    changes: dict[str, Any] = {}
    if isinstance(content, list):
        parts = [{"type": "image"} if part["type"] in IMAGES else part for part in content]
        changes["content"] = parts if as_parts else "".join(part["text"] for part in content)
    elif isinstance(content, str) and as_parts:
        changes["content"] = [{"type": "text", "text": content}]
    if isinstance(calls, list):
        changes["tool_calls"] = [_normalize_call(call) for call in calls]
    return {**message, **changes}


def _normalize_call(call: Any) -> Any:
    """Accepts OpenAI's form, and the one without the `function` around it."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _normalize_call(call["function"])}
    text = call.get("arguments")
    return {**call, "arguments": arguments(text)} if isinstance(text, str) else call


def _tokenize(
    conversations: Sequence[Conversation], tokenizer: PreTrainedTokenizerBase, images: Images
) -> list[Sample]:
    all_pieces = [piece for segments in conversations for pieces in segments for piece in pieces]
    ids_of = _ids_of({piece.text for piece in all_pieces if not piece.images}, tokenizer)
    return [Sample(tuple(_segment(pieces, ids_of, images) for pieces in segments)) for segments in conversations]


def _ids_of(texts: set[str], tokenizer: PreTrainedTokenizerBase) -> dict[str, list[int]]:
    order = sorted(texts)
    return dict(zip(order, tokenizer(order, add_special_tokens=False)["input_ids"], strict=True)) if order else {}


def _segment(pieces: list[TextPiece], ids_of: dict[str, list[int]], images: Images) -> Segment:
    token_ids: list[int] = []
    spans: list[tuple[int, int]] = []
    placed: list[PlacedImage] = []
    for piece in pieces:
        start = len(token_ids)
        if piece.images and not isinstance(images, str):
            token_ids += images.token_ids(piece.text, piece.images)
            placed += place_in_order(token_ids, start, piece.images, images)
        else:
            token_ids += ids_of[piece.text]
        if piece.trained and len(token_ids) > start:
            spans.append((start, len(token_ids)))
    if not token_ids or (spans and spans[0][0] == 0):
        raise UsageError("the chat template renders an empty prompt; the first token of a turn needs a token before it")
    return Segment(token_ids, spans, tuple(placed))
