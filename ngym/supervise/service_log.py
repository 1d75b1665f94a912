"""One service's log over all its restarts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

from ngym.runtime.live_region import sanitize
from ngym.telemetry.log_format import REFUSED, STATUS_PREFIX, from_text, is_json, to_text

logger = logging.getLogger("ngym.supervise")

KEPT_LINES = 200
SHOWN_LINES = 20
MAX_LINE_BYTES = 64 << 10
MAX_FILE_BYTES = 64 << 20
DRAIN_S = 0.5


class ServiceLog:
    """One service's log over all its restarts; `open` returns the descriptor for the next process.

    redact: removes secrets from a line. wrap_as: the service's name, if every line must be a JSON object, including
    lines that are just printed.
    """

    def __init__(
        self, path: Path, on_status: Callable[[str], None], redact: Callable[[bytes], bytes], wrap_as: str | None = None
    ) -> None:
        self.path = path
        self._wrap_as = wrap_as
        self._redact = redact
        self._on_status = on_status
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._has_reason = False
        self._readers: set[asyncio.Task[None]] = set()
        self._lost_bytes = 0  # since the last write that succeeded
        self._is_cut = False  # whether the file ends within a line
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb", buffering=0)

    def open(self) -> int:
        """A descriptor for the next process to write to; it is read until its last writer is gone."""
        self._lines.clear()
        self._has_reason = False
        read, write = os.pipe()
        task = asyncio.get_running_loop().create_task(self._read(read))
        self._readers.add(task)
        task.add_done_callback(self._readers.discard)
        return write

    def tail(self, count: int) -> list[str]:
        """The last lines of the current process, oldest first, with control characters made visible for display."""
        return list(map(sanitize, list(self._lines)[-count:]))

    @property
    def reason(self) -> str:
        """The reason why the process ended, in its own words, as one line; empty if it gave none."""
        return " ".join(self.tail(SHOWN_LINES)) if self._has_reason else ""

    async def drain(self) -> None:
        """Wait until everything that a dead process wrote has been read."""
        if self._readers:
            await asyncio.wait(self._readers, timeout=DRAIN_S)

    async def close(self) -> None:
        await self.drain()
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
                    self._take_lines(self._redact(b"\n".join(lines)) + b"\n")
            if rest:
                self._take_lines(self._redact(rest))
        finally:
            transport.close()

    def _take_lines(self, lines: bytes) -> None:
        if self._wrap_as is not None:
            lines = b"".join(self._wrap(line) for line in lines.removesuffix(b"\n").split(b"\n"))
        self._write(lines)
        for line in lines.removesuffix(b"\n").split(b"\n"):
            self._keep(line)

    def _wrap(self, line: bytes) -> bytes:
        text = line.decode(errors="replace").rstrip("\r")
        if not is_json(text):
            text = from_text(text, self._wrap_as or "")
        return text.encode() + b"\n"

    def _write(self, chunk: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end the services
            if self._file.tell() > MAX_FILE_BYTES:
                self._rotate()
        rest = self._note_of_loss() + chunk if self._lost_bytes else chunk
        try:
            while rest:
                written = self._file.write(rest)
                self._is_cut = rest[written - 1 : written] != b"\n"
                rest = rest[written:]
            self._lost_bytes = 0
        except OSError as error:
            if not self._lost_bytes:
                logger.warning("%s: output is lost (%s); the service continues", self.path, error.strerror)
            self._lost_bytes += min(len(rest), len(chunk))

    def _note_of_loss(self) -> bytes:
        text = f"{self._lost_bytes:,} bytes of output are missing here: this file could not be written"
        line = text if self._wrap_as is None else from_text(text, self._wrap_as, "WARNING")
        return b"\n" * self._is_cut + line.encode() + b"\n"

    def _rotate(self) -> None:
        replacement = self.path.with_suffix(".log.new")
        empty = replacement.open("wb", buffering=0)
        try:
            self.path.replace(self.path.with_suffix(".log.1"))
            replacement.replace(self.path)
        except OSError:
            empty.close()
            raise
        full, self._file = self._file, empty
        full.close()

    def _keep(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        if self._wrap_as is not None:
            text = to_text(text)
        if text == f"{STATUS_PREFIX}{REFUSED}":
            self._lines.clear()
            self._has_reason = True
            return
        if text.startswith(STATUS_PREFIX):
            self._on_status(text[len(STATUS_PREFIX) :])
            return
        self._lines.append(text)
