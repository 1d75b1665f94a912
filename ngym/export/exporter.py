"""Exports rollouts: scans the inputs, chooses candidates, writes the file, and reports what was left out."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, BinaryIO, cast

import orjson

from ngym.errors import UsageError
from ngym.export.conversation import (
    Conversation,
    NoRollout,
    NotRepresentable,
    ScoredRollout,
    ShapeNumbers,
    check_prompt,
    conversation,
    demonstration,
    fingerprint,
    kto,
    one_per_shape_first,
    parse,
    preference,
    sharegpt,
)
from ngym.export.options import Options
from ngym.export.rollout_selection import Candidate, ExportCounts, LinePosition, Pair, Reason, Row, choose
from ngym.files.atomic import whole_file
from ngym.files.jsonl import BOM, COMPRESSED, READ_BYTES, REPORTED_LINES, Line, open_rows, read
from ngym.schema import Json, RolloutCopies
from ngym.stats import reaches

if TYPE_CHECKING:
    from rich.table import Table

CACHED_CONVERSATIONS = 64  # conversations that are cached for the next pairs of their task


def table(tally: ExportCounts, options: Options) -> Table:
    from rich.table import Table

    result = Table(show_header=False, pad_edge=False)
    result.add_column()
    result.add_column(justify="right")
    result.add_column()
    for line in _lines(tally, options):
        result.add_row(*line)
    return result


def as_object(tally: ExportCounts, options: Options, seconds: float) -> Json:
    """The object that --json prints. output: null if nothing was written."""
    written = tally.rows > 0 and not options.dry_run
    return {
        "format": options.format,
        "output": str(options.output) if written else None,
        **tally.as_json(),
        "seconds": round(seconds, 3),
    }


def _lines(tally: ExportCounts, options: Options) -> Iterator[tuple[str, str, str]]:
    """Name, number, remark."""
    yield "rollouts", f"{tally.read:,}", f"{tally.tasks:,} tasks with usable ones"
    for reason in Reason:
        if tally.dropped[reason]:
            yield "left out", f"{tally.dropped[reason]:,}", _reason_text(reason, options)
    yield "kept", f"{tally.kept:,}", _kept_line(tally, options)


def _reason_text(reason: Reason, options: Options) -> str:
    return f"{reason.text}, {options.threshold:g}" if reason is Reason.LOW else reason.text


def _kept_line(tally: ExportCounts, options: Options) -> str:
    match options.format:
        case "preferences" if tally.rows:
            return f"in {tally.rows:,} pairs; margin {fmean(tally.margins):.3g}, at least {min(tally.margins):.3g}"
        case "kto":
            return f"{tally.labels[True]:,} desirable, {tally.labels[False]:,} not"
    return ""


def export(
    options: Options, show: Callable[[bytes], None], tick: Callable[[int], None] = lambda lines: None
) -> ExportCounts:
    """Write the output. If no row is left, or with --dry-run, nothing is written and an existing file stays.

    Args:
        show: receives the first row with --dry-run.
        tick: receives the number of lines read, after every line.

    Raises:
        UsageError: lines of the input are not rollouts.
        WriteFailed: the output cannot be written.
    """
    tally = ExportCounts()
    with ExitStack() as stack:
        candidates = Scan(options, tally, tick).candidates()
        rows = list(one_per_shape_first(choose(candidates, options, tally)))
        sources = [stack.enter_context(_seekable(path)) for path in options.inputs]
        lines = map(Renderer(options, sources).line, rows)
        if options.dry_run:
            for line in lines:
                show(line)
                break
        elif rows:
            with whole_file(options.output) as file:
                for line in lines:
                    file.write(line + b"\n")
    return tally


class Renderer:
    """Renders rows to lines without newlines, in a second pass over the inputs."""

    def __init__(self, options: Options, sources: list[BinaryIO]) -> None:
        self._options = options
        self._sources = sources
        self._cached_conversation = lru_cache(CACHED_CONVERSATIONS)(self._conversation)

    def line(self, row: Row) -> bytes:
        if isinstance(row, Pair):
            chosen, rejected = map(self._cached_conversation, row)
            return orjson.dumps(preference(chosen, rejected, row.margin))
        match self._options.format:
            case "demonstrations":
                return orjson.dumps(demonstration(self._cached_conversation(row.candidate)))
            case "kto":
                return orjson.dumps(kto(self._cached_conversation(row.candidate), row.label))
            case "sharegpt":
                return orjson.dumps(sharegpt(self._cached_conversation(row.candidate)))
        return self._reread(row.candidate)[0]

    def _conversation(self, candidate: Candidate) -> Conversation:
        _, rollout = self._reread(candidate)
        return conversation(rollout.params, rollout.response, reasoning=self._options.keep_reasoning)

    def _reread(self, candidate: Candidate) -> tuple[bytes, ScoredRollout]:
        """The line of a candidate and its rollout. Raises UsageError: the file has something else there by now."""
        line = self._bytes(candidate.place)
        try:
            rollout = parse(orjson.loads(line))
        except (orjson.JSONDecodeError, NoRollout):
            rollout = None
        if not isinstance(rollout, ScoredRollout) or rollout.reward != candidate.reward:
            raise self._changed_error(candidate.place)
        return line, rollout

    def _bytes(self, place: LinePosition) -> bytes:
        source = self._sources[place.file]
        source.seek(place.start)
        data = source.read(place.end - place.start)
        if len(data) < place.end - place.start:
            raise self._changed_error(place)
        return data.removeprefix(BOM).strip()

    def _changed_error(self, place: LinePosition) -> UsageError:
        path = self._options.inputs[place.file]
        return UsageError(
            f"{path} changed while it was read (at byte {place.start}); export again when no process writes it"
        )


@contextmanager
def _seekable(path: Path) -> Iterator[BinaryIO]:
    """The content of a file; that of a compressed one in a temporary file, where any line is found quickly."""
    with open_rows(path) as file:
        if path.suffix not in COMPRESSED:
            yield file
            return
        with tempfile.TemporaryFile() as plain:
            shutil.copyfileobj(file, plain, READ_BYTES)
            yield cast(BinaryIO, plain)


class Scan:
    """One first pass over the inputs.

    Args:
        tally: counts every rollout that is left out here.
        tick: receives the number of lines read, after every line.
    """

    def __init__(self, options: Options, tally: ExportCounts, tick: Callable[[int], None] = lambda lines: None) -> None:
        self.options = options
        self.tally = tally
        self.tick = tick
        self._tasks: dict[tuple[str, int, bytes], int] = {}
        self._conversations: set[bytes] = set()
        self._copies = RolloutCopies()
        self._shapes = ShapeNumbers()

    def candidates(self) -> list[Candidate]:
        """The candidates, in the order of the inputs and their lines.

        Raises:
            UsageError: lines are not rollouts; the message names the first 20.
        """
        bad: list[str] = []
        bad_count = 0
        candidates: list[Candidate] = []
        for number, path in enumerate(self.options.inputs):
            for line in read(path):
                try:
                    outcome = self._outcome(path, number, line)
                except NoRollout as error:
                    bad_count += 1
                    if bad_count <= REPORTED_LINES:
                        bad.append(f"{path}:{line.number}: {error}")
                    continue
                self.tally.read += 1
                self.tick(self.tally.read)
                if isinstance(outcome, Candidate):
                    candidates.append(outcome)
                elif outcome is not None:
                    self.tally.drop(outcome)
        if bad_count > REPORTED_LINES:
            bad.append(f"... and {bad_count - REPORTED_LINES} more lines")
        if bad:
            raise UsageError("\n".join(bad))
        self.tally.tasks = len({candidate.task for candidate in candidates})
        return candidates

    def _outcome(self, path: Path, number: int, line: Line) -> Candidate | Reason | None:
        """The candidate of a line, or the reason to drop it; None if it is already counted."""
        if line.problem is not None:
            if not line.complete:
                return Reason.TORN
            raise NoRollout(line.problem)
        rollout = parse(line.row)
        if not self.options.dedupe and (problem := self._copies.problem(line.row)):
            raise NoRollout(problem)
        if isinstance(rollout, Reason):
            return rollout
        if reason := self._drop_reason(rollout):
            return reason
        try:
            return self._candidate(LinePosition(number, line.start, line.end), rollout, line.row)
        except NotRepresentable as error:
            self.tally.count_not_representable(f"{path}:{line.number}: {error}")
            return None

    def _drop_reason(self, rollout: ScoredRollout) -> Reason | None:
        """The reason why the format cannot represent the rollout truthfully, or why it is filtered out."""
        options = self.options
        good = reaches(rollout.reward, options.threshold)
        if options.format == "rollouts":
            return None if good else Reason.LOW
        if rollout.ending == "cut":
            return Reason.CUT
        is_imitated = options.is_demonstrations or (options.format == "kto" and good)
        if rollout.ending == "step limit" and is_imitated and not options.keep_truncated:
            return Reason.TRUNCATED
        return Reason.LOW if options.is_demonstrations and not good else None

    def _candidate(self, place: LinePosition, rollout: ScoredRollout, row: Json) -> Candidate | Reason:
        """The candidate, or DUPLICATE. Raises NotRepresentable."""
        if self.options.format == "rollouts":  # copied unchanged: needs only an identity
            if self.options.dedupe and self._is_duplicate(_identity(rollout)):
                return Reason.DUPLICATE
            return Candidate(place, self._task(rollout), rollout.reward, True, b"", self._shapes.number(row))
        whole = rollout.ending == "whole" or self.options.keep_truncated
        own = self._representable(rollout)
        prompt = fingerprint(*own.prompt, *own.tools)
        if self.options.dedupe and self._is_duplicate(prompt + fingerprint(*own.completion)):
            return Reason.DUPLICATE
        return Candidate(
            place,
            self._task(rollout, prompt),
            rollout.reward,
            is_positive=whole and reaches(rollout.reward, self.options.threshold),
            words=fingerprint(*(message for message in own.completion if message["role"] == "assistant")),
            shape=self._shapes.number([own.prompt, own.completion, own.tools]),
        )

    def _representable(self, rollout: ScoredRollout) -> Conversation:
        """The conversation; raises NotRepresentable if Chat or the format cannot represent it."""
        result = conversation(rollout.params, rollout.response, reasoning=self.options.keep_reasoning)
        if self.options.format == "sharegpt":
            sharegpt(result)
        elif self.options.format in ("preferences", "kto"):
            check_prompt(result)
        return result

    def _task(self, rollout: ScoredRollout, prompt: bytes = b"") -> int:
        """The number of its group. Rollouts of one task with different prompts or tools are different groups."""
        return self._tasks.setdefault((*rollout.task, prompt), len(self._tasks))

    def _is_duplicate(self, identity: bytes) -> bool:
        known = identity in self._conversations
        self._conversations.add(identity)
        return known


def _identity(rollout: ScoredRollout) -> bytes:
    try:
        whole = conversation(rollout.params, rollout.response, reasoning=True)
    except NotRepresentable:
        return fingerprint(rollout.params, rollout.response)
    return fingerprint(*whole.prompt, *whole.tools, *whole.completion)
