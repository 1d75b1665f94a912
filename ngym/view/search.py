"""Which rows contain a text? Lines are read and looked through, a moment at a time; what is known of a row is kept.

Letters match in either case. A text that stands only in keys of the JSON is not there: every row has a `reward`. Token
segments are not looked through.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import orjson

from ngym.view.index import Index
from ngym.view.line_record import without_segments
from ngym.view.query import Sought
from ngym.view.row_ids import LINE, PART_BITS

MOMENT_S = 0.25  # of reading, in one request
MOST_TEXTS = 8  # whose verdicts are kept
AT_ONCE = 128  # rows that are looked up together
MOST_BYTES = 4 << 20  # that are read together
UNKNOWN, ABSENT, PRESENT = 0, 1, 2


class Found(NamedTuple):
    """The rows so far, in the order that was asked for. scanned: the share of the candidates that was looked at."""

    rows: list[int]
    scanned: float


class Search:
    """What is known about the rows of one index. moment_s: so long is read at a time, and at least AT_ONCE rows."""

    def __init__(self, index: Index, moment_s: float = MOMENT_S) -> None:
        self._index = index
        self._moment_s = moment_s
        self._epoch: int | None = None
        self._texts: OrderedDict[str, _Text] = OrderedDict()
        self._asked: tuple[Sequence[int], Sequence[Sought]] | None = None
        self._unknown: Sequence[int] = ()  # of what was asked, in the order of the file
        self._looked_at = 0  # of these

    def among(self, candidates: Sequence[int], sought: Sequence[Sought], epoch: int) -> Found:
        """The candidates (rows by seq) that have, or have not, these texts, as far as a moment is enough to tell.

        Args:
            epoch: of the index: with another one, the rows are others.
        """
        if epoch != self._epoch:
            self._epoch, self._asked = epoch, None
            self._texts.clear()
        texts = [(self._text(each.text), PRESENT if each.wanted else ABSENT) for each in sought]
        while len(self._texts) > max(MOST_TEXTS, len(texts)):
            self._texts.popitem(last=False)
        if self._asked != (candidates, sought):
            self._asked = (candidates, sought)
            self._unknown = sorted(seq for seq in candidates if any(text.verdict(seq) == UNKNOWN for text, _ in texts))
            self._looked_at = 0
        self._looked_at += self._look([text for text, _ in texts], self._unknown[self._looked_at :])
        left = len(self._unknown) - self._looked_at
        rows = [seq for seq in candidates if all(text.verdict(seq) == wanted for text, wanted in texts)]
        return Found(rows, 1 - left / len(candidates) if left else 1.0)

    def _text(self, text: str) -> _Text:
        if text not in self._texts:
            self._texts[text] = _Text(text)
        self._texts.move_to_end(text)
        return self._texts[text]

    def _look(self, texts: Sequence[_Text], rows: Sequence[int]) -> int:
        """Into the first of these rows for a moment; at how many?"""
        deadline = time.monotonic() + self._moment_s
        done = 0
        while done < len(rows):
            some = rows[done : done + AT_ONCE]
            for seq, line in self._index.lines(some, MOST_BYTES):
                said = without_segments(line)
                lowered = said.lower()
                for text in texts:
                    text.note(seq, text.stands_in(said, lowered))
            done += len(some)
            if time.monotonic() >= deadline:
                break
        return done


class _Text:
    """A text, and of each row whether it is there."""

    def __init__(self, text: str) -> None:
        self._text = text.lower()
        self._needle = orjson.dumps(self._text)[1:-1]
        self._escaped = None if text.isascii() else json.dumps(self._text).encode()[1:-1].lower()
        self._marks: dict[int, bytearray] = {}

    def verdict(self, seq: int) -> int:
        marks = self._marks.get(seq >> PART_BITS)
        line = seq & LINE
        return marks[line] if marks is not None and line < len(marks) else UNKNOWN

    def note(self, seq: int, present: bool) -> None:
        marks = self._marks.setdefault(seq >> PART_BITS, bytearray())
        line = seq & LINE
        if line >= len(marks):
            marks.extend(bytes(max(line + 1, 2 * len(marks)) - len(marks)))
        marks[line] = PRESENT if present else ABSENT

    def stands_in(self, line: bytes, lowered: bytes) -> bool:
        """lowered: the line with its ASCII letters in lower case."""
        if self._escaped is None:
            return _stands_in(lowered, self._needle)
        whole = line.decode("utf-8", "replace").lower().encode()
        return _stands_in(whole, self._needle) or _stands_in(lowered, self._escaped)


def _stands_in(line: bytes, needle: bytes) -> bool:
    """Whether it stands anywhere but in a key, or in the middle of an escape."""
    place = line.find(needle)
    while place >= 0:
        if not _in_escape(line, place) and not _in_key(line, place + len(needle)):
            return True
        place = line.find(needle, place + 1)
    return False


def _in_escape(line: bytes, place: int) -> bool:
    r"""Whether this is the n of \n, or in the u00e9 of \u00e9."""
    start = line.rfind(b"\\", max(0, place - 5), place)
    if start < 0 or (start + 1 < place and line[start + 1 : start + 2] != b"u"):
        return False
    return _backslashes(line, start) % 2 == 0


def _backslashes(line: bytes, end: int) -> int:
    """How many stand directly before this place."""
    start = end
    while start > 0 and line[start - 1] == 0x5C:
        start -= 1
    return end - start


def _in_key(line: bytes, place: int) -> bool:
    """Whether the string that goes on here is a key: its end is followed by a colon."""
    while True:
        end = line.find(b'"', place)
        if end < 0:
            return False
        if _backslashes(line, end) % 2 == 0:
            return line[end + 1 : end + 9].lstrip().startswith(b":")
        place = end + 1
