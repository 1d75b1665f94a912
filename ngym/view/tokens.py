"""A rollout's segments token by token, with log-probabilities, and with texts if there is a tokenizer.

A tokenizer's pieces need not be whole characters. The text of a character is at the piece that completes it; the
pieces before it have an empty text, and every such piece says its bytes.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from ngym.errors import UsageError
from ngym.files.jsonl import BOM
from ngym.schema import Json, Segment
from ngym.view.file_scanner import NoRollout, whole

FILE = "tokenizer.json"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BLANK = "\u2581"  # how SentencePiece writes a space


def row_tokens(line: bytes, advantage: float | None, tokenizer: Path | None) -> Json:
    """The segments of a row, as /tokens returns them.

    Args:
        line: the row. advantage: of the rollout, and so of its segments.
        tokenizer: a tokenizer.json.
    """
    try:
        row = whole(line.removeprefix(BOM))
    except NoRollout as error:  # the index does not look into segments
        return {"segments": [], "note": f"the tokens of this row cannot be shown: {error}"}
    segments: list[Segment] = (row.get("ng") or {}).get("segments") or []
    note = (
        None if segments else "this rollout has no token ids; collect with a policy that sends them (models/vllm does)"
    )
    pieces: Callable[[int], bytes] | None = None
    if segments and tokenizer is None:
        note = "no tokenizer is known, so the ids are shown; name one with --tokenizer FOLDER"
    elif segments and tokenizer is not None:
        try:
            pieces = _pieces(tokenizer)
        except UsageError as error:
            note = str(error)
    try:
        decoded = [{"tokens": _tokens(segment, pieces), "advantage": advantage} for segment in segments]
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:  # a file may say anything
        return {"segments": [], "note": f"the token segments of this row have an unknown format: {error}"}
    return {"segments": decoded, "note": note}


def tokenizer_file(model_path: Path | None, output: Path) -> Path | None:
    """The tokenizer.json of a run's policy: the one that was named, else one beside the rollouts, else what the run's record names."""
    folders = [output.parent, output.parent / "policy", *_recorded_models(output)]
    candidates = (
        [model_path, *([model_path / FILE] if model_path else [])]
        if model_path
        else [folder / FILE for folder in folders]
    )
    return next((path for path in candidates if path and path.name.endswith(".json") and path.is_file()), None)


def check(path: Path) -> None:
    """
    Raises:
        UsageError: there is no tokenizer.
    """
    file = tokenizer_file(path, path)
    if file is None:
        raise UsageError(f"--tokenizer {path}: there is no {FILE}; name the folder of a Hugging Face model")
    _pieces(file)


def _recorded_models(output: Path) -> Iterator[Path]:
    """The folders that out_run.json names as models; by the config's folder, which often is that of the rollouts."""
    try:
        record = orjson.loads(output.with_name(f"{output.stem}_run.json").read_bytes())
        services = record["config"]["services"].values()
        models = [each["model"] for each in services if each.get("kind") == "model"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return  # there is no record, or it is not our collector's
    paths = [Path(model) for model in models if isinstance(model, str)]
    yield from (folder / model for model in paths for folder in (output.parent, Path()))


def _tokens(segment: Segment, pieces: Callable[[int], bytes] | None) -> list[Json]:
    tokens: list[Json] = [
        {"id": id, "text": None, "logprob": None, "trained": False, "version": None} for id in segment["token_ids"]
    ]
    logprobs = iter(segment["logprobs"])
    for start, end in segment["mask"]:
        for token in tokens[start:end]:
            token |= {"logprob": next(logprobs, None), "trained": True}
    for start, end, version in segment["policy_version"]:
        for token in tokens[start:end]:
            token["version"] = version
    if pieces is not None:
        _fill_texts(tokens, [pieces(id) for id in segment["token_ids"]])
    return tokens


def _fill_texts(tokens: list[Json], pieces: list[bytes]) -> None:
    """Add the texts."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for place, (token, piece) in enumerate(zip(tokens, pieces, strict=True)):
        is_partial = bool(decoder.getstate()[0])
        token["text"] = decoder.decode(piece, final=place == len(pieces) - 1)
        if is_partial or decoder.getstate()[0] or "\ufffd" in token["text"]:
            token["bytes"] = piece.hex(" ")


@lru_cache(maxsize=8)
def _pieces(file: Path) -> Callable[[int], bytes]:
    """The text of each token id. Raises UsageError: there is no such tokenizer, or no library to read it."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UsageError("texts of tokens need the package tokenizers: pip install tokenizers") from None
    try:
        settings = orjson.loads(file.read_bytes())
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001  (the library raises nothing narrower)
        raise UsageError(f"{file}: no tokenizer: {error}") from None
    special = {id: token.content.encode() for id, token in tokenizer.get_added_tokens_decoder().items()}
    spelled: Callable[[str], bytes] = _byte_level if _has(settings, "ByteLevel") else _sentence_piece

    def piece(id: int) -> bytes:
        if id in special:
            return special[id]
        token = tokenizer.id_to_token(id)
        return f"<{id}?>".encode() if token is None else spelled(token)

    return piece


def _has(settings: Json, kind: str) -> bool:
    """Whether the decoder, or one of its steps, is of this kind."""
    decoder: dict[str, Any] = settings.get("decoder") or {}
    return any(each.get("type") == kind for each in (decoder, *(decoder.get("decoders") or ())))


def _byte_level(token: str) -> bytes:
    table = _byte_of()
    return b"".join(table.get(character) or character.encode() for character in token)


def _sentence_piece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes.fromhex(byte[1]) if byte else token.replace(_BLANK, " ").encode()


@lru_cache(maxsize=1)
def _byte_of() -> dict[str, bytes]:
    """Byte-level BPE writes each byte as a character that can be seen: the printable ones as they are, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): bytes([byte]) for byte in printable} | {
        chr(0x100 + n): bytes([byte]) for n, byte in enumerate(hidden)
    }
