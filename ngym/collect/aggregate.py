"""What do the rows say together? Counters and numbers per agent, updated row by row; `out_aggregate_metrics.json` at the end."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import asdict, dataclass, field
from statistics import fmean, median, stdev
from typing import Any

from ngym.metrics import BestOfK, Rewards
from ngym.schema import Json


@dataclass
class AgentTally:
    """All rows of one agent so far. `numbers`: name -> one value per row that knows it; 8 bytes each."""

    agent_ref: Json
    rewards: Rewards = field(default_factory=Rewards)
    numbers: dict[str, array[float]] = field(default_factory=dict)
    rollouts: int = 0
    unscored: int = 0
    output_tokens: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    stops: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)  # attempts, by class
    given_up: Counter[str] = field(default_factory=Counter)  # rollouts, by class of the last failure

    def add(self, row: Json) -> None:
        """Count an output row (wire.md, section 3)."""
        trace = row["ng"]
        self.rollouts += 1
        self.statuses[str(trace["status"])] += 1
        self.stops[str(trace["stop_reason"])] += 1
        if row["reward"] is None:
            self.unscored += 1
        else:
            self.rewards.add(row["_ng_task_index"], row["reward"])
        usage = row["response"].get("usage") or {}
        tokens = usage.get("output_tokens")
        self.output_tokens += tokens if isinstance(tokens, int) else 0
        for name in ("input_tokens", "output_tokens"):
            self._number(name, usage.get(name))
        for name in ("turns", "tool_calls", "tool_errors"):
            self._number(name, trace[name])
        self._number("seconds", trace["timings"]["total_s"])
        for name, value in row.items():
            if name[:4] != "_ng_":
                self._number(name, value)

    def _number(self, name: str, value: Any) -> None:
        if isinstance(value, int | float):
            if name not in self.numbers:
                self.numbers[name] = array("d")
            self.numbers[name].append(value)

    def as_json(self) -> Json:
        """This agent's entry in the aggregate file: NeMo Gym's keys, and ours under `ng`."""
        best = {f"{self.best_name(item)}/reward": item.mean for item in self.rewards.best_of()}
        metrics = {
            f"{statistic}/{name}": value
            for name, values in sorted(self.numbers.items())
            for statistic, value in _statistics(values).items()
        }
        return {
            "agent_ref": self.agent_ref,
            "agent_metrics": {**metrics, **best},
            "key_metrics": {"mean/reward": self.rewards.mean, **best},
            "group_level_metrics": [
                {"_ng_task_index": task, "rollouts": len(rewards), "mean/reward": fmean(rewards),
                 "min/reward": min(rewards), "max/reward": max(rewards)}
                for task, rewards in sorted(self.rewards.by_task.items())
            ],
            "ng": self.summary(),
        }  # fmt: skip

    def summary(self) -> Json:
        """The numbers of the final table, as JSON."""
        return {
            "agent": self.agent_ref["name"],
            "rollouts": self.rollouts,
            "tasks": len(self.rewards.by_task),
            "mean_reward": self.rewards.mean,
            "mean_reward_interval": self.rewards.interval,
            "best_of_k": [{"name": self.best_name(item), **asdict(item)} for item in self.rewards.best_of()],
            "unscored": self.unscored,
            "output_tokens": self.output_tokens,
            "means": {name: fmean(values) for name, values in sorted(self.numbers.items())},
            "statuses": dict(self.statuses),
            "stop_reasons": dict(self.stops),
            "failed_attempts": dict(self.failures),
            "given_up": dict(self.given_up),
        }

    def best_name(self, item: BestOfK) -> str:
        """`pass@k` where rewards are 0 and 1, else `best@k`: the same formula."""
        return f"{'pass' if self.rewards.binary else 'best'}@{item.k}"


class Aggregates:
    """One tally per agent, in order of appearance."""

    def __init__(self) -> None:
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
        self._of(row["agent_ref"]).add(row)

    def add_failure(self, row: Json, *, final: bool) -> None:
        """Count a row of `*_failures.jsonl`."""
        kind = row["failure"]["class"]
        self._of(row["agent_ref"]).failures[kind] += 1
        if final:
            self.give_up(row["agent_ref"], kind)

    def give_up(self, agent_ref: Json, kind: str) -> None:
        """Count a rollout that has no attempts left."""
        self._of(agent_ref).given_up[kind] += 1

    def as_json(self) -> list[Json]:
        return [tally.as_json() for tally in self.by_agent.values()]

    def _of(self, agent_ref: Json) -> AgentTally:
        name = agent_ref["name"]
        if name not in self.by_agent:
            self.by_agent[name] = AgentTally(agent_ref)
        return self.by_agent[name]


def _statistics(values: array[float]) -> dict[str, float]:
    found = {"mean": fmean(values), "min": min(values), "max": max(values), "median": median(values)}
    return {**found, "std": stdev(values)} if len(values) > 1 else found
