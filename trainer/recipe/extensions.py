"""The interfaces of what a recipe can name by import path: `my_package.my_module:NAME` or `my_file.py:NAME`.

| option | interface |
|---|---|
| algorithm.name | AlgorithmOptions (algorithms.py) |
| algorithm.advantage.estimator | AdvantageEstimator |
| rollouts.transport | PushTransport |
| logging.sinks | MetricSink |

Does not import torch, so that `--dry-run` stays fast. docs/algorithms.md and docs/training.md have an example of each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple, Protocol, TypeVar

from pydantic import AfterValidator

from ngym.config.import_path import Choice, import_class, import_function
from ngym.errors import NgymError
from ngym.schema import Json

Mode = Literal["keep", "wait", "abort"]  # of the generations in flight at a commit
Server = TypeVar("Server")
Result = TypeVar("Result")


class AdvantageEstimator(Protocol):
    """A function from the rewards of a step to advantages."""

    def __call__(self, rewards_B: Sequence[float], groups_B: Sequence[Hashable], /) -> Sequence[float]:
        """One finite advantage for each rollout, [B].

        All ranks call it with the same arguments, so the result must depend on nothing else.

        Args:
            rewards_B: of the scored rollouts; failed ones and those without a reward are left out.
            groups_B: each rollout's group; attempts at the same task have equal values.
        """


class PushFailed(NgymError):
    """Some servers do not serve these weights; the message says which and why."""


class TransientPushError(NgymError):
    """A server cannot be reached, is not ready, or is busy: a retry may work."""


class File(NamedTuple):
    """A file of a weight push: the bytes of a safetensors file. sha256: in hexadecimal."""

    content: bytes
    sha256: str


class PolicyServer(Protocol):
    """A policy server during a push."""

    url: str

    def send(self, content: bytes, sha256: str) -> None:
        """Send the bytes of a file."""

    def name(self, file: str, sha256: str) -> None:
        """Name a file, relative to the server's `weights_root`."""


class CallReplicas(Protocol):
    """Calls a function with each replica, concurrently; raises an error only after all have answered."""

    def __call__(self, replicas: Sequence[Server], call: Callable[[Server], Result]) -> list[Result]: ...


class PushTransport(ABC):
    """Brings the files of a weight push to the policy servers; one object for a run, on rank 0.

    Attributes:
        server_transport: the transport of the servers that it builds on. `http`: they take a file's bytes. `filesystem`:
            they read a file below the `weights_root` of their stanza.

    Args:
        folder: `rollouts.push_folder`.
    """

    server_transport: ClassVar[str] = "http"

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder

    @abstractmethod
    def send(self, file: File, replicas: Sequence[PolicyServer], on_all: CallReplicas) -> None:
        """Bring one file to every replica, then hand it over with `replica.send` or `replica.name`.

        The servers check the digest, and nothing changes there before all files have arrived. Raise
        `PushFailed` to end the run, or `TransientPushError` to repeat the push.

        Args:
            file: `content`, the bytes of a safetensors file, and `sha256`.
            on_all: calls a function with each replica, concurrently.
        """

    def close(self) -> None:  # noqa: B027  (optional)
        """Called at the end of the run."""


class MetricSink(ABC):
    """Receives the metrics of a run, in a thread of its own: all methods may block and raise.

    Entries of a sink that raises or hangs are lost, counted and reported; training continues.

    A subclass may have more constructor arguments: the `options` that the recipe gives it.

    Args:
        output: the run's folder.
        recipe: the resolved recipe.
    """

    def __init__(self, output: Path, recipe: Json) -> None:
        self.output = output
        self.recipe = recipe

    def open(self) -> None:  # noqa: B027  (optional)
        """Called once, before the first entry."""

    @abstractmethod
    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of a step, or those computed after it."""

    def close(self) -> None:  # noqa: B027  (optional)
        """Called once, after the last entry."""

    def abandon(self) -> None:  # noqa: B027  (optional)
        """End at once: it could not be opened, or its time has run out. Called from another thread."""


ESTIMATORS = Choice(
    ("group_std", "group_mean", "leave_one_out", "leave_one_out_std", "reward", "gae"), "my_file.py:my_estimator"
)
TRANSPORTS = Choice(("http", "delta", "filesystem", "lora", "nccl", "ipc"), "my_file.py:MyTransport")


def _estimator(name: str) -> str:
    if ESTIMATORS.check(name):
        import_function(name)
    return name


def _transport(name: str) -> str:
    if TRANSPORTS.check(name):
        import_class(name, PushTransport)
    return name


def _sink(path: str) -> str:
    if ":" not in path:
        raise ValueError("Input should be an import path such as my_file.py:MySink")
    import_class(path, MetricSink)
    return path


Estimator = Annotated[str, ESTIMATORS, AfterValidator(_estimator)]
Transport = Annotated[str, TRANSPORTS, AfterValidator(_transport)]
SinkPath = Annotated[str, AfterValidator(_sink)]
