"""Bytes of a `text/event-stream`, cut anywhere -> the data of its events. Names and ids of events say nothing more here."""

from __future__ import annotations

from collections.abc import Iterator

_MAX_EVENT_BYTES = 1 << 26


class EventData:
    """Feed it what came; it gives the data of each event that is whole by then."""

    def __init__(self) -> None:
        self._left = b""

    def take(self, part: bytes) -> Iterator[bytes]:
        """The data of the events that end in this part; data lines of one event are joined by line breaks.

        Raises:
            ValueError: an event has no end within 64 MiB.
        """
        text = self._left + part
        if b"\r" in text:
            cut = text.endswith(b"\r")  # its line feed may still come
            text = text[: len(text) - cut].replace(b"\r\n", b"\n").replace(b"\r", b"\n") + b"\r" * cut
        *events, self._left = text.split(b"\n\n")
        if len(self._left) > _MAX_EVENT_BYTES:
            raise ValueError("an event without end")
        for event in events:
            data = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if data:
                yield b"\n".join(data)
