"""Demonstrations -> samples: every assistant turn is trained as if it had been sampled, and nothing else is.

For each assistant turn the chat template renders the prompt that an inference server would have seen, and the text with
the turn in it; what the second adds to the first is what the policy says, its end-of-turn token included. A turn whose
prompt continues the text so far extends the segment, any other begins a new one: the rule that rollouts follow, so
templates that drop old reasoning work as they do at inference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ngym import jsonl
from ngym.errors import UsageError

from .samples import Sample, Segment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Piece(NamedTuple):
    """A stretch of text that is tokenised on its own, as its writer (template or policy) wrote it."""

    text: str
    trained: bool


def read_demonstrations(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """The samples of a JSONL file of `{"messages": [...], "tools": [...]}`.

    Raises:
        UsageError: a line is no demonstration, or the chat template cannot render it; all such lines are named.
    """
    conversations: list[list[list[Piece]]] = []

    def problem(row: dict[str, Any]) -> str | None:
        found = _problem(row)
        if found is None:
            try:
                conversations.append(list(_segments(row, tokenizer)))
            except _Unrenderable as error:
                return str(error)
        return found

    for _ in jsonl.checked(path, problem):
        pass
    return _tokenize(conversations, tokenizer)


class _Unrenderable(Exception):
    """The chat template cannot say this conversation."""


def _problem(row: dict[str, Any]) -> str | None:
    messages = row.get("messages")
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        return 'no demonstration: it needs "messages", a list of {"role", "content"}'
    if not any(message["role"] == "assistant" for message in messages):
        return "nothing to train on: no message has the role 'assistant'"
    return None


def _segments(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[Piece]]:
    from jinja2 import TemplateError

    def render(messages: list[dict[str, Any]], prompt: bool) -> str:
        try:
            return str(
                tokenizer.apply_chat_template(
                    messages, tools=row.get("tools") or None, tokenize=False, add_generation_prompt=prompt
                )
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise _Unrenderable(f"the chat template refuses it: {error}") from error

    messages = row["messages"]
    segment: list[Piece] = []
    so_far = ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(messages[:index], prompt=True)
        whole = render(messages[: index + 1], prompt=False)
        if not whole.startswith(prompt):
            raise _Unrenderable(
                f"message {index}: the chat template does not begin the turn with its own generation prompt"
            )
        # what a template writes between two turns is white space, and belongs to the next prompt
        said = whole[len(prompt) :].rstrip()
        if segment and prompt.startswith(so_far):
            segment.append(Piece(prompt[len(so_far) :], False))
        else:
            if segment:
                yield segment
            segment = [Piece(prompt, False)]
        segment.append(Piece(said, True))
        so_far = prompt + said
    yield segment


def _tokenize(conversations: Sequence[list[list[Piece]]], tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    texts = {piece.text for segments in conversations for pieces in segments for piece in pieces}
    if not texts:
        return []
    order = sorted(texts)
    ids_of = dict(zip(order, tokenizer(order, add_special_tokens=False)["input_ids"], strict=True))
    return [Sample(tuple(_segment(pieces, ids_of) for pieces in segments)) for segments in conversations]


def _segment(pieces: list[Piece], ids_of: dict[str, list[int]]) -> Segment:
    token_ids: list[int] = []
    spans: list[tuple[int, int]] = []
    for piece in pieces:
        start = len(token_ids)
        token_ids += ids_of[piece.text]
        if piece.trained and len(token_ids) > start:
            spans.append((start, len(token_ids)))
    if not token_ids or (spans and spans[0][0] == 0):
        raise UsageError("the chat template renders an empty prompt, and nothing predicts the first token of a turn")
    return Segment(token_ids, spans)
