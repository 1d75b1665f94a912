"""Reads rollout files block by block in helper processes; batches arrive in the order of the file.

A helper reads jobs, one JSON object a line, and answers each with a batch, one JSON object a line.
"""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, BinaryIO, NamedTuple, NoReturn, Self

import orjson

from ngym.errors import NgymError
from ngym.files.jsonl import BOM
from ngym.grading.answers import last_text
from ngym.rollout import function_calls
from ngym.runtime.cpu_threads import usable_cores
from ngym.schema import Json, agent_name, is_failed_attempt, is_reward, version_problem

SHOWN_CHARS = 160  # of a prompt and of an answer
FIELD_CHARS = 200  # a longer text is not a field to filter by
MAX_FIELDS = 40
TRAINER_FIELD = "_ng_train"  # where a trainer says how many batches the weights had learned
KNOWN = frozenset({
    "responses_create_params", "response", "agent_ref", "reward", "reward_components", "reward_range", "ng", "failure",
    "attempt",
})  # fmt: skip
SCALARS = frozenset({str, int, float, bool})
_SEGMENTS = b',"segments":[{"token_ids":['
# What ends each list of a segment, and whether it is a list of numbers, not of lists.
_PARTS = ((b'],"mask":[', True), (b'],"logprobs":[', False), (b'],"policy_version":[', True))
_NEXT = b',{"token_ids":['
_IMAGES, _EXPERTS = b',"images":["', b',"routed_experts":{"shape":['  # what a segment may have behind them
_EXPERTS_QUOTES = 12  # of its four keys and two texts


class NoRollout(Exception):
    """The line is not a rollout or a failure; the message says why."""


class ScannedLine(NamedTuple):
    """One line of a rollout file.

    line: from 0. start, size: its bytes. g: the group that was sampled together, a digest of agent, task id and task index.
    task_key: the task, a digest of agent and task id (of agent and task index where the row has no id); a task that a
    training run draws several times has several groups. Both are None for a row with neither.

    From `task_id` on are texts, which are kept apart: they are most of the bytes, and few questions need them.
    """

    line: int
    start: int
    size: int
    g: int | None
    task_key: int | None
    task: int | None
    rollout: int | None
    agent: str | None
    reward: float | None
    status: str
    stop_reason: str | None
    turns: int | None
    tool_calls: int | None
    tool_errors: int | None
    input_tokens: int | None
    output_tokens: int | None
    seconds: float | None
    attempt: int | None
    policy_version: int | None
    learned: int | None
    failure: str | None
    tokens: int
    task_id: str | None
    rollout_id: str | None
    run_id: str | None
    prompt: str | None
    answer: str | None
    components: str | None
    fields: str | None


FIRST_TEXT = ScannedLine._fields.index("task_id")


def record(text: bytes, line: int, start: int, size: int) -> ScannedLine:
    """text: the line without its end. Raises NoRollout: it is corrupt, of a newer format, or something else."""
    row = parse_line(text)
    failure = _object(row, "failure") if is_failed_attempt(row) else {}
    if not failure and "response" not in row:
        raise NoRollout("no rollout: it has neither 'response' nor 'failure'")
    trace, response = _object(row, "ng"), _object(row, "response")
    if problem := version_problem(trace):
        raise NoRollout(problem)
    usage, output = _object(response, "usage"), _items(response.get("output"))
    task, task_id = _exact_integer(row.get("_ng_task_index")), _text(trace.get("task_id"))
    agent = agent_name(row)
    reward = None if failure else _number(row.get("reward"))
    # by position: with names, this line alone would cost a tenth of the whole
    return ScannedLine(
        line,
        start,
        size,
        _digest(agent, task_id, task),
        _digest(agent, task_id, None if task_id is not None else task),
        task,
        _exact_integer(row.get("_ng_rollout_index")),
        agent,
        reward,
        "failed" if failure else _text(trace.get("status")) or ("unscored" if reward is None else "ok"),
        _text(trace.get("stop_reason")),
        _exact_integer(trace.get("turns")),
        _exact_integer(trace["tool_calls"]) if "tool_calls" in trace else _calls(output, failure),
        _exact_integer(trace.get("tool_errors")),
        _exact_integer(usage.get("input_tokens")),
        _exact_integer(usage.get("output_tokens")),
        _number(_object(trace, "timings").get("total_s")),
        _exact_integer(row.get("attempt") if failure else trace.get("attempt")),
        _largest(trace.get("policy_version")),
        _exact_integer(_object(row, TRAINER_FIELD).get("oldest")),
        _text(failure.get("class")) or "unknown" if failure else None,
        int(bool(trace.get("segments"))),
        task_id,
        _text(trace.get("rollout_id")),
        _text(trace.get("run_id")),
        _prompt(_object(row, "responses_create_params").get("input")),
        _text(failure.get("message")) if failure else _answer(output),
        _dump(_components(row, trace)),
        _dump(_fields(row)),
    )


def parse_line(text: bytes) -> Json:
    """The line as an object; of its token segments only that there are some, because they are most of its bytes.

    Raises:
        NoRollout: it is not a JSON object.
    """
    return whole(without_segments(text.removeprefix(BOM)))


def whole(text: bytes) -> Json:
    """The line as an object. Raises NoRollout: it is not a JSON object."""
    try:
        row = orjson.loads(text)
    except orjson.JSONDecodeError:
        row = _leniently(text)
    if not isinstance(row, dict):
        raise NoRollout(f"not a JSON object but {type(row).__name__}")
    return row


def without_segments(text: bytes) -> bytes:
    """Each list of segments as the collector writes them becomes `[0]`. In a JSON string the quotes would be escaped."""
    place = text.find(_SEGMENTS)
    if place < 0:
        return text
    parts, copied_to = [], 0
    while place >= 0:
        end = _segments_end(text, place + len(_SEGMENTS))
        if end is None:
            return text
        parts += [text[copied_to : place + len(b',"segments":[')], b"0]"]
        copied_to = end
        place = text.find(_SEGMENTS, end)
    return b"".join([*parts, text[copied_to:]])


def _segments_end(text: bytes, place: int) -> int | None:
    """The end of the list that holds this segment. place: its first token id. None: it is not as the collector writes
    it.
    """
    while True:
        start = place
        for part, is_flat in _PARTS:
            place = text.find(b"]" if is_flat else part, place)  # one byte is found ten times as fast as several
            if place < 0 or not text.startswith(part, place):
                return None
            place += len(part)
        end, quotes = text.find(b"}", place), 2 * len(_PARTS)
        if text.find(_EXPERTS, place, end) >= 0:
            quotes += _EXPERTS_QUOTES
            end = text.find(b"}", end + 1)
        if (images := text.find(_IMAGES, place, end)) >= 0:
            quotes += text.count(b'"', images, text.find(b"]", images + len(_IMAGES), end))
        # A check at the speed of a copy: rejects strings and the remains of a crash; digits are not checked
        if end < 0 or not (text.find(b"\0", start, end) < 0 and text.count(b'"', start, end) == quotes):
            return None
        if text.startswith(b"]", end + 1):
            return end + 2
        if not text.startswith(_NEXT, end + 1):
            return None
        place = end + 1 + len(_NEXT)


def _leniently(text: bytes) -> Any:
    """JSON with half of a surrogate pair in it, which other programs write; NoRollout for a text that is not JSON."""
    try:
        row = json.loads(text, parse_constant=_no_constant)
        return orjson.loads(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        raise NoRollout(f"not JSON: {error}"[:FIELD_CHARS]) from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _object(row: Json, name: str) -> Json:
    value = row.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise NoRollout(f"no rollout: {name!r} must be an object, not {type(value).__name__}")
    return value


def _items(output: Any) -> list[Json]:
    items = _list(output)
    for item in items:
        if not isinstance(item, dict):
            raise NoRollout("no rollout: the response's 'output' must be a list of objects")
    return items


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str | None:
    return value[:FIELD_CHARS] if isinstance(value, str) else None


def _exact_integer(value: Any) -> int | None:
    """As far as a browser's numbers are exact."""
    return value if type(value) is int and abs(value) < 1 << 53 else None


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and is_reward(value) else None


def _largest(versions: Any) -> int | None:
    return max([version for version in _list(versions) if _exact_integer(version) is not None], default=None)


def _calls(output: list[Json], failure: Json) -> int | None:
    return None if failure else len(list(function_calls(output)))


def _digest(agent: str | None, task_id: str | None, task: int | None) -> int | None:
    if task_id is None and task is None:
        return None
    key = f"{agent}\0{task_id}\0{task}".encode()
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big", signed=True)


def _prompt(value: Any) -> str | None:
    """The beginning of the last user message."""
    if isinstance(value, str):
        return value.strip()[:SHOWN_CHARS] or None
    for item in reversed(_list(value)):
        if isinstance(item, dict) and item.get("role") == "user":
            content = item.get("content")
            if not isinstance(content, str):
                parts = (part.get("text") for part in _list(content) if isinstance(part, dict))
                content = "".join(part for part in parts if isinstance(part, str))
            return content.strip()[:SHOWN_CHARS] or None
    return None


def _answer(output: list[Json]) -> str | None:
    """The end of the last assistant message."""
    try:
        text = last_text({"output": output})
    except (AttributeError, TypeError):
        raise NoRollout("no rollout: the content of its last message has an unknown format") from None
    return text.strip()[-SHOWN_CHARS:] or None


def _components(row: Json, trace: Json) -> Json:
    parts = _object(trace, "reward_components") or _object(row, "reward_components")
    return {name: _number(value) for name, value in parts.items()}


def _fields(row: Json) -> Json:
    """The other scalars of the row."""
    names = [name for name, value in row.items() if type(value) in SCALARS and name not in KNOWN and name[:4] != "_ng_"]
    fields = {name: row[name] for name in names[:MAX_FIELDS] if '"' not in name}
    return {name: value for name, value in fields.items() if type(value) is not str or len(value) <= FIELD_CHARS}


def _dump(value: Json) -> str | None:
    return orjson.dumps(value).decode() if value else None


MAX_LINE_BYTES = 256 << 20
REPORTED = 20  # bad lines of a batch that are named
BLOCK_BYTES = 8 << 20
FIRST_BYTES = 1 << 20  # the first block of a file, so that its rows can be shown at once
SMALL_BYTES = 16 << 20  # as little is read in this process
MAX_HELPERS = 4
JOBS_AHEAD = 2  # jobs that a helper is given before it has answered
PIPE_BYTES = 1 << 20
ONE_FILE = threading.Lock()  # is read by helpers at a time: more would only compete
SET_PIPE_SIZE = getattr(fcntl, "F_SETPIPE_SZ", 1031)

BUFFER_BYTES, SKIPPED_BYTES = 256 << 10, 1 << 20
_G, _KEY, _TASK, _TASK_ID, _AGENT = map(ScannedLine._fields.index, ("g", "task_key", "task", "task_id", "agent"))
_REWARD, _FAILURE = (ScannedLine._fields.index(name) for name in ("reward", "failure"))


class ScanJob(NamedTuple):
    """The lines that begin in [start, end) of a file that had `size` bytes."""

    path: str
    start: int
    end: int
    size: int


@dataclass
class ScannedBatch:
    """The rows of a block; lines are counted from its first. end: of the last line, the start of an incomplete one.

    rows, texts: the two parts of each record, with its line before the texts; as they go into the index's tables.
    """

    end: int
    lines: int = 0
    rows: list[Any] = field(default_factory=list)
    texts: list[Any] = field(default_factory=list)
    bad: list[tuple[int, str]] = field(default_factory=list)
    bad_lines: int = 0
    groups: list[Any] = field(default_factory=list)
    fields: list[str] = field(default_factory=list)


class GroupSum:
    """A group's rollouts in one batch, without failed attempts, to be added to those of others."""

    __slots__ = ("first", "n", "scored", "total")

    def __init__(self, row: tuple[Any, ...]) -> None:
        self.first = row
        self.n = self.scored = 0
        self.total = 0.0

    def add(self, row: tuple[Any, ...]) -> None:
        if row[_FAILURE] is not None:
            return
        self.n += 1
        reward = row[_REWARD]
        if reward is not None:
            self.scored += 1
            self.total += reward

    def values(self) -> tuple[Any, ...]:
        """In the order of the index's table."""
        g, key, task, task_id, agent = (self.first[place] for place in (_G, _KEY, _TASK, _TASK_ID, _AGENT))
        return (g, key, task, task_id, agent, self.n, self.scored, self.total, self.first[0])


def scan(job: ScanJob) -> ScannedBatch:
    """
    Raises:
        OSError: the file cannot be read.
    """
    # One buffer, read line by line: large blocks of their own would cost more in fresh memory than their parsing does.
    with open(job.path, "rb", buffering=BUFFER_BYTES) as file:
        place = _first_line(file, job)
        builder = _BatchBuilder(ScannedBatch(place))
        while place < job.end:
            text = file.readline(min(MAX_LINE_BYTES, job.size - place))
            if not text or not builder.add(text, place):
                break  # a torn last line
            place += len(text)
            if not text.endswith(b"\n") and place < job.size:
                place = _next_line(file, place, job.size)
            builder.batch.end = place
        return builder.whole()


def _first_line(file: BinaryIO, job: ScanJob) -> int:
    """The first line of this block: one that began before belongs to the block before."""
    if job.start == 0:
        return 0
    file.seek(job.start - 1)
    return job.start if file.read(1) == b"\n" else _next_line(file, job.start, job.size)


def _next_line(file: BinaryIO, place: int, size: int) -> int:
    """Behind the line in which this place is."""
    while place < size:
        text = file.readline(min(SKIPPED_BYTES, size - place))
        place += len(text)
        if not text or text.endswith(b"\n"):
            break
    return place


class _BatchBuilder:
    """A batch while it is made."""

    def __init__(self, batch: ScannedBatch) -> None:
        self.batch = batch
        self._groups: dict[int, GroupSum] = {}
        self._fields: set[str] = set()

    def add(self, text: bytes, start: int) -> bool:
        """Whether the line counts: one without its end does if it is an object, of which no beginning is one."""
        batch = self.batch
        ended = text.endswith(b"\n")
        if text.isspace():
            batch.lines += ended
            return ended
        try:
            row = record(text, batch.lines, start, len(text) - ended)
        except NoRollout as error:
            if not ended and len(text) < MAX_LINE_BYTES:
                return False
            batch.bad_lines += 1
            if len(batch.bad) < REPORTED:
                batch.bad.append((batch.lines, str(error)))
        else:
            self._add(row)
        batch.lines += 1
        return True

    def _add(self, row: ScannedLine) -> None:
        self.batch.rows.append(row[:FIRST_TEXT])
        self.batch.texts.append((row.line, *row[FIRST_TEXT:]))
        if row.fields is not None:
            self._fields.update(orjson.loads(row.fields))
        if row.g is not None:
            group = self._groups.get(row.g)
            if group is None:
                group = self._groups[row.g] = GroupSum(row)
            group.add(row)

    def whole(self) -> ScannedBatch:
        self.batch.groups = [group.values() for group in self._groups.values()]
        self.batch.fields = sorted(self._fields)
        return self.batch


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Until there are no more jobs. A file that cannot be read is an answer, too."""
    for line in iter(requests.readline, b""):
        try:
            batch = scan(ScanJob(**orjson.loads(line)))
            message: Any = batch
        except OSError as error:
            message = {"error": error.strerror or str(error)}
        answers.write(orjson.dumps(message) + b"\n")
        answers.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)


def scan_rows(path: str, start: int, size: int) -> Iterator[ScannedBatch]:
    """The rows in the bytes from `start` to `size`, in order.

    Raises:
        OSError: the file cannot be read. NgymError: a helper has ended.
    """
    jobs = list(_jobs(path, start, size))
    if size - start <= SMALL_BYTES:
        yield from map(scan, jobs)
        return
    with ONE_FILE, ExitStack() as stack:
        helpers = [stack.enter_context(_Helper()) for _ in range(min(MAX_HELPERS, usable_cores()))]
        yield scan(jobs[0])
        yield from _share(helpers, jobs[1:])


def _jobs(path: str, start: int, size: int) -> Iterator[ScanJob]:
    end = start + FIRST_BYTES
    while start < size:
        yield ScanJob(path, start, min(end, size), size)
        start, end = end, end + BLOCK_BYTES


def _share(helpers: Sequence[_Helper], jobs: Sequence[ScanJob]) -> Iterator[ScannedBatch]:
    """Job i is helper i mod n's; so the answers are in order without a queue."""
    count = len(helpers)
    for place, job in enumerate(jobs[: count * JOBS_AHEAD]):
        helpers[place % count].give(job)
    for place in range(len(jobs)):
        helper = helpers[place % count]
        batch = helper.take()
        if place + count * JOBS_AHEAD < len(jobs):
            helper.give(jobs[place + count * JOBS_AHEAD])
        yield batch


class _Helper:
    """A process that scans."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            # -P: a module that lies in the folder from which the viewer was started is not ours
            [sys.executable, "-P", "-m", "ngym.view.file_scanner"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        with suppress(OSError):  # a smaller pipe works, too
            fcntl.fcntl(self._out.fileno(), SET_PIPE_SIZE, PIPE_BYTES)

    def give(self, job: ScanJob) -> None:
        with suppress(BrokenPipeError):  # `take` reports it
            self._in.write(orjson.dumps(job._asdict()) + b"\n")
            self._in.flush()

    def take(self) -> ScannedBatch:
        line = self._out.readline()
        if not line:
            raise NgymError(
                f"a process that reads the file ended with code {self._process.wait()}; start ng_view again"
            )
        message = orjson.loads(line)
        if "error" in message:
            raise OSError(message["error"])
        return ScannedBatch(**message)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
