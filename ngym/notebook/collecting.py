"""`ngym.collect_rollouts`: collects rollouts of tasks, with running services or with services started for the call."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

from ngym.collect.collection_files import CollectionFiles
from ngym.collect.collection_session import CollectionSession, DiscoveredServices
from ngym.collect.plan import CollectionPlan, replaced_note
from ngym.collect.progress_display import drawing
from ngym.collect.rollout_rows import TokenFormat
from ngym.collect.rollout_scheduler import CollectionLimits, Gate
from ngym.collect.run_record import CollectionSettings
from ngym.config.service_config import tracing_of
from ngym.errors import NgymError, UsageError
from ngym.notebook import services
from ngym.notebook.arguments import INPUT, above_zero, as_arguments, at_least_one, one_of, row_as_json, whole
from ngym.notebook.frames import restore_row
from ngym.notebook.progress import CallDisplay
from ngym.notebook.rollouts import Folder, Rollouts, rollouts_of
from ngym.notebook.services import RunningServices, ServiceTarget
from ngym.runtime.event_loop import raise_file_limit
from ngym.schema import Json
from ngym.telemetry import tracing

Input = Any
"""A path; an iterable of rows, such as a `datasets.Dataset`; or a data frame of pandas or polars."""
TASK = 'an object such as {"responses_create_params": {"input": "..."}}'
COMMAND = ["ngym.collect_rollouts"]
MANY = 256  # rollouts in flight; more may need more sockets than the default limit
SAMPLE_S = 0.25
_STOPPED: list[Folder] = []  # folders of calls that were stopped, kept for their partial results


def collect_rollouts(
    *,
    input: Input,
    agent: str | None = None,
    map_agent: Mapping[str, str] | None = None,
    config: services.Files | None = None,
    overrides: Sequence[str] = (),
    head: str | RunningServices | None = None,
    output: str | Path | None = None,
    repeats: int = 1,
    limit: int | None = None,
    concurrency: int = 64,
    temperature: float | None = None,
    max_output_tokens: int | None = None,
    params: Mapping[str, Any] | None = None,
    seed: int | None = None,
    timeout_s: float = 1800.0,
    max_attempts: int = 3,
    token_format: TokenFormat = "ng",
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> Rollouts:
    """Run an agent over tasks, and return the scored rollouts.

        rollouts = ngym.collect_rollouts(config="global_config.yaml", agent="math_agent", input="tasks.jsonl", repeats=8)
        rollouts = ngym.collect_rollouts(head=services, agent="math_agent", input=[{"responses_create_params": {...}}])

    An interrupt (Ctrl-C, a kernel's) stops it; finished rollouts are kept, and a message names their file.

    Args:
        input: tasks: rows, a file, or a data frame or dataset of rows.
        agent: for all rows; None: the agent that each row's agent_ref names.
        map_agent: `{old: new}`: runs the rows that name agent `old` with the agent `new`; wins over `agent`.
        config: start these services, and stop them at the end. overrides: of the config, `key=value`.
        head: use running services: the result of `ngym.run`, or the URL of a head. Neither: those that run in this
        folder.
        output: the file for the rollouts; docs/collecting.md lists the files next to it. None: a temporary folder that
            lives as long as the returned Rollouts.
        repeats: rollouts of each task. limit: only the first tasks. concurrency: rollouts in flight.
        temperature, max_output_tokens, params, seed: as --temperature, --max-output-tokens, --set and --seed.
        timeout_s: of one attempt. max_attempts: for retryable failures.
        resume: continue a call that was stopped. overwrite: replace `output` when the first new row is written; the old
            files are kept under `.old` names.
        progress: show the progress.

    Raises:
        UsageError: the config or the input is wrong. ServiceFailed, ServiceGone: a service does not start, or stayed
        down.
    """
    with as_arguments():
        call = _Call(locals())
    with as_arguments(call.folder.path):
        return call.target.run(call.run(), call.display, progress)


async def collect_rollouts_async(
    *,
    input: Input,
    agent: str | None = None,
    map_agent: Mapping[str, str] | None = None,
    config: services.Files | None = None,
    overrides: Sequence[str] = (),
    head: str | RunningServices | None = None,
    output: str | Path | None = None,
    repeats: int = 1,
    limit: int | None = None,
    concurrency: int = 64,
    temperature: float | None = None,
    max_output_tokens: int | None = None,
    params: Mapping[str, Any] | None = None,
    seed: int | None = None,
    timeout_s: float = 1800.0,
    max_attempts: int = 3,
    token_format: TokenFormat = "ng",
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> Rollouts:
    """`collect_rollouts` for a coroutine, without blocking its loop; cancelling the task stops it."""
    with as_arguments():
        call = _Call(locals())
    with as_arguments(call.folder.path):
        return await call.target.run_async(call.run(), call.display, progress)


class _Call:
    """One collection, from its input to its rollouts; `run` runs on the loop of its services.

    arguments: those of `collect_rollouts` by name.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._arguments = arguments
        at_least_one(**{name: arguments[name] for name in ("repeats", "limit", "concurrency", "max_attempts")})
        whole(seed=arguments["seed"])
        above_zero(timeout_s=arguments["timeout_s"])
        one_of(get_args(TokenFormat), token_format=arguments["token_format"])
        if arguments["resume"] and arguments["overwrite"]:
            raise UsageError("resume=True and overwrite=True contradict each other; keep one")
        if arguments["resume"] and arguments["output"] is None:
            raise UsageError("resume=True continues a file; name it with output=")
        sampling = {
            name: arguments[name] for name in ("temperature", "max_output_tokens") if arguments[name] is not None
        }
        params = {**(arguments["params"] or {}), **sampling}
        agents = dict(arguments["map_agent"] or {})
        self._recipe = CollectionPlan(
            arguments["agent"], arguments["repeats"], arguments["limit"], params, arguments["seed"], agents
        )
        self._limits = CollectionLimits(arguments["concurrency"], arguments["timeout_s"], arguments["max_attempts"])
        self.folder = Folder()
        self._output = Path(arguments["output"] or self.folder.path / "out.jsonl")
        self._done = 0
        self.display = CallDisplay()
        self.target = ServiceTarget(arguments["config"], arguments["overrides"], arguments["head"])

    async def run(self) -> Rollouts:
        if self._limits.concurrency > MANY:
            raise_file_limit()
        tasks = tasks_in(self._arguments["input"], self.folder.path)
        known = await self.target.discover()
        gate = Gate()
        source = CollectionSettings(tasks, self._recipe, self._arguments["token_format"], known.stanzas)
        store = CollectionFiles(self._output, source, on_stall=lambda reason: gate.hold("disk", reason))
        try:
            await self._collect(store, known, gate)
        except (asyncio.CancelledError, NgymError):
            self._print_stopped(store.aggregates.done)
            raise
        finally:
            store.close()
        given_up = sum(tally.given_up.total() for tally in store.aggregates.by_agent.values())
        if given_up:
            self.display.say(f"{given_up:,} of {store.progress.total:,} rollouts were given up; see .failures")
        return rollouts_of([self._output], self.folder)

    def _print_stopped(self, done: int) -> None:
        """Print the file of the finished rollouts."""
        if not done:
            return
        hint = "resume=True continues" if self._arguments["output"] else "the file exists until this process ends"
        if self._arguments["output"] is None:
            _STOPPED.append(self.folder)
        self.display.say(f"stopped; {done:,} rollouts are done: ngym.load_rollouts({str(self._output)!r}); {hint}")

    async def _collect(self, store: CollectionFiles, known: DiscoveredServices, gate: Gate) -> None:
        config = self.target.config
        store.prepare(
            resume=self._arguments["resume"],
            overwrite=self._arguments["overwrite"],
            max_attempts=self._limits.max_attempts,
            agents=known.agents,
            command=COMMAND,
            starts=config is not None,
        )
        if self._recipe.agent is not None and store.progress.replaced:
            self.display.say(replaced_note(self._recipe.agent, store.progress.replaced))
        if not store.progress.left:
            store.finish("done")
            return
        needed = config.only(store.progress.agents) if config is not None else None
        tracing.begin(config.tracing if config else tracing_of(known.stanzas), services.OWNER)
        display = partial(drawing, show=self.display, tick_s=SAMPLE_S)
        try:
            session = CollectionSession(store, self._limits, gate, display, self.display.say)
            await session.collect(self.target.connect(known, needed, self.display))
        finally:
            tracing.end()


def tasks_in(source: Input, folder: Path) -> Path:
    """The source, if it is a file, or a new file in this folder with its rows.

    Raises:
        UsageError: the input has another type.
    """
    if isinstance(source, str | Path):
        if not Path(source).is_file():
            raise UsageError(f"{source}: no such file (input=)")
        return Path(source)
    path = folder / INPUT
    with path.open("wb") as file:
        for number, row in enumerate(rows_of(source, TASK)):
            file.write(row_as_json(row, number) + b"\n")
    return path


def rows_of(source: Any, needed: str, argument: str = "input") -> Iterable[Json]:
    """The rows of an input, which may be a table of `full=True`; a missing value of a data frame is left out of its row.

    needed: what a row is, in the message about one that is not an object. argument: the name of the source.

    Raises:
        UsageError: the input has another type, or, while iterating, a row is not an object.
    """
    if isinstance(source, Mapping):
        records: Iterable[Any] = [source]
    elif hasattr(source, "iter_rows"):  # polars
        records = map(_present, source.iter_rows(named=True))
    elif hasattr(source, "itertuples"):  # pandas
        records = map(_present, source.to_dict("records"))
    elif isinstance(source, Iterable):
        records = source
    else:
        raise UsageError(f"{argument} must be rows, a path or a data frame, not {type(source).__name__}")
    return (_row(record, number, needed) for number, record in enumerate(records))


def _row(record: Any, number: int, needed: str) -> Json:
    if isinstance(record, Mapping):
        return restore_row(record)
    raise UsageError(f"row {number} must be {needed}, not {record!r:.60}")


def _present(row: Mapping[str, Any]) -> Json:
    # missing values are None, or NaN or NA of pandas
    return {name: value for name, value in row.items() if value is not None and not _is_nan(value)}


def _is_nan(value: Any) -> bool:
    return type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float) and math.isnan(value))
