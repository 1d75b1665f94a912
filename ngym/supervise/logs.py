"""A service's output: written to its log file, its last lines kept in memory, its status lines passed to the display."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

from ngym.runtime.live_region import harmless
from ngym.telemetry.log_format import from_text, is_json, to_text

STATUS_PREFIX = "ngym-status: "
KEPT_LINES = 200
MAX_LINE_BYTES = 64 << 10
MAX_FILE_BYTES = 64 << 20
DRAIN_S = 0.5


class ServiceLog:
    """One service's log over all its restarts; `open` returns the descriptor for the next process.

    redact: removes secrets from a line. wrap_as: the service's name, if every line must be a JSON object, including
    lines that are just printed.
    """

    def __init__(
        self,
        path: Path,
        on_status: Callable[[str], None],
        redact: Callable[[bytes], bytes],
        wrap_as: str | None = None,
    ) -> None:
        self.path = path
        self._wrap_as = wrap_as
        self._redact = redact
        self._on_status = on_status
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._readers: set[asyncio.Task[None]] = set()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb", buffering=0)

    def open(self) -> int:
        """A descriptor for the next process to write to; it is read until its last writer is gone."""
        self._lines.clear()
        read, write = os.pipe()
        task = asyncio.get_running_loop().create_task(self._read(read))
        self._readers.add(task)
        task.add_done_callback(self._readers.discard)
        return write

    def tail(self, count: int) -> list[str]:
        """The last lines of the current process, oldest first, with control characters made visible for display."""
        return list(map(harmless, list(self._lines)[-count:]))

    async def drained(self) -> None:
        """Wait until everything that a dead process wrote has been read."""
        if self._readers:
            await asyncio.wait(self._readers, timeout=DRAIN_S)

    async def close(self) -> None:
        await self.drained()
        for task in self._readers:
            task.cancel()
        self._file.close()

    async def _read(self, fd: int) -> None:
        reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        pipe = os.fdopen(fd, "rb", buffering=0)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
        rest = b""
        try:
            while chunk := await reader.read(MAX_LINE_BYTES):
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > MAX_LINE_BYTES:  # too long for one line; the rest continues in the next one
                    lines, rest = [*lines, rest], b""
                if lines:
                    self._take(self._redact(b"\n".join(lines)) + b"\n")
            if rest:
                self._take(self._redact(rest))
        finally:
            transport.close()

    def _take(self, lines: bytes) -> None:
        if self._wrap_as is not None:
            lines = b"".join(self._wrapped(line) for line in lines.removesuffix(b"\n").split(b"\n"))
        self._write(lines)
        for line in lines.removesuffix(b"\n").split(b"\n"):
            self._keep(line)

    def _wrapped(self, line: bytes) -> bytes:
        text = line.decode(errors="replace").rstrip("\r")
        if not is_json(text):
            text = from_text(text, self._wrap_as or "")
        return text.encode() + b"\n"

    def _write(self, chunk: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end the services
            if self._file.tell() > MAX_FILE_BYTES:
                self._rotate()
        with contextlib.suppress(OSError):
            self._file.write(chunk)

    def _rotate(self) -> None:
        beside = self.path.with_suffix(".log.new")
        empty = beside.open("wb", buffering=0)
        try:
            self.path.replace(self.path.with_suffix(".log.1"))
            beside.replace(self.path)
        except OSError:
            empty.close()
            raise
        full, self._file = self._file, empty
        full.close()

    def _keep(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        if self._wrap_as is not None:
            text = to_text(text)
        if text.startswith(STATUS_PREFIX):
            self._on_status(text[len(STATUS_PREFIX) :])
            return
        self._lines.append(text)
