"""A pseudo-terminal with a readable screen (pyte), optionally one that wraps lines again on a resize."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

import pyte
from waiting import PATIENCE_S

TRAINED_S = 4 * PATIENCE_S  # on an overloaded machine: what is waited for may be the end of a whole training


class Terminal:
    """`stream` is what a program writes to; `lines` is what its reader sees, without blanks at the ends.

    rewraps: on a resize, lines that no longer fit continue in the next one, as in VTE, kitty or tmux; else they are cut, as in xterm.
    """

    def __init__(self, columns: int = 80, rows: int = 24, rewraps: bool = False) -> None:
        self.master, self.slave = pty.openpty()
        self.stream: TextIO = os.fdopen(os.dup(self.slave), "w", encoding="utf-8")
        self.raw = b""
        self._closed = False
        self._rewraps = rewraps
        self._screen = pyte.Screen(columns, rows)
        self._feed = pyte.ByteStream(self._screen)
        self._set_size(columns, rows)

    def resize(self, columns: int, rows: int) -> None:
        self.read()
        if self._rewraps:
            self._wrap(columns, rows)
        else:
            self._screen.resize(rows, columns)
        self._set_size(columns, rows)

    def read(self) -> None:
        """Take what was written so far."""
        while not self._closed and select.select([self.master], [], [], 0)[0]:
            try:
                data = os.read(self.master, 1 << 16)
            except OSError:  # no one has its other end any more
                return
            self.raw += data
            self._feed.feed(data)

    @property
    def lines(self) -> list[str]:
        self.read()
        rows = [line.rstrip() for line in self._screen.display]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def cursor_is_hidden(self) -> bool:
        self.read()
        return bool(self._screen.cursor.hidden)

    def until(self, condition: Callable[[], object]) -> None:
        """Waits for the screen. A frame may be half drawn: the test asks for all that it wants to see."""
        deadline = time.monotonic() + TRAINED_S
        while not condition():
            assert time.monotonic() < deadline, f"not so within {TRAINED_S:.0f} s; the screen:\n{self.text}"
            select.select([self.master], [], [], 0.05)

    def close(self) -> None:
        """Ends the terminal; its last screen can still be read."""
        self.read()
        self._closed = True
        self.stream.close()
        os.close(self.master)
        os.close(self.slave)

    def _set_size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _wrap(self, columns: int, rows: int) -> None:
        """The cursor stays with the character at which it is."""
        before, at = [line.rstrip() for line in self._screen.display], self._screen.cursor
        while len(before) > at.y + 1 and not before[-1]:
            before.pop()
        wrapped = [[line[n : n + columns] for n in range(0, len(line), columns)] or [""] for line in before]
        row = sum(map(len, wrapped[: at.y])) + at.x // columns
        every = [part for parts in wrapped for part in parts]
        first = max(0, row + 1 - rows)
        self._screen = pyte.Screen(columns, rows)
        self._screen.cursor.hidden = at.hidden
        self._feed = pyte.ByteStream(self._screen)
        for number, part in enumerate(every[first : first + rows]):
            self._feed.feed(f"\x1b[{number + 1};1H{part}".encode())
        self._feed.feed(f"\x1b[{row - first + 1};{at.x % columns + 1}H".encode())


@contextmanager
def terminal(columns: int = 80, rows: int = 24, rewraps: bool = False) -> Iterator[Terminal]:
    opened = Terminal(columns, rows, rewraps)
    try:
        yield opened
    finally:
        opened.close()
