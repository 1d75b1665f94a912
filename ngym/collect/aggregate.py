"""Aggregates rows per agent for `out_aggregate_metrics.json`, including the environments' own metrics."""

from __future__ import annotations

import asyncio
import math
import sys
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import orjson

from ngym.errors import Boundary, ServiceError
from ngym.files.jsonl import read
from ngym.net.json_limits import BULK_WEIGHT, NODE_WEIGHT, ROW_BYTES, json_weight
from ngym.peers import Peer
from ngym.schema import Json
from ngym.stats import Rewards, Scores, Subsets, Values, parts_of

MAX_WEIGHT = BULK_WEIGHT * 9 // 10  # the rest is for the object around the rows
ROW_WEIGHT = 16  # of the object itself and its comma
MAX_FIELD_BYTES = 16 << 10
NOT_SENT = frozenset({"responses_create_params", "response", "ng", "agent_ref"})

MAX_ROLLOUTS = 50_000  # per agent; the environment receives only the first rollouts
MAX_BYTES = ROW_BYTES - (1 << 20)  # the rest is for the object around the rows
ASKED_S, TIMEOUT_S = 10.0, 120.0

NUMBER = (int, float)  # isinstance is faster with it than with int | float
LARGEST = sys.float_info.max
HUGE = 1e290  # the sum of larger numbers may overflow
SCALE = 2.0**64  # division by a power of two is exact


async def environment_metrics(output: Path, agent: Peer) -> Json | None:
    """`{"metrics": {...}, "errors": [...]}` over an agent's rows in the file; None: the environment has no metrics."""
    try:
        if not await _has_metrics(agent):
            return None
        rows, more = await asyncio.to_thread(_slim_rows, output, agent.name)
        body = {"verify_responses": rows}
        answer = await agent.post("/aggregate_metrics", body, timeout=TIMEOUT_S, idempotent=True)
        with Boundary("agent_error", f"{agent.name} answered /aggregate_metrics with no metrics"):
            own: Json = answer["ng"]["environment"]
    except ServiceError as error:
        return {"metrics": {}, "errors": [error.detail]}
    return {**own, "errors": [*own["errors"], f"only the first {len(rows):,} rollouts are in it"]} if more else own


async def _has_metrics(agent: Peer) -> bool:
    """Whether the agent's environment has metrics; False for an external agent without this route."""
    try:
        answer = await agent.get("/aggregate_metrics", timeout=ASKED_S)
    except ServiceError as error:
        if (error.upstream or {}).get("status") in (404, 405):
            return False
        raise
    return isinstance(answer, dict) and bool(answer.get("compute_metrics"))


def _slim_rows(output: Path, agent: str) -> tuple[list[Json], bool]:
    """The verifier's fields of each row, without the model's input and output, and without long fields.

    Also returns whether there are more rows than may be sent.
    """
    slim: list[Json] = []
    size = weight = 0
    for line in read(output):
        if line.problem or line.row["agent_ref"]["name"] != agent:
            continue
        fields = {name: orjson.dumps(value) for name, value in line.row.items() if name not in NOT_SENT}
        short = {name: value for name, value in fields.items() if len(value) <= MAX_FIELD_BYTES}
        columns = {name: line.row[name] for name in short}
        size += len(orjson.dumps(columns)) + 1
        weight += ROW_WEIGHT + sum(NODE_WEIGHT + 1 + json_weight(value) for value in short.values())
        if len(slim) == MAX_ROLLOUTS or size > MAX_BYTES or weight > MAX_WEIGHT:
            return slim, True
        slim.append(columns)
    return slim, False


@dataclass
class AgentTally:
    """All rows of one agent so far, in 16 to 50 bytes a row. numbers: name -> one value per row that has it.

    subsets: the rows grouped by the value of a field. own: the result of the environment's compute_metrics.
    """

    agent_ref: Json
    subsets: Subsets | None = None
    scores: Scores = field(default_factory=Scores)
    numbers: dict[str, Values] = field(default_factory=dict)
    own: Json | None = None
    output_tokens: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    stops: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)  # attempts, by class
    given_up: Counter[str] = field(default_factory=Counter)  # rollouts, by class of the last failure
    first_failures: dict[str, str] = field(default_factory=dict)  # class -> message of the first one

    def add(self, row: Json) -> None:
        """Count an output row (reference/rows.md)."""
        trace, task = row["ng"], row["_ng_task_index"]
        self.scores.add(task, row)
        if self.subsets is not None:
            self.subsets.add(task, row)
        self.statuses[str(trace["status"])] += 1
        self.stops[str(trace["stop_reason"])] += 1
        usage = row["response"].get("usage") or {}
        tokens = usage.get("output_tokens")
        self.output_tokens += tokens if isinstance(tokens, int) else 0
        of_rollout = {
            "input_tokens": usage.get("input_tokens"), "output_tokens": tokens, "turns": trace["turns"],
            "tool_calls": trace["tool_calls"], "tool_errors": trace["tool_errors"],
            "seconds": trace["timings"].get("total_s"),
        }  # fmt: skip
        for name, value in of_rollout.items():
            self._number(name, value)
        for name, value in row.items():
            if isinstance(value, NUMBER) and name[:4] != "_ng_":
                self._number(f"row.{name}" if name in of_rollout else name, value)
        for name, value in parts_of(row):
            self._number(name, value)

    @property
    def rewards(self) -> Rewards:
        """The rewards of the scored rows."""
        return self.scores.rewards

    @property
    def rollouts(self) -> int:
        return self.scores.rollouts

    @property
    def unscored(self) -> int:
        return self.scores.unscored

    @property
    def means(self) -> dict[str, float]:
        """The mean of each number, by name."""
        return {name: _mean(values) for name, values in sorted(self.numbers.items())}

    def _number(self, name: str, value: Any) -> None:
        """Count a value that a float can hold."""
        if isinstance(value, NUMBER) and -LARGEST <= value <= LARGEST:
            values = self.numbers.get(name)
            if values is None:
                values = self.numbers[name] = Values()
            values.add(value)

    def as_json(self) -> Json:
        """This agent's entry in the aggregate file: NeMo Gym's keys, and those of ngym under `ng`."""
        return {**self._metrics(), "group_level_metrics": list(self._groups()), "ng": self.summary()}

    def as_bytes(self) -> Iterator[bytes]:
        """`as_json` as JSON text, in parts: there may be millions of tasks, and each gets a line."""
        yield orjson.dumps(self._metrics(), option=orjson.OPT_INDENT_2).removesuffix(b"\n}")
        yield b',\n  "group_level_metrics": ['
        for number, group in enumerate(self._groups()):
            yield (b",\n    " if number else b"\n    ") + orjson.dumps(group)
        yield b'\n  ],\n  "ng": ' + orjson.dumps(self.summary(), option=orjson.OPT_INDENT_2) + b"\n}"

    def _metrics(self) -> Json:
        scores = {**self.scores.metrics(), **(self.subsets.metrics() if self.subsets else {})}
        own = (self.own or {}).get("metrics", {})
        metrics = {
            f"{statistic}/{name}": value
            for name, values in sorted(self.numbers.items())
            for statistic, value in _statistics(values).items()
        }
        return {
            "agent_ref": self.agent_ref,
            "agent_metrics": {**metrics, **scores, **own},
            "key_metrics": {"mean/reward": self.rewards.mean, **scores, **own},
        }

    def _groups(self) -> Iterator[Json]:
        for task, rewards in self.rewards.by_task():
            yield {
                "_ng_task_index": task, "rollouts": len(rewards), "unscored": self.scores.unscored_of[task],
                "mean/reward": fmean(rewards),
                "min/reward": min(rewards), "max/reward": max(rewards),
            }  # fmt: skip

    def summary(self) -> Json:
        """The numbers of the final table, as JSON."""
        return {
            "agent": self.agent_ref["name"],
            "rollouts": self.rollouts,
            "tasks": self.scores.tasks,
            "mean_reward": self.rewards.mean,
            "mean_reward_interval": self.rewards.interval,
            "best_of_k": [{"name": name, **asdict(item)} for name, item in self.scores.named_scores()],
            "subsets": {} if self.subsets is None else {self.subsets.name: self._by_value(self.subsets)},
            "environment": self.own,
            "unscored": self.unscored,
            "unscored_share": self.scores.unscored_share,
            "output_tokens": self.output_tokens,
            "means": self.means,
            "statuses": dict(self.statuses),
            "stop_reasons": dict(self.stops),
            "failed_attempts": dict(self.failures),
            "given_up": dict(self.given_up),
            "first_failures": self.first_failures,
        }

    @staticmethod
    def _by_value(subsets: Subsets) -> Json:
        return {
            value: {"rollouts": scores.rollouts, "unscored": scores.unscored, **scores.metrics()}
            for value, scores in sorted(subsets.scores.items())
        }


class Aggregates:
    """One tally per agent, in order of appearance. by: the field whose values form subsets; None: no subsets."""

    def __init__(self, by: str | None = None) -> None:
        self._by = by
        self.by_agent: dict[str, AgentTally] = {}

    @property
    def done(self) -> int:
        """Finished rollouts."""
        return sum(tally.rollouts for tally in self.by_agent.values())

    @property
    def given_up(self) -> int:
        """Rollouts that have no attempts left."""
        return sum(tally.given_up.total() for tally in self.by_agent.values())

    @property
    def output_tokens(self) -> int:
        return sum(tally.output_tokens for tally in self.by_agent.values())

    def add(self, row: Json) -> None:
        self._tally_of(row["agent_ref"]).add(row)

    def add_failure(self, row: Json, *, final: bool) -> None:
        """Count a row of `*_failures.jsonl`."""
        kind = row["failure"]["class"]
        tally = self._tally_of(row["agent_ref"])
        tally.failures[kind] += 1
        tally.first_failures.setdefault(kind, str(row["failure"].get("message") or ""))
        if final:
            self.give_up(row["agent_ref"], kind)

    def give_up(self, agent_ref: Json, kind: str) -> None:
        """Count a rollout that has no attempts left."""
        self._tally_of(agent_ref).given_up[kind] += 1

    def as_json(self) -> list[Json]:
        return [tally.as_json() for tally in self.by_agent.values()]

    def as_bytes(self) -> Iterator[bytes]:
        """`as_json` as JSON text, in parts."""
        yield b"["
        for number, tally in enumerate(self.by_agent.values()):
            yield b",\n" if number else b"\n"
            yield from tally.as_bytes()
        yield b"\n]\n"

    def _tally_of(self, agent_ref: Json) -> AgentTally:
        name = agent_ref["name"]
        if name not in self.by_agent:
            self.by_agent[name] = AgentTally(agent_ref, Subsets(self._by) if self._by else None)
        return self.by_agent[name]


def _mean(numbers: Values) -> float:
    values, scale = _scale(numbers)
    return fmean(values) * scale


def _statistics(numbers: Values) -> dict[str, float]:
    values, scale = _scale(numbers)
    statistics = {"mean": fmean(values), "min": min(values), "max": max(values), "median": median(values)}
    if len(values) > 1:
        statistics["std"] = stdev(values)
    return {name: value * scale for name, value in statistics.items() if math.isfinite(value * scale)}


def _scale(numbers: Values) -> tuple[array[float], float]:
    """The numbers divided by a scale so that their sum does not overflow, and the scale."""
    values = array("d", iter(numbers))
    if max(max(values), -min(values)) <= HUGE:
        return values, 1.0
    return array("d", (value / SCALE for value in values)), SCALE
