"""What a service prints: into its log file, its last lines kept at hand, its status lines told to the display."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

from ngym.runtime.live_region import harmless
from ngym.telemetry import log_format

STATUS_PREFIX = "ngym-status: "
KEPT_LINES = 200
MAX_LINE_BYTES = 64 << 10
MAX_FILE_BYTES = 64 << 20
DRAIN_S = 0.5


class ServiceLog:
    """One service's log over all of its lives; `open` gives the descriptor that the next life writes to.

    redact: takes the secrets out of a line. wrap_as: the name of a service whose every line shall be a JSON object, also
    those that something in it just prints.
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
        """A descriptor for the next life to write to; what arrives is read until its last writer is gone."""
        self._lines.clear()
        read, write = os.pipe()
        task = asyncio.get_running_loop().create_task(self._read(read))
        self._readers.add(task)
        task.add_done_callback(self._readers.discard)
        return write

    def tail(self, count: int) -> list[str]:
        """The last lines of this life, oldest first; to be shown, so with their control characters made visible."""
        return list(map(harmless, list(self._lines)[-count:]))

    async def drained(self) -> None:
        """Wait until all that a dead process wrote has been read."""
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
                if len(rest) > MAX_LINE_BYTES:  # no line of anybody's; what it is goes on in the next one
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
        if not log_format.is_json(text):
            text = log_format.from_text(text, self._wrap_as or "")
        return text.encode() + b"\n"

    def _write(self, chunk: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk must not take the services down with it
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
            text = log_format.to_text(text)
        if text.startswith(STATUS_PREFIX):
            self._on_status(text[len(STATUS_PREFIX) :])
            return
        self._lines.append(text)
