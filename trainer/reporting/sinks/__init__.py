"""Sinks that receive the metrics in addition to metrics.jsonl: TensorBoard, W&B, MLflow, or a class of the user's.

    metrics --put--> a bounded queue --thread--> TensorBoard, a MetricSink of the user's
                                     --thread--> a process: W&B, MLflow

A sink never slows down the run: one that raises or hangs loses entries, which are counted and reported. Sinks that use
a server run in a process, because their packages install hooks in their process and may delay its exit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import yaml

from ngym.config.import_path import imported_class
from ngym.schema import Json

from ...recipe.extensions import MetricSink
from ...recipe.recipe import LoggingOptions, SinkOptions
from .remote import Remote, SinkFailed
from .tensorboard import TensorBoard

WAITING = 1000  # limit of waiting records; further ones are dropped
CLOSE_S = 20.0  # at the end of the run, for all sinks together to write waiting entries
GO_ON = "training continues, and metrics.jsonl has everything"


class Sink(Protocol):
    """All methods but `abandon` may raise and block: they are called in a separate thread."""

    def open(self) -> None: ...

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...

    def abandon(self) -> None:
        """End it at once: it could not be opened, or its time has run out (called from another thread)."""


class Entry(NamedTuple):
    """The metrics of a step, or those computed after it."""

    step: int
    values: Mapping[str, float]


class Courier:
    """Passes entries to a sink in a daemon thread, which ends with the process even if the sink hangs.

    name: of the sink, as in the recipe.
    """

    def __init__(self, name: str, sink: Sink, waiting: int = WAITING) -> None:
        self.name = name
        self._sink = sink
        self._bound = waiting
        self._queue: SimpleQueue[Entry | None] = SimpleQueue()
        self._given = 0
        self._written = 0
        self._problem: str | None = None
        self._said = False
        self._thread = threading.Thread(target=self._run, name=f"logging to {name}", daemon=True)
        self._thread.start()

    def put(self, entry: Entry) -> None:
        """Queue an entry; returns at once."""
        self._given += 1
        if self._queue.qsize() < self._bound:
            self._queue.put(entry)
        elif self._problem is None:
            self._problem = f"it accepted no entry while {self._bound:,} arrived"

    def complaint(self) -> str | None:
        """What is wrong, reported once."""
        if self._problem is None or self._said:
            return None
        self._said = True
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
        lost = self._given - self._written
        if lost:
            return f"logging.{self.name}: {lost:,} of {self._given:,} entries were not written; metrics.jsonl has them"
        return f"logging.{self.name}: it was not closed: {self._problem}" if self._problem else None

    def _run(self) -> None:
        opened = False
        with self._noting():
            self._sink.open()
            opened = True
        if not opened:
            self._sink.abandon()
            return
        while (entry := self._queue.get()) is not None:
            with self._noting():
                self._sink.write(*entry)
                self._written += 1
        with self._noting():
            self._sink.close()

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Record errors of the sink, which must not end the run."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            text = str(error).strip().split("\n")[0]
            line = text if isinstance(error, SinkFailed) else f"{type(error).__name__}: {text}"
            self._problem = self._problem or line  # the first error: later ones may follow from it


class Sinks:
    """All sinks of a run."""

    def __init__(self, couriers: Sequence[Courier] = (), close_s: float = CLOSE_S) -> None:
        self._couriers = couriers
        self._close_s = close_s

    def put(self, step: int, values: Mapping[str, float]) -> Iterator[str]:
        """Pass metrics to every sink; yields a line for each sink that loses entries, once."""
        for courier in self._couriers:
            courier.put(Entry(step, values))
        return filter(None, [courier.complaint() for courier in self._couriers])

    def close(self) -> Iterator[str]:
        """Give the sinks time to write waiting entries; yields lines about what was lost."""
        deadline = time.monotonic() + self._close_s
        for courier in self._couriers:
            courier.end()
        lost = [courier.join(deadline) for courier in self._couriers]
        return filter(None, [*(courier.complaint() for courier in self._couriers), *lost])


def opened(options: LoggingOptions, output: Path, resolved: Path) -> Sinks:
    """The sinks of a run. resolved: its recipe, which sinks store if they can."""
    recipe: Json = yaml.safe_load(resolved.read_text("utf-8"))
    sinks: dict[str, Sink] = {}
    if options.tensorboard:
        folder = output / "tensorboard" if options.tensorboard is True else Path(options.tensorboard)
        sinks["tensorboard"] = TensorBoard(folder)
    for name, asked in (("wandb", options.wandb), ("mlflow", options.mlflow)):
        if asked is not None:
            sinks[name] = Remote(name, asked, output, recipe)
    couriers = [Courier(name, sink) for name, sink in sinks.items()]
    return Sinks([*couriers, *(_own(asked, output, recipe) for asked in options.sinks)])


def _own(asked: SinkOptions, output: Path, recipe: Json) -> Courier:
    """A sink of the user's, under the name of its class."""
    kind: type[MetricSink] = imported_class(asked.sink, MetricSink)
    return Courier(kind.__name__, kind(output, recipe, **asked.options))
