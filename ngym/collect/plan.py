"""The rollouts of a collection: the input's rows, their repeats, and what a resumed run already has.

An input of up to FIRST_BYTES is checked before anything starts. For a larger one, the first part is checked before, and
a thread checks the rest, so that the first rollout does not wait. A bad line there ends the collection with every bad
line named; the finished rollouts are kept, and --resume continues with the corrected input.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import orjson

from ngym.did_you_mean import did_you_mean, nearest
from ngym.errors import BadRequest, UsageError
from ngym.files.jsonl import READ_BYTES, CheckedLines, Line, check_lines, open_rows
from ngym.option_names import option, option_name
from ngym.schema import AgentRef, Json, RolloutKey, task_id
from ngym.stats import DenseInts

AGENT_TYPE = "responses_api_agents"  # NeMo Gym's name, kept in agent_ref so that its tools can read these rows
FIRST_BYTES = 16 << 20
BEGIN_S = 1.0  # the first rollouts have the interpreter to themselves
SLICE_S = 0.01  # of the interpreter's time, then as much for the event loop
MAX_REFERENCE = 4 << 10  # bytes of an agent_ref that is split between two parts of a file
_NAMED = re.compile(rb'"agent_ref"\s*:\s*\{[^{}]*?"name"\s*:\s*("(?:[^"\\]|\\.)*")')


@dataclass(frozen=True)
class CollectionPlan:
    """The rules by which input rows become rollouts.

    agent: runs every row; None: each row names its own. repeats: rollouts a task, in the order abc -> aabbcc. limit: only the first rows.
    params: override keys of each row's responses_create_params; a dotted key sets a leaf (`reasoning.effort`).
    seed: of the sampling: each rollout gets a seed of its own, `sampling_seed(seed, task index, rollout index)`; None
        leaves sampling free.
    agents: an agent that rows name -> the one that runs them; it wins over `agent`.
    """

    agent: str | None = None
    repeats: int = 1
    limit: int | None = None
    params: Json = field(default_factory=dict)
    seed: int | None = None
    agents: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.params:
            return
        from ngym.convert.request_validation import check_overrides

        try:
            check_overrides(self.params)
        except BadRequest as error:
            raise UsageError(f"responses_create_params: {error}") from None

    def reference(self, row: Json) -> AgentRef:
        """The agent of a row that has passed a RowCheck."""
        reference: AgentRef = row.get("agent_ref") or {"type": AGENT_TYPE, "name": self.agent or ""}
        return {**reference, "name": self.runner(reference["name"])}

    def runner(self, named: str) -> str:
        """The agent that runs the rows with this name in their agent_ref."""
        return self.agents.get(named) or self.agent or named

    def replaced(self, named: str) -> bool:
        """Whether `agent` runs the rows with this name, instead of the agent of that name."""
        return self.agent is not None and named != self.agent and named not in self.agents


@dataclass(frozen=True, slots=True)
class PlannedRollout:
    """One rollout to collect. row: the body of the agent's /run, with both indices, agent_ref and overrides.

    group: all rollouts of its task that are collected together; empty: the caller compares them itself.
    """

    key: RolloutKey
    agent: str
    row: Json
    group: tuple[RolloutKey, ...] = ()

    def with_seed(self, seed: int) -> PlannedRollout:
        """This rollout, sampled with this seed."""
        params = _with_seed(self.row["responses_create_params"], seed)
        return replace(self, row={**self.row, "responses_create_params": params})

    @property
    def first(self) -> RolloutKey:
        """The key that identifies its group."""
        return self.group[0] if self.group else self.key


def sampling_seed(*parts: object) -> int:
    """The seed of one rollout's sampling: a hash of the parts.

    Rollouts must not share a seed: an engine draws the same random numbers for it, also for different prompts.
    """
    digest = hashlib.sha256(" ".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def plan_rollouts(rows: Iterable[Json], recipe: CollectionPlan) -> Iterator[PlannedRollout]:
    """The rollouts of these input rows, which must have passed a RowCheck.

    A row's `_ng_task_index` is kept, else it is the row's position; rows that share one continue its rollout indices.
    """
    counted = DenseInts()
    for position, row in enumerate(islice(rows, recipe.limit)):
        task_index, first = position, 0
        if "_ng_task_index" in row:
            task_index = row["_ng_task_index"]
            first = counted.get(task_index) or 0
            counted.put(task_index, first + recipe.repeats)
        identity = task_id(row)
        reference = recipe.reference(row)
        indices = range(first, first + recipe.repeats)
        group = tuple(RolloutKey(identity, task_index, rollout_index) for rollout_index in indices)
        for rollout_index in indices:
            params = _overridden(row["responses_create_params"], recipe)
            ours = {"_ng_task_index": task_index, "_ng_rollout_index": rollout_index, "agent_ref": reference}
            planned = PlannedRollout(
                RolloutKey(identity, task_index, rollout_index),
                reference["name"],
                {**row, "responses_create_params": params, **ours},
                group,
            )
            if recipe.seed is not None:
                planned = planned.with_seed(sampling_seed(recipe.seed, task_index, rollout_index))
            yield planned


def input_rows(
    paths: Sequence[Path],
    recipe: CollectionPlan,
    agents: Collection[str] | None = None,
    replaced: Counter[str] | None = None,
) -> Iterator[Json]:
    """Stream the rows of files; at the end one UsageError names every bad line.

    Args:
        agents: the agents that exist; None if that is not known.
        replaced: counts the rows of each agent that `recipe.agent` replaces.
    """
    check_agent(recipe, agents)
    check = RowCheck(recipe, agents, replaced)
    return (line.row for line in check_lines(paths, check, recipe.limit))


def check_agent(recipe: CollectionPlan, agents: Collection[str] | None) -> None:
    """Raise a UsageError if the agent of --agent or --map-agent does not exist."""
    names_by_argument = {"agent": [recipe.agent] if recipe.agent else [], "map_agent": list(recipe.agents.values())}
    for argument, names in names_by_argument.items():
        for name in names:
            if agents is not None and name not in agents:
                raise UsageError(f"{option_name(argument)}: no agent named {name!r}{did_you_mean(name, agents)}")


def check_rows(rows: Iterable[Json], recipe: CollectionPlan, agents: Collection[str]) -> Iterator[Json]:
    """Yield the rows, each checked when it is taken. Raises UsageError: what is wrong with the first bad one."""
    check = RowCheck(recipe, agents)
    for position, row in enumerate(rows):
        if problem := check(row):
            raise UsageError(f"task {position}: {problem}")
        yield row


def replaced_note(agent: str, replaced: Mapping[str, int]) -> str:
    """The line about rows that name other agents than that of --agent."""
    names = ", ".join(f"{rows:,} name {name!r}" for name, rows in sorted(replaced.items()))
    example = option("map_agent", {"NAME": "NAME"})
    return f"note: {option('agent', agent)} also runs rows that name another agent: {names} ({example} keeps one)"


class RowCheck:
    """Returns the mistake of an input row, or None.

    Args:
        agents: the agents that exist; None if that is not known.
        replaced: counts the rows of each agent that `recipe.agent` replaces.
    """

    def __init__(
        self, recipe: CollectionPlan, agents: Collection[str] | None, replaced: Counter[str] | None = None
    ) -> None:
        self._recipe = recipe
        self._agents = agents
        self._replaced = replaced
        self._indexed: bool | None = None  # whether the first row has an _ng_task_index

    def __call__(self, row: Json) -> str | None:
        return self._params(row) or self._agent(row) or self._index(row)

    def _params(self, row: Json) -> str | None:
        if "responses_create_params" not in row:
            near = nearest("responses_create_params", row)
            hint = f" (is {near!r} meant to be it?)" if near else ""
            return f'no responses_create_params in this row{hint}; it needs at least {{"responses_create_params": {{"input": ...}}}}'
        params = row["responses_create_params"]
        if not isinstance(params, dict):
            return f"responses_create_params must be an object, not {type(params).__name__}"
        metadata = params.get("metadata") or {}
        if not isinstance(metadata, dict):
            return f"responses_create_params.metadata must be an object, not {type(metadata).__name__}"
        extra = metadata.get("extra_body")
        if extra is not None and not (isinstance(extra, str) and _is_json(extra, dict)):
            return f"responses_create_params.metadata.extra_body must be a JSON object written as a string, not {extra!r:.60}"
        return None

    def _agent(self, row: Json) -> str | None:
        reference = row.get("agent_ref")
        if reference is None:
            if self._recipe.agent is None:
                return f"this row names no agent; give it an agent_ref, or name one with {option('agent')}"
            name = self._recipe.agent
        elif isinstance(reference, dict) and isinstance(reference.get("name"), str):
            name = self._recipe.runner(reference["name"])
            if self._replaced is not None and self._recipe.replaced(reference["name"]):
                self._replaced[reference["name"]] += 1
        else:
            return f'agent_ref must be {{"name": ...}}, not {orjson.dumps(reference)[:80].decode()}'
        if self._agents is not None and name not in self._agents:
            hint = did_you_mean(name, self._agents)
            map_option = option("map_agent", {name: "NAME"})
            other = f"; {option('agent', 'NAME')} runs all rows with another agent, {map_option} only its rows"
            other = other if reference is not None and self._recipe.agent is None else ""
            return f"no agent named {name!r}{hint}{other}"
        return None

    def _index(self, row: Json) -> str | None:
        index = row.get("_ng_task_index")
        if "_ng_task_index" in row and (not isinstance(index, int) or isinstance(index, bool) or index < 0):
            return f"_ng_task_index must be a whole number, 0 or more, not {index!r}"
        if self._indexed is None:
            self._indexed = "_ng_task_index" in row
        if self._indexed != ("_ng_task_index" in row):
            return "only some rows of this file have an _ng_task_index; set it in all of them or in none"
        return None


def _is_json(text: str | bytes, kind: type) -> bool:
    """Whether this is the JSON of a value of this type."""
    try:
        return isinstance(orjson.loads(text), kind)
    except orjson.JSONDecodeError:
        return False


def _overridden(params: Json, recipe: CollectionPlan) -> Json:
    if not recipe.params:
        return params
    result = dict(params)
    for key, value in recipe.params.items():
        *parents, leaf = key.split(".")
        place = result
        for parent in parents:
            below = place.get(parent)
            place[parent] = dict(below) if isinstance(below, dict) else {}
            place = place[parent]
        place[leaf] = value
    return result


def _with_seed(params: Json, seed: int) -> Json:
    # the Responses API has no seed; model servers take it from metadata.extra_body, a JSON string
    metadata = dict(params.get("metadata") or {})
    extra = orjson.loads(metadata.get("extra_body") or b"{}")
    metadata["extra_body"] = orjson.dumps({**extra, "seed": seed}).decode()
    return {**params, "metadata": metadata}


class InputCheck:
    """Checks every row that a recipe uses, and computes the digest of the files.

    Args:
        agents: the agents that exist; None if that is not known.

    Attributes:
        rows: rows checked so far. agents: the agents that run them. complete: whether all are checked.
        replaced: the rows so far of each agent that --agent replaces.
        digest: `digest_of` the files; None until it is known.
    """

    def __init__(self, paths: Sequence[Path], recipe: CollectionPlan, agents: Collection[str] | None) -> None:
        check_agent(recipe, agents)
        self.rows = 0
        self.agents: set[str] = set()
        self.replaced: Counter[str] = Counter()
        self.complete = False
        self.digest: str | None = None
        self._paths = paths
        self._recipe = recipe
        self._lines = CheckedLines(paths, RowCheck(recipe, agents, self.replaced), recipe.limit)
        self._remaining = iter(self._lines)
        self._checked = 0  # bytes
        self._end = 0  # of the last checked line, in its file
        self._stop = threading.Event()
        self._hurry = threading.Event()
        self._thread: ThreadPoolExecutor | None = None
        self._rest: Future[None] | None = None

    def check_first(self, size: int = FIRST_BYTES) -> None:
        """Check the first `size` bytes, or everything if there is a bad line among them.

        Raises:
            UsageError: bad lines; all are named.
        """
        for line in self._remaining:
            self._count(line)
            if self._checked >= size and not self._lines.bad:
                return
        self._complete()
        if sum(path.stat().st_size for path in self._paths) <= size:
            self.digest = digest_of(self._paths)

    def begin_rest(self) -> None:
        """Check the rest and compute the digest in a thread, unless both are done."""
        if self.digest is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="check the input")
            self._rest = self._thread.submit(self._check_rest)

    def raise_if_bad(self) -> None:
        """
        Raises:
            UsageError: the thread has found bad lines; all are named.
        """
        if self._rest is not None and self._rest.done():
            self._rest.result()

    async def finish(self) -> None:
        """Wait for the thread. Raises UsageError: there are bad lines; all are named."""
        if self._rest is not None:
            self._hurry.set()
            await asyncio.wrap_future(self._rest)

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        self._hurry.set()
        if self._thread is not None:
            self._thread.shutdown(wait=True)

    def names_in_rest(self) -> set[str]:
        """The agents that may run rows after the first part, found without parsing them: 1 s for a GB.

        Also finds names in other objects that look like an agent_ref.
        """
        if self.complete:
            return set()
        references: set[bytes] = set()
        for number, path in enumerate(self._paths[self._lines.reads :]):
            with open_rows(path) as file:
                references.update(_references(file, 0 if number else self._end))
        names = {orjson.loads(name) for name in references if _is_json(name, str)}
        return {self._recipe.runner(name) for name in names}

    def _check_rest(self) -> None:
        self._hurry.wait(BEGIN_S)
        began = time.perf_counter()
        for line in self._remaining:
            self._count(line)
            if self._stop.is_set():
                return
            if time.perf_counter() - began > SLICE_S:
                self._hurry.wait(SLICE_S)
                began = time.perf_counter()
        self._complete()
        self.digest = digest_of(self._paths, self._stop)

    def _count(self, line: Line) -> None:
        self.rows += 1
        self._checked += line.end - line.start
        self._end = line.end
        self.agents.add(self._recipe.reference(line.row)["name"])

    def _complete(self) -> None:
        if self.rows == 0:
            raise no_rows(self._paths)
        self.complete = True


def no_rows(paths: Sequence[Path]) -> UsageError:
    return UsageError(f"{title(paths)}: no rows in it; each line is one task")


def title(paths: Sequence[Path]) -> str:
    """The input in a message: `tasks.jsonl`, or `a.jsonl and 2 more files`."""
    more = len(paths) - 1
    return f"{paths[0]} and {more} more file{'s' * (more > 1)}" if more else str(paths[0])


def digest_of(paths: Sequence[Path], stop: threading.Event | None = None) -> str | None:
    """sha256 of a file as it is on the disk, or of the digests of several; None if `stop` was set.

    Raises:
        UsageError: a file cannot be read.
    """
    digests = []
    for path in paths:
        if (digest := _digest_of(path, stop)) is None:
            return None
        digests.append(digest)
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def _references(file: BinaryIO, start: int) -> Iterator[bytes]:
    """The names after byte `start` that look like those of an agent_ref; those at the end of a part are read twice."""
    while start > 0 and (skipped := file.read(min(start, READ_BYTES))):  # decompressed content cannot be sought
        start -= len(skipped)
    tail = b""
    while part := file.read(READ_BYTES):
        text = tail + part
        yield from _NAMED.findall(text)
        tail = text[-MAX_REFERENCE:]


def _digest_of(path: Path, stop: threading.Event | None) -> str | None:
    digest = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file:
            while part := file.read(READ_BYTES):
                if stop is not None and stop.is_set():
                    return None
                digest.update(part)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    return digest.hexdigest()
