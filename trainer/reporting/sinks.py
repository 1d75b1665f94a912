"""Sinks that receive the metrics in addition to metrics.jsonl: TensorBoard, W&B, MLflow, or a class of the user's.

    metrics --put--> a bounded queue --thread--> TensorBoard, a MetricSink of the user's
                                     --thread--> a process: W&B, MLflow

A sink never slows down the run: one that raises or hangs loses entries, which are counted and reported. Sinks that use
a server run in a process, because their packages install hooks in their process and may delay its exit.

A pipe to that process (wandb_mlflow.py) carries one line for each entry, and one line back:

    {"name", "options", "output", "recipe"}  ->  null, or what went wrong
    {"step", "values"}                       ->  null, or what went wrong
    the end of the input                     ->  the sink is closed, the process ends
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import yaml

from ngym.config.import_path import import_class
from ngym.errors import NgymError
from ngym.schema import Json

from ..recipe.extensions import MetricSink
from ..recipe.objective import FrozenOptions
from ..recipe.recipe import LoggingOptions, SinkOptions

PROGRAM = "from ngym.trainer.reporting import wandb_mlflow; wandb_mlflow.main()"
MAX_QUEUED = 1000  # limit of waiting records; further ones are dropped
CLOSE_S = 20.0  # at the end of the run, for all sinks together to write waiting entries
NUMBERS = count()  # of the event files of this process
GO_ON = "training continues, and metrics.jsonl has everything"


class TensorBoard(MetricSink):
    """Writes event files itself: tensorboard's own writer uses another thread, where errors get lost."""

    def __init__(self, folder: Path, done: int = 0) -> None:
        """done: number of steps that were trained before the run was resumed."""
        self._folder, self._done = folder, done

    def open(self) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._events, self._summaries, self._record_writer = event_pb2, summary_pb2, RecordWriter
        self._folder.mkdir(parents=True, exist_ok=True)
        self._writer: Any = self._begin()
        # TensorBoard drops what a killed process wrote of later steps; that of `done` may be evaluated again.
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._append(self._writer, step=self._done + 1, session_log=start)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            self._writer = self._begin()
        scalars = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._append(self._writer, step=step, summary=self._summaries.Summary(value=scalars))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _begin(self) -> Any:
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.{next(NUMBERS)}"
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


class SinkFailed(NgymError):
    """The sink did not accept an entry."""


class SubprocessSink(MetricSink):
    """The sink of this name. output: the run's folder. recipe: is stored with the metrics."""

    def __init__(self, name: str, options: FrozenOptions, output: Path, recipe: Json) -> None:
        settings = options.model_dump(mode="json")
        self._begin = {"name": name, "options": settings, "output": str(output.absolute()), "recipe": recipe}
        # A separate session: Ctrl-C reaches only the run, which then gives the sink time; child processes end with it.
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def open(self) -> None:
        self._ask(self._begin)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._ask({"step": step, "values": dict(values)})

    def close(self) -> None:
        """Returns when the process has ended."""
        self._process.communicate()
        if self._process.returncode:
            raise SinkFailed(f"its process ended with exit code {self._process.returncode}")

    def abandon(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _ask(self, message: dict[str, Any]) -> None:
        """Send a message. Raises SinkFailed with the process's error, or OSError if it is gone."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SinkFailed("its process is gone")
        if (problem := json.loads(answer)) is not None:
            raise SinkFailed(problem)


class SinkThread:
    """Passes entries to a sink in a daemon thread, which ends with the process even if the sink hangs.

    name: of the sink, as in the recipe.
    """

    def __init__(self, name: str, sink: MetricSink, waiting: int = MAX_QUEUED) -> None:
        self.name = name
        self._sink = sink
        self._bound = waiting
        self._queue: SimpleQueue[tuple[int, Mapping[str, float]] | None] = SimpleQueue()
        self._submitted = 0
        self._written = 0
        self._problem: str | None = None
        self._reported = False
        self._thread = threading.Thread(target=self._run, name=f"logging to {name}", daemon=True)
        self._thread.start()

    def put(self, step: int, values: Mapping[str, float]) -> None:
        """Queue the metrics of a step, or those computed after it; returns at once."""
        self._submitted += 1
        if self._queue.qsize() < self._bound:
            self._queue.put((step, values))
        elif self._problem is None:
            self._problem = f"it accepted no entry while {self._bound:,} arrived"

    def new_problem(self) -> str | None:
        """The current problem, reported once."""
        if self._problem is None or self._reported:
            return None
        self._reported = True
        return f"logging.{self.name}: entries are lost: {self._problem}; {GO_ON}"

    def end(self) -> None:
        """Signal that there are no more entries."""
        self._queue.put(None)

    def join(self, deadline: float) -> str | None:
        """Wait for the thread until this monotonic time at most; returns what was lost, if anything."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._problem = self._problem or "it takes too long"
            self._sink.abandon()
        missing = self._submitted - self._written
        if missing:
            entries = f"{missing:,} of {self._submitted:,} entries"
            return f"logging.{self.name}: {entries} were not written; metrics.jsonl has them"
        return f"logging.{self.name}: it was not closed: {self._problem}" if self._problem else None

    def _run(self) -> None:
        is_open = False
        with self._recording_errors():
            self._sink.open()
            is_open = True
        if not is_open:
            self._sink.abandon()
            return
        while (entry := self._queue.get()) is not None:
            with self._recording_errors():
                self._sink.write(*entry)
                self._written += 1
        with self._recording_errors():
            self._sink.close()

    @contextmanager
    def _recording_errors(self) -> Iterator[None]:
        """Record errors of the sink, which must not end the run."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            text = str(error).strip().split("\n")[0]
            line = text if isinstance(error, SinkFailed) else f"{type(error).__name__}: {text}"
            self._problem = self._problem or line  # the first error: later ones may follow from it


class Sinks:
    """All sinks of a run."""

    def __init__(self, threads: Sequence[SinkThread] = (), close_s: float = CLOSE_S) -> None:
        self._threads = threads
        self._close_s = close_s

    def put(self, step: int, values: Mapping[str, float]) -> Iterator[str]:
        """Pass metrics to every sink; yields a line for each sink that loses entries, once."""
        for thread in self._threads:
            thread.put(step, values)
        return filter(None, [thread.new_problem() for thread in self._threads])

    def close(self) -> Iterator[str]:
        """Give the sinks time to write waiting entries; yields lines about what was lost."""
        deadline = time.monotonic() + self._close_s
        for thread in self._threads:
            thread.end()
        problems = [thread.join(deadline) for thread in self._threads]
        return filter(None, [*(thread.new_problem() for thread in self._threads), *problems])


def open_sinks(options: LoggingOptions, output: Path, resolved: Path, done: int = 0) -> Sinks:
    """The sinks of a run. resolved: its recipe, which sinks store if they can. done: steps before it was resumed."""
    recipe: Json = yaml.safe_load(resolved.read_text("utf-8"))
    sinks: dict[str, MetricSink] = {}
    if options.tensorboard:
        folder = output / "tensorboard" if options.tensorboard is True else Path(options.tensorboard)
        sinks["tensorboard"] = TensorBoard(folder, done)
    for name, sink_options in (("wandb", options.wandb), ("mlflow", options.mlflow)):
        if sink_options is not None:
            sinks[name] = SubprocessSink(name, sink_options, output, recipe)
    threads = [SinkThread(name, sink) for name, sink in sinks.items()]
    return Sinks([*threads, *(_open_custom(sink_options, output, recipe) for sink_options in options.sinks)])


def _open_custom(options: SinkOptions, output: Path, recipe: Json) -> SinkThread:
    """A sink of the user's, under the name of its class."""
    kind: type[MetricSink] = import_class(options.sink, MetricSink)
    return SinkThread(kind.__name__, kind(output, recipe, **options.options))
