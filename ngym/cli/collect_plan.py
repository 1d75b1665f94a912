"""What would a collection do? For --dry-run: the input is checked to its end, what is done is counted, nothing is written."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import click
import orjson

from ngym.cli.collect_options import Options
from ngym.collect.discovery import Known
from ngym.collect.files import check_places
from ngym.collect.overwrite import Paths
from ngym.collect.plan import PlannedRollout, input_rows, planned
from ngym.collect.run_record import RunRecord, Source
from ngym.config.service_config import Config
from ngym.errors import UsageError
from ngym.files.jsonl import read
from ngym.schema import Json, RolloutKey


@dataclass
class Earlier:
    """What stands in the files that would be written: finished rollouts, and how often each other one has failed."""

    done: set[RolloutKey] = field(default_factory=set)
    failed: Counter[RolloutKey] = field(default_factory=Counter)


@dataclass
class Plan:
    """agents: rollouts by agent. done, given_up: of the plan, in an earlier sitting that would be resumed."""

    first: PlannedRollout
    agents: Counter[str]
    tasks: set[tuple[str, int]]
    done: int
    given_up: int

    @property
    def rollouts(self) -> int:
        return self.agents.total()


def show_plan(options: Options, known: Known, config: Config | None) -> None:
    """What would be collected, by whom, and what of it is done.

    Raises:
        UsageError: as the same command without --dry-run; but of an output that is there it is only said.
    """
    check_places(options.output, options.source)
    earlier = _earlier(options)
    if options.resume and (earlier.done or earlier.failed):
        source = Source(options.source, options.recipe, options.token_format, known.services)
        RunRecord.resumed(Paths.beside(options.output).run, source, options.output)
    plan = _planned(options, known, earlier if options.resume else Earlier())
    needed = sorted(config.only(plan.agents).services) if config else None
    if options.as_json:
        click.echo(orjson.dumps(_as_json(options, known, plan, needed)))
    else:
        _print(options, known, plan, needed)
    if (earlier.done or earlier.failed) and not (options.resume or options.overwrite):
        click.echo(f"{options.output} already holds rollouts: --resume or --overwrite is needed", err=True)


def _earlier(options: Options) -> Earlier:
    paths, earlier = Paths.beside(options.output), Earlier()
    for path in (paths.output, paths.failures):
        for line in read(path) if path.is_file() else ():
            if not line.complete:
                continue
            key = _key(line.row)
            if key is None:
                raise UsageError(f"{path}:{line.number}: no row of ng_collect_rollouts; choose another --output")
            if "failure" in line.row:
                earlier.failed[key] += 1
            else:
                earlier.done.add(key)
    return earlier


def _key(row: Json) -> RolloutKey | None:
    try:
        return RolloutKey(row["ng"]["task_id"], row["_ng_task_index"], row["_ng_rollout_index"])
    except (KeyError, TypeError):
        return None


def _planned(options: Options, known: Known, earlier: Earlier) -> Plan:
    plan: Plan | None = None
    for rollout in planned(input_rows(options.source, options.recipe, known.agents), options.recipe):
        plan = plan or Plan(rollout, Counter(), set(), 0, 0)
        plan.agents[rollout.agent] += 1
        plan.tasks.add(rollout.key[:2])
        plan.done += rollout.key in earlier.done
        plan.given_up += rollout.key not in earlier.done and earlier.failed[rollout.key] >= options.max_attempts
    if plan is None:
        raise UsageError(f"{options.source}: no rows in it; each line is one task")
    return plan


def _as_json(options: Options, known: Known, plan: Plan, needed: list[str] | None) -> Json:
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


def _print(options: Options, known: Known, plan: Plan, needed: list[str] | None) -> None:
    click.echo(f"{plan.rollouts:,} rollouts into {options.output}; the first, by {plan.first.agent}:")
    click.echo(orjson.dumps(plan.first.row, option=orjson.OPT_INDENT_2))
    for agent, rollouts in plan.agents.items():
        click.echo(f"{agent}: {rollouts:,} rollouts")
    click.echo(f"{len(plan.tasks):,} tasks, {options.concurrency:,} rollouts at once")
    if plan.done or plan.given_up:
        left = plan.rollouts - plan.done - plan.given_up
        click.echo(f"--resume: {plan.done:,} are done, {plan.given_up:,} given up; {left:,} to go")
    where = (
        f"by the run at {known.head_url or options.head}"
        if needed is None
        else f"by services started here: {', '.join(needed)}"
    )
    click.echo(f"{where}; nothing was started or written")
