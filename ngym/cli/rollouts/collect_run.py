"""The engine of `ng_collect_rollouts`: finds or starts the services, checks the input, collects, and reports."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TextIO

import click
import orjson

from ngym.cli.shell.main import EXIT_DONE, EXIT_FAILED, EXIT_TRY_AGAIN
from ngym.collect.collection_files import CollectionFiles, CollectionPaths, check_places
from ngym.collect.collection_session import CollectionSession, ConnectedServices, DiscoveredServices, discover
from ngym.collect.plan import CollectionPlan, PlannedRollout, input_rows, no_rows, plan_rollouts, replaced_note
from ngym.collect.progress_display import (
    ProgressDisplay,
    ProgressMeter,
    as_json,
    display,
    files,
    first_failures,
    tables,
)
from ngym.collect.rollout_rows import TokenFormat
from ngym.collect.rollout_scheduler import CollectionLimits, Gate
from ngym.collect.run_record import CollectionSettings, RunRecord
from ngym.config.service_config import Config, load_config, redacted_config, tracing_of
from ngym.did_you_mean import did_you_mean
from ngym.errors import NgymError, UsageError
from ngym.files.jsonl import expand_paths, read
from ngym.files.row_log import DiskFull
from ngym.net.auth import wrong_url
from ngym.peers import Peers
from ngym.runtime import event_loop
from ngym.runtime.event_loop import EXIT_INTERRUPTED, calls_on_interrupt, signals_as_keyboard_interrupt
from ngym.runtime.live_region import clock, is_live, sanitize
from ngym.schema import Json, RolloutKey, is_failed_attempt
from ngym.supervise.head_file import head_of, token_of
from ngym.supervise.service import ReplicaState
from ngym.supervise.status_display import status_line
from ngym.supervise.supervisor import Supervisor
from ngym.supervise.zygote_client import ZygoteClient
from ngym.telemetry import tracing

OWNER = "ng_collect_rollouts"


@dataclass(frozen=True)
class Options:
    """The options of the command; `ng_collect_rollouts --help` explains each field."""

    agent: str | None
    mapped: tuple[str, ...]
    sources: tuple[str, ...]
    output: Path
    limit: int | None
    repeats: int
    concurrency: int
    resume: bool
    overwrite: bool
    temperature: float | None
    max_output_tokens: int | None
    settings: tuple[str, ...]
    seed: int | None
    token_format: TokenFormat
    timeout: float
    max_attempts: int
    configs: tuple[Path, ...]
    head: str | None
    dry_run: bool
    as_json: bool
    by: str | None
    overrides: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.resume and self.overwrite:
            raise UsageError("--resume and --overwrite contradict each other; keep one")
        if self.head_url and (problem := wrong_url(self.head_url)):
            raise UsageError(f"--head {problem}, or the folder of its config")
        if self.configs and self.head:
            raise UsageError("--config starts services here and --head uses running ones; keep one")
        misplaced = next((text for text in self.overrides if "=" not in text), None)
        if misplaced is not None and Path(misplaced).is_file():
            raise UsageError(f"{misplaced}: repeat --input for each file, or quote the pattern: --input 'runs/*.jsonl'")
        if self.overrides and not self.configs:
            hint = "overrides of the config need --config FILE; for a sampling setting use --set"
            raise UsageError(f"{self.overrides[0]!r}: {hint}")
        _ = self.inputs, self.recipe  # both report what is wrong

    @property
    def head_url(self) -> str | None:
        """--head, if it is not a folder."""
        return None if self.head is None or Path(self.head).is_dir() else self.head

    @property
    def root(self) -> Path:
        """The folder that the run is looked for in: --head, if it is one, else this one."""
        return Path.cwd() if self.head is None or self.head_url else Path(self.head)

    @cached_property
    def inputs(self) -> tuple[Path, ...]:
        return expand_paths(self.sources)

    @property
    def recipe(self) -> CollectionPlan:
        params: Json = dict(map(_setting, self.settings))
        sampling = {"temperature": self.temperature, "max_output_tokens": self.max_output_tokens}
        params |= {key: value for key, value in sampling.items() if value is not None}
        return CollectionPlan(self.agent, self.repeats, self.limit, params, self.seed, _mapping(self.mapped))

    @property
    def limits(self) -> CollectionLimits:
        return CollectionLimits(self.concurrency, self.timeout, self.max_attempts)


def _setting(text: str) -> tuple[str, object]:
    """Parse `key=value` of --set; a value that is not JSON is a string."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UsageError(f"--set {text}: write --set key=value, such as --set top_p=0.9")
    try:
        return key, orjson.loads(value)
    except orjson.JSONDecodeError:
        return key, value


def _mapping(texts: tuple[str, ...]) -> dict[str, str]:
    """Parse each `old=new` of --map-agent."""
    pairs = [text.partition("=") for text in texts]
    wrong = next((text for text, (old, _, new) in zip(texts, pairs, strict=True) if not (old and new)), None)
    if wrong is not None:
        raise UsageError(
            f"--map-agent {wrong}: write --map-agent OLD=NEW, such as --map-agent math_simple_agent=math_agent"
        )
    return {old: new for old, _, new in pairs}


@dataclass
class ExistingOutput:
    """The contents of existing output files. done: finished rollouts. failed: failed attempts of each rollout."""

    done: set[RolloutKey] = field(default_factory=set)
    failed: Counter[RolloutKey] = field(default_factory=Counter)


@dataclass
class Plan:
    """The rollouts of --dry-run.

    agents: rollouts by agent. done, given_up: planned rollouts that an earlier session has finished or given up.
    replaced: rows that name another agent than --agent, by that name.
    """

    first: PlannedRollout
    agents: Counter[str]
    tasks: set[tuple[str, int]]
    done: int
    given_up: int
    replaced: Mapping[str, int]

    @property
    def rollouts(self) -> int:
        return self.agents.total()


def show_plan(options: Options, known: DiscoveredServices, config: Config | None) -> None:
    """Print the plan: the rollouts, their agents, and how many are done.

    Raises:
        UsageError: as without --dry-run, except that an existing output only prints a note.
    """
    check_places(options.output, options.inputs)
    earlier = _read_existing(options)
    if options.resume and (earlier.done or earlier.failed):
        source = CollectionSettings(options.inputs, options.recipe, options.token_format, known.stanzas)
        RunRecord.resume(CollectionPaths.for_output(options.output).run, source, options.output)
    plan = _make_plan(options, known, earlier if options.resume else ExistingOutput())
    needed = sorted(config.only(plan.agents).services) if config else None
    if options.as_json:
        click.echo(orjson.dumps(_as_json(options, known, plan, needed)))
    else:
        _print(options, known, plan, needed)
    if (earlier.done or earlier.failed) and not (options.resume or options.overwrite):
        click.echo(f"{options.output} already holds rollouts: --resume or --overwrite is needed", err=True)


def _read_existing(options: Options) -> ExistingOutput:
    paths, earlier = CollectionPaths.for_output(options.output), ExistingOutput()
    for path in (paths.output, paths.failures):
        for line in read(path) if path.is_file() else ():
            if not line.complete:
                continue
            key = _key(line.row)
            if key is None:
                raise UsageError(f"{path}:{line.number}: not a row of ng_collect_rollouts; choose another --output")
            if is_failed_attempt(line.row):
                earlier.failed[key] += 1
            else:
                earlier.done.add(key)
    return earlier


def _key(row: Json) -> RolloutKey | None:
    try:
        return RolloutKey(row["ng"]["task_id"], row["_ng_task_index"], row["_ng_rollout_index"])
    except (KeyError, TypeError):
        return None


def _make_plan(options: Options, known: DiscoveredServices, earlier: ExistingOutput) -> Plan:
    plan: Plan | None = None
    replaced: Counter[str] = Counter()
    rows = input_rows(options.inputs, options.recipe, known.agents, replaced)
    for rollout in plan_rollouts(rows, options.recipe):
        plan = plan or Plan(rollout, Counter(), set(), 0, 0, replaced)
        plan.agents[rollout.agent] += 1
        plan.tasks.add(rollout.key[:2])
        plan.done += rollout.key in earlier.done
        plan.given_up += rollout.key not in earlier.done and earlier.failed[rollout.key] >= options.max_attempts
    if plan is None:
        raise no_rows(options.inputs)
    return plan


def _as_json(options: Options, known: DiscoveredServices, plan: Plan, needed: list[str] | None) -> Json:
    return {
        "output": str(options.output),
        "rollouts": plan.rollouts,
        "tasks": len(plan.tasks),
        "agents": plan.agents,
        "done": plan.done,
        "given_up": plan.given_up,
        "left": plan.rollouts - plan.done - plan.given_up,
        "starts": needed,
        "head": known.head_url or options.head,
        "first": plan.first.row,
    }


def _print(options: Options, known: DiscoveredServices, plan: Plan, needed: list[str] | None) -> None:
    click.echo(f"{plan.rollouts:,} rollouts into {options.output}; the first, by {plan.first.agent}:")
    click.echo(sanitize(orjson.dumps(plan.first.row, option=orjson.OPT_INDENT_2).decode()))
    for agent, rollouts in plan.agents.items():
        click.echo(f"{agent}: {rollouts:,} rollouts")
    if options.agent and plan.replaced:
        click.echo(replaced_note(options.agent, plan.replaced))
    click.echo(f"{len(plan.tasks):,} tasks, {options.concurrency:,} rollouts at once")
    if plan.done or plan.given_up:
        remaining = plan.rollouts - plan.done - plan.given_up
        click.echo(f"--resume: {plan.done:,} are done, {plan.given_up:,} given up; {remaining:,} to go")
    where = (
        f"by the run at {known.head_url or options.head}"
        if needed is None
        else f"by services started here: {', '.join(needed)}"
    )
    click.echo(f"{where}; nothing was started or written")


def collect_into_files(options: Options) -> int:
    """Run the whole command; returns its exit code. A signal at any moment ends it as Ctrl-C does."""
    try:
        with signals_as_keyboard_interrupt():
            return _collect_and_report(options)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _collect_and_report(options: Options) -> int:
    starts = bool(options.configs) and not options.dry_run
    launcher = ZygoteClient.start() if starts else None  # before the checks: its imports take longer than they do
    try:
        config = load_config(options.configs, options.overrides) if options.configs else None
        known = _discover(options, config)
        if options.dry_run:
            show_plan(options, known, config)
            return EXIT_DONE
        return Command(options, known).run(config, launcher)
    finally:
        if launcher:
            launcher.close()


def _discover(options: Options, config: Config | None) -> DiscoveredServices:
    """The known services: from the config that is started here, else from the head."""
    if config is not None:
        return DiscoveredServices.of(redacted_config(config))
    url = head_of(
        options.root,
        options.head_url,
        "name a run with --head URL, or add --config FILE and they are started and stopped here",
    )
    known = event_loop.run(discover(url, token_of(url, options.root)))
    if options.agent is not None and options.agent not in known.agents:
        raise UsageError(
            f"--agent: no agent named {options.agent!r} in the run at {url}{did_you_mean(options.agent, known.agents)}; "
            "to start it, use ng_run --only NAME or --config FILE"
        )
    return known


class Command:
    """One `ng_collect_rollouts`, from the lock on its files to the final table."""

    def __init__(self, options: Options, known: DiscoveredServices) -> None:
        self.options = options
        self.discovered = known
        self.stream: TextIO = sys.stderr if options.as_json else sys.stdout
        self._gate = Gate()
        self._session: CollectionSession | None = None
        self._supervisor: Supervisor | None = None
        self._task: asyncio.Task[None] | None = None
        self._on_state: Callable[[ReplicaState], None] = lambda state: None

    def run(self, config: Config | None, launcher: ZygoteClient | None) -> int:
        options = self.options
        source = CollectionSettings(options.inputs, options.recipe, options.token_format, self.discovered.stanzas)
        store = CollectionFiles(
            options.output, source, by=options.by, on_stall=lambda reason: self._gate.hold("disk", reason)
        )
        session = self._session = CollectionSession(store, options.limits, self._gate, self._display, self._echo)
        try:
            self._prepare(store)
            try:
                if store.progress.left:
                    tracing.begin(config.tracing if config else tracing_of(self.discovered.stanzas), OWNER)
                    event_loop.run(self._collect(session, self._connect(store, config, launcher)))
                else:
                    session.status = "done"
                    store.finish(session.status)
            finally:
                tracing.end()
                self._print_result(store, session)
        except DiskFull as error:
            click.echo(sanitize(str(error)), err=True)
            return EXIT_TRY_AGAIN
        finally:
            store.close()
        if session.status == "interrupted":
            return EXIT_INTERRUPTED
        return EXIT_FAILED if store.aggregates.given_up else EXIT_DONE

    def _prepare(self, store: CollectionFiles) -> None:
        options, live = self.options, is_live(self.stream)
        store.prepare(
            resume=options.resume,
            overwrite=options.overwrite,
            max_attempts=options.max_attempts,
            agents=self.discovered.agents,
            command=sys.argv,
            tick=lambda text: self._echo(f"\r\x1b[2K{text}", nl=False) if live else None,
            starts=bool(options.configs),
        )
        if live:
            self._echo("\r\x1b[2K", nl=False)
        before = store.progress
        if lost := [
            f"agent {name!r} {self.discovered.lost[name]}"
            for name in sorted(before.agents)
            if name in self.discovered.lost
        ]:
            raise NgymError("\n".join(lost))
        if options.agent and before.replaced:
            self._echo(replaced_note(options.agent, before.replaced))
        if before.done or before.given_up or store.duplicates:
            self._echo(
                f"resumed run {store.run_id}: {before.done:,} of {before.total:,} rollouts are done"
                + (f", {before.given_up:,} given up (--max-attempts gives them more)" if before.given_up else "")
                + (f", {store.duplicates:,} duplicate rows were dropped" if store.duplicates else "")
                + f"; {before.left:,} to go"
            )

    async def _collect(
        self, session: CollectionSession, services: AbstractAsyncContextManager[ConnectedServices]
    ) -> None:
        self._task = asyncio.current_task()
        with calls_on_interrupt(self._interrupt), suppress(asyncio.CancelledError):
            await session.collect(services)

    def _interrupt(self) -> None:
        """The first signal ends the run gracefully; the next one makes the services stop at once."""
        assert self._session is not None and self._task is not None
        if self._session.status == "interrupted":
            if self._supervisor:
                self._supervisor.hurry()
            return
        self._session.status = "interrupted"
        self._task.cancel()

    @asynccontextmanager
    async def _connect(
        self, store: CollectionFiles, config: Config | None, launcher: ZygoteClient | None
    ) -> AsyncIterator[ConnectedServices]:
        """The services: started here, or those of a running head."""
        if config is None:
            known = self.discovered
            token = token_of(known.head_url, self.options.root) if known.head_url else None
            async with Peers(known.urls, known.head_url, token, owner=OWNER, others=known.others) as peers:
                yield ConnectedServices(peers)
            return
        needed = config.only(store.progress.agents)
        self._supervisor = Supervisor(needed, lambda state: self._on_state(state), launcher)
        async with AsyncExitStack() as stack:
            async with self._startup():
                await stack.enter_async_context(self._supervisor)
            peers = await stack.enter_async_context(self._supervisor.peers(OWNER))
            yield ConnectedServices(peers, self._supervisor.failure)

    @asynccontextmanager
    async def _startup(self) -> AsyncIterator[None]:
        if self.options.as_json:
            self._on_state = lambda state: self._echo(
                sanitize(f"{state.label:<24} {state.status:<10} {state.detail}".rstrip())
            )
            yield
            return
        from ngym.supervise.status_display import display as startup_display

        async with startup_display(False, lost=lambda: None) as show:
            self._on_state = show.on_state
            yield
        self._on_state = lambda state: None

    @asynccontextmanager
    async def _display(self, meter: ProgressMeter) -> AsyncIterator[ProgressDisplay]:
        async with display(meter, self.stream, lost=self._interrupt) as show:
            self._on_state = lambda state: show.say(status_line(state))
            try:
                yield show
            finally:
                self._on_state = lambda state: None

    def _print_result(self, store: CollectionFiles, session: CollectionSession) -> None:
        """Print the tables, the status and the files; nothing for a run that failed before its first outcome."""
        total, aggregates = store.progress.total, store.aggregates
        if session.status == "failed" and not session.outcomes:
            return
        if store.replaces:
            self._echo(f"{session.status} before the first new row; {store.paths.output} is unchanged")
            return
        if self.options.as_json:
            click.echo(
                orjson.dumps(as_json(aggregates, store.paths, store.run_id, session.status, session.seconds, total))
            )
            return
        from rich.console import Console

        console = Console(file=self.stream, highlight=False, markup=False)
        for table in tables(aggregates):
            console.print(table)
        more = "" if store.progress.complete else " or more"  # the input was not read to its end
        self._echo(f"{session.status}: {aggregates.done:,} of {total:,}{more} rollouts in {clock(session.seconds)}")
        for line in first_failures(aggregates, self.options.inputs):
            self._echo(f"  {sanitize(line)}")
        if aggregates.done + aggregates.given_up < total or more:
            self._echo(
                "to continue, run the same command with --resume instead of --overwrite"
                if self.options.overwrite
                else "to continue, run the same command with --resume"
            )
        if store.unwritten:
            self._echo(f"{store.unwritten}; --resume writes it")
        for line in files(store.paths, console.width - 2 if console.is_terminal else None):
            self._echo(f"  {line}")

    def _echo(self, text: str, nl: bool = True) -> None:
        click.echo(text, self.stream, nl=nl)
