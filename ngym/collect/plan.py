"""Plans rollouts from input rows, repeats and overrides, one at a time, so that they are never all in memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import orjson

from ngym.did_you_mean import did_you_mean, nearest
from ngym.errors import UsageError
from ngym.files.jsonl import checked
from ngym.schema import AgentRef, Json, RolloutKey, task_id
from ngym.stats.pass_at_k import DenseInts

AGENT_TYPE = "responses_api_agents"  # NeMo Gym's name, kept in agent_ref so that its tools can read these rows


@dataclass(frozen=True)
class Recipe:
    """How input rows become rollouts.

    agent: of rows without agent_ref. repeats: rollouts a task, in the order abc -> aabbcc. limit: only the first rows.
    params: override keys of each row's responses_create_params; a dotted key sets a leaf (`reasoning.effort`).
    seed: rollout i of a task samples with seed + i; None leaves sampling free.
    """

    agent: str | None = None
    repeats: int = 1
    limit: int | None = None
    params: Json = field(default_factory=dict)
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class PlannedRollout:
    """One rollout to collect. row: the body of the agent's /run, with both indices, agent_ref and overrides.

    group: all rollouts of its task that are collected together; empty: the caller compares them itself.
    """

    key: RolloutKey
    agent: str
    row: Json
    group: tuple[RolloutKey, ...] = ()

    @property
    def first(self) -> RolloutKey:
        """The key that identifies its group."""
        return self.group[0] if self.group else self.key


def planned(rows: Iterable[Json], recipe: Recipe) -> Iterator[PlannedRollout]:
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
        reference: AgentRef = row.get("agent_ref") or {"type": AGENT_TYPE, "name": recipe.agent or ""}
        indices = range(first, first + recipe.repeats)
        group = tuple(RolloutKey(identity, task_index, rollout_index) for rollout_index in indices)
        for rollout_index in indices:
            params = _overridden(row["responses_create_params"], recipe, rollout_index)
            ours = {"_ng_task_index": task_index, "_ng_rollout_index": rollout_index, "agent_ref": reference}
            yield PlannedRollout(
                RolloutKey(identity, task_index, rollout_index),
                reference["name"],
                {**row, "responses_create_params": params, **ours},
                group,
            )


def input_rows(path: Path, recipe: Recipe, agents: Collection[str] | None = None) -> Iterator[Json]:
    """Stream the rows of a file; at the end one UsageError names every bad line.

    Args:
        agents: the agents that exist; None if that is not known.
    """
    check_agent(recipe, agents)
    check = RowCheck(recipe, agents)
    return (line.row for line in checked(path, check, recipe.limit))


def check_agent(recipe: Recipe, agents: Collection[str] | None) -> None:
    """Raise a UsageError if the agent of --agent does not exist."""
    if agents is not None and recipe.agent is not None and recipe.agent not in agents:
        raise UsageError(f"--agent: no agent named {recipe.agent!r}{did_you_mean(recipe.agent, agents)}")


def checked_rows(rows: Iterable[Json], recipe: Recipe, agents: Collection[str]) -> Iterator[Json]:
    """Yield the rows, each checked when it is taken.

    Raises:
        UsageError: what is wrong with the first bad one.
    """
    check = RowCheck(recipe, agents)
    for position, row in enumerate(rows):
        if problem := check(row):
            raise UsageError(f"task {position}: {problem}")
        yield row


class RowCheck:
    """Returns the mistake of an input row, or None."""

    def __init__(self, recipe: Recipe, agents: Collection[str] | None) -> None:
        self._recipe = recipe
        self._agents = agents
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
        if extra is not None and not _is_json_object(extra):
            return f"responses_create_params.metadata.extra_body must be a JSON object written as a string, not {extra!r:.60}"
        return None

    def _agent(self, row: Json) -> str | None:
        reference = row.get("agent_ref")
        if reference is None:
            if self._recipe.agent is None:
                return "this row names no agent; give it an agent_ref, or name one with --agent"
            name = self._recipe.agent
        elif isinstance(reference, dict) and isinstance(reference.get("name"), str):
            name = reference["name"]
        else:
            return f'agent_ref must be {{"name": ...}}, not {orjson.dumps(reference)[:80].decode()}'
        if self._agents is not None and name not in self._agents:
            return f"no agent named {name!r}{did_you_mean(name, self._agents)}"
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


def _is_json_object(text: object) -> bool:
    try:
        return isinstance(text, str) and isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        return False


def _overridden(params: Json, recipe: Recipe, rollout_index: int) -> Json:
    if not recipe.params and recipe.seed is None:
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
    if recipe.seed is not None:
        # the Responses API has no seed; model servers take it from metadata.extra_body, a JSON string
        metadata = dict(result.get("metadata") or {})
        extra = orjson.loads(metadata.get("extra_body") or b"{}")
        metadata["extra_body"] = orjson.dumps({**extra, "seed": recipe.seed + rollout_index}).decode()
        result["metadata"] = metadata
    return result
