"""TensorBoard: an event file in a folder, each entry flushed to disk before the next."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any


class TensorBoard:
    """Writes event files itself: tensorboard's own writer uses another thread, where errors get lost."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._events, self._summaries, self._record_writer = event_pb2, summary_pb2, RecordWriter
        self._numbers = count()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._writer: Any = self._begin()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            self._writer = self._begin()
        scalars = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._append(self._writer, step=step, summary=self._summaries.Summary(value=scalars))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def abandon(self) -> None:
        """Nothing to do: written entries are on the disk."""

    def _begin(self) -> Any:
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.{next(self._numbers)}"
        writer = self._record_writer((self._folder / name).open("wb"))
        try:
            self._append(writer, file_version="brain.Event:2")
        except OSError:
            (self._folder / name).unlink()  # it is empty, and each restart would leave another
            raise
        return writer

    def _append(self, writer: Any, **fields: Any) -> None:
        try:
            writer.write(self._events.Event(wall_time=time.time(), **fields).SerializeToString())
            writer.flush()
        except OSError:
            # The last record is incomplete, and readers stop there: the next entry begins another file.
            self._writer = None
            with suppress(OSError):
                writer.close()
            raise
