"""A live region of the terminal, and text that is safe to print.

The cursor stays at the first character of the region. Whatever a resize does to the lines (some terminals rewrap them,
some cut them), the cursor stays with that character, so erasing from there to the end of the screen erases the region.
"""

from __future__ import annotations

import codecs
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from threading import RLock, Thread
from typing import TYPE_CHECKING, NamedTuple, TextIO

from ngym.errors import printable

if TYPE_CHECKING:
    from rich.text import Text

DRAIN_TIMEOUT_S = 0.5
MAX_LINE_CHARS = 1000
DEFAULT_SIZE = os.terminal_size((80, 24))
SPARKS = "▁▂▃▄▅▆▇█"
COLOUR = re.compile(r"\x1b\[[0-9;]*m")

ERASE_BELOW, ERASE_LINE_END = "\x1b[J", "\x1b[K"
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
BAR, SHORTEST_BAR = 40, 8
FULL, REST = "━", "─"


class Size(NamedTuple):
    """The available room: characters per line, and lines."""

    width: int
    height: int


Picture = Callable[[Size], "Sequence[Text]"]
"""The lines that fit; more than `height`, or longer ones, are cut."""


def is_live(stream: TextIO) -> bool:
    """Whether lines can be redrawn there: it is a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM") not in (None, "", "dumb", "unknown")


def sanitize(text: str) -> str:
    """Untrusted text with the same lines, without colours and with all other control characters escaped."""
    return printable(COLOUR.sub("", text.replace("\r\n", "\n").expandtabs()))


def pack_facts(facts: Sequence[str], width: int) -> list[str]:
    """Facts side by side, two spaces apart, in as few lines as possible."""
    lines: list[str] = []
    for fact in facts:
        if lines and len(lines[-1]) + 2 + len(fact) <= width:
            lines[-1] += f"  {fact}"
        else:
            lines.append(fact)
    return lines


def clock(seconds: float) -> str:
    """`0:07`, `12:30`, `3:05:00`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def duration(seconds: float) -> str:
    """`12 s`, `3 min`, `2.5 h`, `4.0 d`."""
    minutes, hours = seconds / 60, seconds / 3600
    if hours >= 48:
        return f"{hours / 24:.1f} d"
    return f"{hours:.1f} h" if hours >= 2 else f"{minutes:.0f} min" if minutes >= 2 else f"{seconds:.0f} s"


def bar(done: int, total: int, room: int) -> Text:
    """A progress bar; empty if there is no room."""
    from rich.text import Text

    width = min(BAR, room)
    if width < SHORTEST_BAR:
        return Text()
    full = width * done // max(total, 1)
    return Text(FULL * full, "green").append(REST * (width - full), "bright_black")


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as bars; neighbours are averaged if there are more than `width`."""
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    bounds = [len(values) * index // count for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(means), max(means)
    span = high - low or 1.0
    return "".join(SPARKS[round((value - low) / span * (len(SPARKS) - 1))] for value in means)


class Screen:
    """The live region of a terminal. `say` prints above it, `show` draws it, `close` removes it; from any thread."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console

        self._stream = stream
        self._console = Console(file=stream, highlight=False, markup=False, width=MAX_LINE_CHARS)
        self._lock = RLock()
        self._drawn: list[str] = []
        self._size = Size(0, 0)
        self._picture: Picture = lambda size: ()

    @property
    def size(self) -> Size:
        """The current size. The last column stays free: some terminals wrap when it is written."""
        try:
            columns, lines = os.get_terminal_size(self._stream.fileno())
        except OSError:
            columns, lines = DEFAULT_SIZE
        return Size(max(columns or DEFAULT_SIZE.columns, 2) - 1, max((lines or DEFAULT_SIZE.lines) - 1, 1))

    def show(self, picture: Picture) -> None:
        """Draw this from now on; nothing is sent if nothing has changed."""
        with self._lock:
            self._picture = picture
            size = self.size
            lines = self._lines(size)
            if lines == self._drawn and size == self._size:
                return
            self._send(self._frame(lines))
            self._size = size

    def refresh(self) -> None:
        """Draw the current picture again."""
        self.show(self._picture)

    def say(self, text: str) -> None:
        """Print above the region. The text may be untrusted: its control characters are escaped."""
        with self._lock:
            text_lines = "".join(f"{line}\n" for line in sanitize(text).split("\n"))
            self._send(f"\r{ERASE_BELOW}{text_lines}{self._frame(self._lines(self.size))}")

    def keep(self) -> None:
        """Close the screen and leave the current picture."""
        self.close(self._picture)

    def close(self, last: Picture | None = None) -> None:
        """Remove the region, leave `last` instead, and show the cursor again."""
        with self._lock:
            lines = self._lines(self.size, last) if last else []
            text_lines = "".join(f"{line}\n" for line in lines)
            self._picture = lambda size: ()
            self._send(f"\r{ERASE_BELOW}{text_lines}{SHOW_CURSOR}" if self._drawn or text_lines else "")
            self._drawn = []

    def _lines(self, size: Size, picture: Picture | None = None) -> list[str]:
        picture_lines = list((picture or self._picture)(size))[: size.height]
        return [self._render(line, size.width) for line in picture_lines]

    def _render(self, line: Text, width: int) -> str:
        if not line.plain.isprintable():
            line = type(line)(sanitize(line.plain).replace("\n", " "))
        with self._console.capture() as capture:
            self._console.print(line, width=width, no_wrap=True, overflow="ellipsis", end="")
        return capture.get().rstrip("\n")

    def _frame(self, lines: list[str]) -> str:
        """The control sequence that draws the lines at the cursor, and moves it back to their beginning."""
        if not lines and not self._drawn:
            return ""
        self._drawn = lines
        up = f"\x1b[{len(lines) - 1}A" if len(lines) > 1 else ""
        body = f"{ERASE_LINE_END}\n".join(lines)
        return f"{HIDE_CURSOR}\r{body}{ERASE_BELOW}{up}\r"

    def _send(self, text: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(text.encode(encoding, "replace").decode(encoding))
        self._stream.flush()


class _StreamAboveRegion(io.TextIOBase):
    """A stream whose lines go above the region; of a line that is overwritten (a bar), only the last state."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._rest = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).replace("\r\n", "\n").split("\n")
        if lines:
            self._screen.say("\n".join(line.rpartition("\r")[2] for line in lines))
        return len(text)

    def end(self) -> None:
        """Print the rest: the last line may have no line break."""
        if self._rest:
            self._screen.say(self._rest.rpartition("\r")[2])
            self._rest = ""


@contextmanager
def capture_output(screen: Screen) -> Iterator[None]:
    """Print what goes to a terminal during the block above the region."""
    before = {name: getattr(sys, name) for name in ("stdout", "stderr") if getattr(sys, name).isatty()}
    streams = {name: _StreamAboveRegion(screen) for name in before}
    for name, stream in streams.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        for name, stream in streams.items():
            stream.end()
            setattr(sys, name, before[name])


@contextmanager
def terminal() -> Iterator[Screen]:
    """A screen on the terminal of `sys.stdout`; the process's other output goes above it.

    File descriptor 1 becomes a pipe, so this includes C libraries and loggers with their own stream, and no library
    here sees a terminal. Descriptor 2 is unchanged, for the last words of a dying process.
    """
    screen = Screen(os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding=sys.stdout.encoding))
    with _redirect_stdout(screen) if os.isatty(1) else nullcontext(), capture_output(screen):
        try:
            yield screen
        finally:
            screen.close()


@contextmanager
def _redirect_stdout(screen: Screen) -> Iterator[None]:
    """Print what goes to file descriptor 1 during the block above the region."""
    saved = os.dup(1)
    read, write = os.pipe()
    pump = Thread(target=_pump, args=(read, screen), name="terminal", daemon=True)
    sys.stdout.flush()
    os.dup2(write, 1)
    os.close(write)
    pump.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)
        pump.join(DRAIN_TIMEOUT_S)  # it ends when all writers have closed the pipe; a child process may still hold it


def _pump(fd: int, screen: Screen) -> None:
    above = _StreamAboveRegion(screen)
    characters = codecs.getincrementaldecoder("utf-8")("replace")
    with os.fdopen(fd, "rb", buffering=0) as pipe:
        while chunk := pipe.read(1 << 16):
            above.write(characters.decode(chunk))
    above.write(characters.decode(b"", final=True))
    above.end()


def align(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
