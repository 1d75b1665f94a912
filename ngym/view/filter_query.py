"""Queries over the rows of a run: filters, order, and text search.

query      = term {" " term}                                            all must hold
term       = ["-"] (word | quoted | name ":" value {"," value} | name comparison number)
name       = word | quoted
comparison = "<" | "<=" | ">" | ">=" | "=" | "!="
value      = word | quoted; `null` is an unknown value, `*` in a word matches anything

Letters match in either case. A text that occurs only in keys of the JSON does not match: every row has a `reward`. Token
segments are not looked through.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from ngym.errors import ServiceError
from ngym.view.file_scanner import without_segments
from ngym.view.growing_index import LINE, LOWER, PART_BITS, Index

MEAN = "CASE WHEN t.scored THEN t.total / t.scored END"
NUMBERS = {
    "reward": "r.reward",
    "task": "r.task",
    "rollout": "r.rollout",
    "turns": "r.turns",
    "tool_calls": "r.tool_calls",
    "tool_errors": "r.tool_errors",
    "tokens": "r.output_tokens",
    "output_tokens": "r.output_tokens",
    "input_tokens": "r.input_tokens",
    "seconds": "r.seconds",
    "attempt": "r.attempt",
    "policy_version": "r.policy_version",
    "learned": "r.learned",
    "group_mean": f"({MEAN})",
    "group_size": "t.n",
    "advantage": f"(r.reward - ({MEAN}))",
}
WORDS = {
    "agent": "r.agent",
    "status": "r.status",
    "stop": "r.stop_reason",
    "stop_reason": "r.stop_reason",
    "failure": "r.failure",
    "task_id": "x.task_id",
    "rollout_id": "x.rollout_id",
    "run_id": "x.run_id",
}
SORTED_ONLY = {"row": "r.seq", "prompt": "x.prompt", "answer": "x.answer"}
STATUSES = ("ok", "truncated", "unscored", "failed")
NULL = "null"
COMPONENT = "component."  # before the name of a part of the reward
FROM = "rows r LEFT JOIN groups t ON t.g = r.g LEFT JOIN texts x ON x.seq = r.seq"
MAX_CHARS = 4000
MAX_TERMS = 50
_NAMED = re.compile(
    r'(?:"(?P<quoted>[^"\\]+)"|(?P<name>[^\s":<>=!]+?))(?P<sign><=|>=|!=|[:<>=])(?P<value>.*)', re.DOTALL
)
_ESCAPE = re.compile(rb"\\u([0-9a-f]{4})")
_VALUE = re.compile(r'"((?:[^"\\]|\\.)*)"|([^",]*)')
TIME_SLICE_S = 0.25  # of reading, in one request
MAX_TEXTS = 8  # whose verdicts are kept
LOOKUP_ROWS = 128  # rows that are looked up together
MAX_BYTES = 4 << 20  # that are read together


class WrongFilter(ServiceError):
    """A term that says nothing; the message names it, and a near one."""

    status = 400
    title = "The filter is not valid"


class TextCondition(NamedTuple):
    """A text to look for in the whole row. is_required: whether it has to be there, or must not."""

    text: str
    is_required: bool


@dataclass(frozen=True)
class Query:
    """where: a condition on FROM, with its parameters."""

    where: str
    parameters: tuple[Any, ...]
    texts: tuple[TextCondition, ...]


def parse(text: str, fields: Collection[str] = ()) -> Query:
    """
    Args:
        fields: the names of the run's own scalar fields.

    Raises:
        WrongFilter: a term is wrong.
    """
    if len(text) > MAX_CHARS:
        raise WrongFilter(f"the filter has {len(text):,} characters; at most {MAX_CHARS:,} are read")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise WrongFilter("the filter is not UTF-8")
    conditions: list[str] = []
    parameters: list[Any] = []
    texts: list[TextCondition] = []
    for term in _terms(text):
        bare = term.removeprefix("-")
        is_positive = bare == term
        match = _NAMED.fullmatch(bare)
        if match is None:
            texts.append(TextCondition(_unquoted(bare, term), is_positive))
            continue
        condition, values = _condition(term, match["quoted"] or match["name"], match["sign"], match["value"], fields)
        conditions.append(f"({condition}) IS {'' if is_positive else 'NOT '}TRUE")
        parameters += values
    return Query(" AND ".join(conditions) or "TRUE", tuple(parameters), tuple(texts))


def order(text: str, fields: Collection[str] = ()) -> tuple[str, tuple[Any, ...]]:
    """An ORDER BY for `-reward,tokens`; what is null comes last, and what is equal in the order of the file.

    Raises:
        WrongFilter: there is no such key.
    """
    keys, parameters = [], []
    for key in filter(None, (part.strip() for part in text.split(","))):
        name = key.removeprefix("-")
        sql = _expression(name, fields)
        if sql is None and name in SORTED_ONLY:
            sql = SORTED_ONLY[name], []
        if sql is None:
            near = _hint(name, [*NUMBERS, *WORDS, *SORTED_ONLY, *fields])
            raise WrongFilter(f"nothing to sort by is called {_quoted(name)}{near}")
        expression, values = sql
        keys.append(f"{expression} IS NULL, {expression} {'DESC' if name != key else 'ASC'}")
        parameters += [*values, *values]
    return ", ".join([*keys, "r.seq"]), tuple(parameters)


def _terms(text: str) -> list[str]:
    """The parts between spaces outside of quotes."""
    result, term, quoted, escaped = [], "", False, False
    for character in text:
        if character.isspace() and not quoted:
            result.append(term)
            term = ""
            continue
        term += character
        if character == '"' and not escaped:
            quoted = not quoted
        escaped = quoted and character == "\\" and not escaped
    if quoted:
        raise WrongFilter(f"the quote in {_quoted(term)} does not end; close it, or leave it out")
    terms = [term for term in [*result, term] if term]
    if len(terms) > MAX_TERMS:
        raise WrongFilter(f"the filter has {len(terms)} terms; at most {MAX_TERMS} are read")
    return terms


def _unquoted(bare: str, term: str) -> str:
    text = _plain(bare[1:-1]) if len(bare) > 1 and bare[0] == bare[-1] == '"' else bare
    if not text:
        raise WrongFilter(f'nothing to look for in {_quoted(term)}; write a word or "a text in quotes" after it')
    return text


def _plain(quoted: str) -> str:
    return re.sub(r"\\(.)", r"\1", quoted, flags=re.DOTALL)


def _condition(term: str, name: str, sign: str, value: str, fields: Collection[str]) -> tuple[str, list[Any]]:
    sql = _expression(name, fields)
    if sql is None:
        raise WrongFilter(_unknown(term, name, fields))
    expression, own = sql
    if not value:
        raise WrongFilter(f"no value in {_quoted(term)}; say {name}{sign}VALUE, or {name}:null for what is not known")
    if sign in ("<", "<=", ">", ">="):
        number = _number(term, value)
        is_number = f"typeof({expression}) IN ('integer', 'real')"
        return f"{is_number} AND {expression} {sign} ?", [*own, *own, number]
    alternatives = [_equals(term, name, expression, own, each) for each in _values(term, value)]
    condition = " OR ".join(text for text, _ in alternatives)
    parameters = [each for _, values in alternatives for each in values]
    return (f"NOT ({condition})" if sign == "!=" else condition), parameters


def _equals(term: str, name: str, expression: str, own: list[Any], value: tuple[str, bool]) -> tuple[str, list[Any]]:
    text, quoted = value
    if text == NULL and not quoted:
        return f"{expression} IS NULL", own
    if name in NUMBERS or name.startswith(COMPONENT):
        return f"{expression} = ?", [*own, _number(term, text)]
    if name == "status" and text not in STATUSES:
        raise WrongFilter(
            f"no status {_quoted(text)} in {_quoted(term)}{_hint(text, STATUSES)}; there are {', '.join(STATUSES)}"
        )
    if "*" in text and not quoted:
        pattern = re.sub(r"([\\%_])", r"\\\1", text).replace("*", "%")
        if not pattern.isascii():
            return f"{LOWER}({expression}) LIKE ? ESCAPE '\\'", [*own, pattern.lower()]
        return f"{expression} LIKE ? ESCAPE '\\'", [*own, pattern]
    if not text.isascii():  # SQLite knows the case of ASCII letters only
        return f"{LOWER}({expression}) = ?", [*own, text.lower()]
    if name in WORDS:
        return f"{expression} = ? COLLATE NOCASE", [*own, text]
    if text in ("true", "false") and not quoted:
        return f"{expression} IN (?, ?)", [*own, text == "true", text]
    number = _maybe_number(text)
    if number is None or quoted:
        return f"{expression} = ? COLLATE NOCASE", [*own, text]
    return f"({expression} = ? OR {expression} = ?)", [*own, text, *own, number]


def _values(term: str, value: str) -> list[tuple[str, bool]]:
    """The alternatives, and whether each stood in quotes."""
    values, place = [], 0
    while place <= len(value):
        match = _VALUE.match(value, place)
        assert match is not None
        end = match.end()
        text, quoted = (_plain(match[1]), True) if match[1] is not None else (match[2], False)
        if (end < len(value) and value[end] != ",") or not (text or quoted):
            raise WrongFilter(
                f"the values in {_quoted(term)} are not parted by commas; put a value with quotes or commas in quotes"
            )
        values.append((text, quoted))
        place = end + 1
    return values


def _expression(name: str, fields: Collection[str]) -> tuple[str, list[Any]] | None:
    """The SQL for a name, and its parameters."""
    known = NUMBERS.get(name) or WORDS.get(name)
    if known is not None:
        return known, []
    if name.startswith(COMPONENT):
        return "json_extract(x.components, ?)", [_path(name.removeprefix(COMPONENT))]
    return ("json_extract(x.fields, ?)", [_path(name)]) if name in fields else None


def _path(name: str) -> str:
    return f'$."{name}"'


def _number(term: str, value: str) -> float:
    number = _maybe_number(value)
    if number is None:
        raise WrongFilter(f"{_quoted(value)} in {_quoted(term)} is no number")
    return number


def _maybe_number(value: str) -> float | int | None:
    try:
        number = float(value)
    except ValueError:
        return None
    if not math.isfinite(number) or "_" in value:
        return None
    return int(value) if re.fullmatch(r"[-+]?\d{1,18}", value, re.ASCII) else number


def _unknown(term: str, name: str, fields: Collection[str]) -> str:
    near = _hint(name, [*NUMBERS, *WORDS, *fields])
    return f"no field {_quoted(name)}{near} in {_quoted(term)}; to look for the text itself, put it in quotes"


def _hint(name: str, names: Collection[str]) -> str:
    matches = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


UNKNOWN, ABSENT, PRESENT = 0, 1, 2


class QueryResult(NamedTuple):
    """The rows so far, in the order that was asked for. scanned: the share of the candidates that was looked at."""

    rows: list[int]
    scanned: float


class Search:
    """A search in the rows of one index. moment_s: the seconds that are read at a time, but at least LOOKUP_ROWS rows."""

    def __init__(self, index: Index, moment_s: float = TIME_SLICE_S) -> None:
        self._index = index
        self._moment_s = moment_s
        self._epoch: int | None = None
        self._texts: OrderedDict[str, _Text] = OrderedDict()
        self._last_search: tuple[Sequence[int], Sequence[TextCondition]] | None = None
        self._unknown: Sequence[int] = ()  # of what was asked, in the order of the file
        self._searched = 0  # of these

    def filter(self, candidates: Sequence[int], conditions: Sequence[TextCondition], epoch: int) -> QueryResult:
        """The candidates (rows by seq) that have, or have not, these texts, as far as a moment is enough to tell.

        Args:
            epoch: of the index: with another one, the rows are others.
        """
        if epoch != self._epoch:
            self._epoch, self._last_search = epoch, None
            self._texts.clear()
        texts = [(self._text(each.text), PRESENT if each.is_required else ABSENT) for each in conditions]
        while len(self._texts) > max(MAX_TEXTS, len(texts)):
            self._texts.popitem(last=False)
        if self._last_search != (candidates, conditions):
            self._last_search = (candidates, conditions)
            self._unknown = sorted(seq for seq in candidates if any(text.verdict(seq) == UNKNOWN for text, _ in texts))
            self._searched = 0
        self._searched += self._search_rows([text for text, _ in texts], self._unknown[self._searched :])
        remaining = len(self._unknown) - self._searched
        rows = [seq for seq in candidates if all(text.verdict(seq) == verdict for text, verdict in texts)]
        return QueryResult(rows, 1 - remaining / len(candidates) if remaining else 1.0)

    def _text(self, text: str) -> _Text:
        if text not in self._texts:
            self._texts[text] = _Text(text)
        self._texts.move_to_end(text)
        return self._texts[text]

    def _search_rows(self, texts: Sequence[_Text], rows: Sequence[int]) -> int:
        """Read the first of these rows, for `moment_s` at most, and note the texts in them; returns how many were read."""
        deadline = time.monotonic() + self._moment_s
        position = 0
        while position < len(rows):
            some = rows[position : position + LOOKUP_ROWS]
            for seq, line in self._index.lines(some, MAX_BYTES):
                text_of_row = without_segments(line)
                lowered = text_of_row.lower()
                for text in texts:
                    text.note(seq, text.occurs_in(text_of_row, lowered))
            position += len(some)
            if time.monotonic() >= deadline:
                break
        return position


class _Text:
    """A text, and of each row whether it is there."""

    def __init__(self, text: str) -> None:
        self._text = text.lower()
        self._needle = orjson.dumps(self._text)[1:-1]
        self._escaped = None if text.isascii() else json.dumps(self._text).encode()[1:-1]
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

    def occurs_in(self, line: bytes, lowered: bytes) -> bool:
        """lowered: the line with its ASCII letters in lower case."""
        if self._escaped is None:
            return _occurs_in(lowered, self._needle)
        whole = line.decode("utf-8", "replace").lower().encode()
        return _occurs_in(whole, self._needle) or _occurs_in(_ESCAPE.sub(_lower_case, lowered), self._escaped)


def _lower_case(escape: re.Match[bytes]) -> bytes:
    """The escape of a letter in lower case; of other characters, and where it is not one character, unchanged."""
    letter = chr(int(escape[1], 16)).lower()
    return b"\\u%04x" % ord(letter) if len(letter) == 1 else escape[0]


def _occurs_in(line: bytes, needle: bytes) -> bool:
    """Whether it occurs outside of keys and not in the middle of an escape."""
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
    """The number of backslashes directly before this position."""
    start = end
    while start > 0 and line[start - 1] == 0x5C:
        start -= 1
    return end - start


def _in_key(line: bytes, place: int) -> bool:
    """Whether the string that continues here is a key: a colon follows its end."""
    while True:
        end = line.find(b'"', place)
        if end < 0:
            return False
        if _backslashes(line, end) % 2 == 0:
            return line[end + 1 : end + 9].lstrip().startswith(b":")
        place = end + 1
