"""Exports rollouts: reads and chooses them, writes the file, and reports what was left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, BinaryIO

import orjson

from ngym.errors import UsageError
from ngym.export.choose import choose
from ngym.export.conversation import Conversation, NoRollout, Rollout, conversation, parse
from ngym.export.formats import demonstration, kto, leaders_first, preference, sharegpt
from ngym.export.options import Options
from ngym.export.scan import Scan
from ngym.export.tally import Candidate, Pair, Place, Reason, Row, Tally
from ngym.files.jsonl import BOM, whole_file
from ngym.schema import Json

if TYPE_CHECKING:
    from rich.table import Table


REREAD = 64  # conversations that are cached for the next pairs of their task


def table(tally: Tally, options: Options) -> Table:
    from rich.table import Table

    shown = Table(show_header=False, pad_edge=False)
    shown.add_column()
    shown.add_column(justify="right")
    shown.add_column()
    for line in _lines(tally, options):
        shown.add_row(*line)
    return shown


def as_object(tally: Tally, options: Options, seconds: float) -> Json:
    """The object that --json prints. output: null if nothing was written."""
    written = tally.rows > 0 and not options.dry_run
    return {
        "format": options.format,
        "output": str(options.output) if written else None,
        **tally.as_json(),
        "seconds": round(seconds, 3),
    }


def _lines(tally: Tally, options: Options) -> Iterator[tuple[str, str, str]]:
    """Name, number, remark."""
    yield "rollouts", f"{tally.read:,}", f"{tally.tasks:,} tasks with usable ones"
    for reason in Reason:
        if tally.dropped[reason]:
            yield "left out", f"{tally.dropped[reason]:,}", _told(reason, options)
    yield "kept", f"{tally.kept:,}", _kept(tally, options)


def _told(reason: Reason, options: Options) -> str:
    return f"{reason.told}, {options.threshold:g}" if reason is Reason.LOW else reason.told


def _kept(tally: Tally, options: Options) -> str:
    match options.format:
        case "preferences" if tally.rows:
            return f"in {tally.rows:,} pairs; margin {fmean(tally.margins):.3g}, at least {min(tally.margins):.3g}"
        case "kto":
            return f"{tally.labels[True]:,} desirable, {tally.labels[False]:,} not"
    return ""


def export(options: Options, show: Callable[[bytes], None], tick: Callable[[int], None] = lambda lines: None) -> Tally:
    """Write the output. If no row is left, or with --dry-run, nothing is written and an existing file stays.

    Args:
        show: receives the first row with --dry-run.
        tick: receives the number of lines read, after every line.

    Raises:
        UsageError: lines of the input are not rollouts.
        WriteFailed: the output cannot be written.
    """
    tally = Tally()
    with ExitStack() as stack:
        candidates = Scan(options, tally, tick).candidates()
        rows = list(leaders_first(choose(candidates, options, tally)))
        sources = [stack.enter_context(_opened(path)) for path in options.inputs]
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
        self._said = lru_cache(REREAD)(self._conversation)

    def line(self, row: Row) -> bytes:
        if isinstance(row, Pair):
            chosen, rejected = map(self._said, row)
            return orjson.dumps(preference(chosen, rejected, row.margin))
        match self._options.format:
            case "demonstrations":
                return orjson.dumps(demonstration(self._said(row.candidate)))
            case "kto":
                return orjson.dumps(kto(self._said(row.candidate), row.label))
            case "sharegpt":
                return orjson.dumps(sharegpt(self._said(row.candidate)))
        return self._bytes(row.candidate.place)

    def _conversation(self, candidate: Candidate) -> Conversation:
        try:
            rollout = parse(orjson.loads(self._bytes(candidate.place)))
        except (orjson.JSONDecodeError, NoRollout):
            rollout = None
        if not isinstance(rollout, Rollout):
            raise self._changed(candidate.place)
        return conversation(rollout.params, rollout.response, reasoning=self._options.keep_reasoning)

    def _bytes(self, place: Place) -> bytes:
        source = self._sources[place.file]
        source.seek(place.start)
        found = source.read(place.end - place.start)
        if len(found) < place.end - place.start:
            raise self._changed(place)
        return found.removeprefix(BOM).strip()

    def _changed(self, place: Place) -> UsageError:
        path = self._options.inputs[place.file]
        return UsageError(
            f"{path} changed while it was read (at byte {place.start}); export again when no process writes it"
        )


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
