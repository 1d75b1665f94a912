"""`ng_reverify`: computes the rewards of stored rollouts again with the current gym servers."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import click
import orjson

from ngym.cli.shell.main import EXIT_DONE, EXIT_FAILED, command, config_files, count, writing
from ngym.did_you_mean import did_you_mean
from ngym.errors import ConfigError, UsageError
from ngym.runtime.live_region import sanitize
from ngym.schema import Json, agent_name, row_problem, trace_of

if TYPE_CHECKING:
    from ngym.config.service_config import Config
    from ngym.grading.reverify import ReverifiedRollout
    from ngym.peers import Peer, Peers
    from ngym.supervise.zygote_client import ZygoteClient

SHOWN = 5
EXIT_CODES = """\
Exit codes: 0    every rollout has been verified again
            1    some could not be verified; they keep their rewards in the output, and are counted
            2    the command, the config or the input is wrong; the line says where
            130  interrupted; nothing is written"""
FILE = click.Path(path_type=Path)


@command("ng_reverify", epilog=EXIT_CODES)
@click.option(
    "--input", "sources", multiple=True, required=True, metavar="FILE",
    help="Rollouts, JSONL, also .gz or .zst; a quoted pattern for several files, or repeat it.",
)  # fmt: skip
@click.option("--output", type=FILE, required=True, metavar="FILE", help="The same rollouts with their new rewards.")
@config_files("The config with the gym servers, which are started and stopped here.", "global_config.yaml")
@click.option("--models", is_flag=True, help="Also start the models that gym servers ask, such as a judge.")
@count("--concurrency", "Verifications at once.", 64)
@click.option("--overwrite", is_flag=True, help="Replace the output.")
@click.option("--dry-run", is_flag=True, help="Check the input, show what would be started, and do nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object at the end; the rest goes to standard error.")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.pass_context
def main(
    ctx: click.Context,
    sources: tuple[str, ...],
    output: Path,
    configs: tuple[Path, ...],
    models: bool,
    concurrency: int,
    overwrite: bool,
    dry_run: bool,
    as_json: bool,
    overrides: tuple[str, ...],
) -> None:
    """Re-score stored rollouts after a change of a verifier. No model is called, and no token changes.

    Environments that a judge scores need --models: the judge is asked again.

    \b
    Examples: ng_reverify --input out.jsonl --output again.jsonl
              ng_reverify --input out.jsonl --output again.jsonl --models --json
    """
    from ngym.config.service_config import load_config
    from ngym.files.atomic import check_new_output
    from ngym.files.jsonl import expand_paths
    from ngym.runtime.event_loop import signals_as_keyboard_interrupt
    from ngym.supervise.zygote_client import ZygoteClient

    inputs = expand_paths(sources)
    check_new_output(output, inputs, overwrite or dry_run)
    if dry_run:
        _show(_needs(load_config(configs, overrides), inputs, models), output, as_json)
        return
    with signals_as_keyboard_interrupt(), _replace_file(output) as file:
        check_new_output(output, inputs, overwrite)  # another process may have written it before the lock
        launcher = ZygoteClient.start()
        try:
            needs = _needs(load_config(configs, overrides), inputs, models)
            report = asyncio.run(_reverify(needs, launcher, inputs, file, output, concurrency))
        finally:
            launcher.close()
    report.show(output, as_json)
    ctx.exit(EXIT_FAILED if report.failed else EXIT_DONE)


class RequiredServices(NamedTuple):
    """gyms: agent -> the gym server that scores it. rows: rollouts of each agent. services: those that must run."""

    config: Config
    gyms: dict[str, str]
    rows: Counter[str]
    services: Collection[str]


def _needs(config: Config, inputs: Sequence[Path], models: bool) -> RequiredServices:
    from ngym.collect.plan import title
    from ngym.validation import config_for_scoring

    rows = Counter(str(agent_name(row)) for row in _rows(inputs))
    if not rows:
        raise UsageError(f"{title(inputs)}: no rows in it")
    gyms = {agent: _gym(config, agent, title(inputs)) for agent in rows}
    remedy = "--models starts it, and asks it again"
    return RequiredServices(config, gyms, rows, config_for_scoring(config, set(gyms.values()), models, remedy).services)


def _show(needs: RequiredServices, output: Path, as_json: bool) -> None:
    starts = sorted(needs.services)
    if as_json:
        click.echo(orjson.dumps({"output": str(output), "rows": needs.rows, "gyms": needs.gyms, "starts": starts}))
        return
    for agent, rows in needs.rows.items():
        click.echo(f"{agent}: {rows:,} rollouts, verified by {needs.gyms[agent]}")
    there = f" ({output} exists: --overwrite is needed)" if output.exists() else ""
    click.echo(f"would start {', '.join(starts)} and write {output}{there}; nothing was started or written")


@contextmanager
def _replace_file(output: Path) -> Iterator[BinaryIO]:
    """A file beside the output, locked, that becomes the output if the block succeeds. A killed run's is replaced. A link
    stays a link.

    Raises:
        FileLocked: another process writes the same output.
    """
    from ngym.files.atomic import open_locked, sync_folder

    target = Path(os.path.realpath(output))
    aside = target.with_name(f".{target.name}.partial")
    file = os.fdopen(open_locked(aside, output, "choose another --output"), "r+b")
    try:
        if os.fstat(file.fileno()).st_size:
            file.truncate(0)
        yield file
        with writing(output):
            file.flush()
            os.fsync(file.fileno())
        aside.rename(target)
        sync_folder(target.parent)
    except BaseException:
        with suppress(OSError):
            aside.unlink()
        raise
    finally:
        with suppress(OSError):  # of the same full disk, in the rest of the buffer
            file.close()


async def _reverify(
    needs: RequiredServices,
    launcher: ZygoteClient,
    inputs: Sequence[Path],
    file: BinaryIO,
    output: Path,
    concurrency: int,
) -> _Report:
    from ngym.cli.environments import start_services
    from ngym.grading.reverify import reverify_rows

    report = _Report()
    async with start_services(needs.config, needs.services, launcher) as peers:
        with writing(output):
            async for result in reverify_rows(_rows(inputs), _gym_of_row(needs.gyms, peers), concurrency):
                report.add(result)
                file.write(orjson.dumps(result.row) + b"\n")
    return report


def _rows(inputs: Sequence[Path]) -> Iterator[Json]:
    from ngym.files.jsonl import check_lines

    return (line.row for line in check_lines(inputs, _problem))


def _problem(row: Json) -> str | None:
    if not isinstance(row.get("response"), dict) or "reward" not in row:
        return "not a rollout: a row has 'response' and 'reward'"
    output = row["response"].get("output") or []
    if not (isinstance(output, list) and all(isinstance(item, dict) for item in output)):
        return "not a rollout: the 'output' of its response must be a list of objects"
    trace = trace_of(row)
    finishes = trace.get("finish_reasons") or []
    if not isinstance(finishes, list) or not all(
        isinstance(one, str | None) for one in (*finishes, trace.get("stop_reason"))
    ):
        return "not a rollout: ng.finish_reasons must be a list of texts, and ng.stop_reason a text"
    if agent_name(row) is None:
        return "its agent_ref names no agent, so its gym server is unknown"
    return row_problem(row)


def _gym(config: Config, agent: str, source: str) -> str:
    """The gym server that scores this agent's rollouts."""
    if agent not in config.services:
        near = did_you_mean(agent, config.services)
        raise ConfigError(f"{source}: its rows are of {agent!r}, which {config.files[0]} does not have{near}")
    gym = config.services[agent].options.get("gym")
    if gym not in config.services:
        raise ConfigError(f"{config.services[agent].where}: {agent!r} names no gym server with `gym`")
    return str(gym)


def _gym_of_row(gyms: dict[str, str], peers: Peers) -> Callable[[Json], Peer]:
    return lambda row: peers[gyms[str(agent_name(row))]]


class _Report:
    """Counts how many rewards changed."""

    def __init__(self) -> None:
        self.rows = self.same = self.failed = self.lost = 0
        self.changed: list[str] = []

    def add(self, result: ReverifiedRollout) -> None:
        self.rows += 1
        if result.failure is not None:
            self.failed += 1
            click.echo(sanitize(f"row {self.rows}: {result.failure}"), err=True)
        elif result.before == result.after:
            self.same += 1
        else:
            self.lost += result.after is None
            self.changed.append(f"row {self.rows}: {result.before} -> {result.after}")

    def show(self, output: Path, as_json: bool) -> None:
        if as_json:
            summary = {"same": self.same, "changed": len(self.changed), "to_null": self.lost, "failed": self.failed}
            click.echo(orjson.dumps({"output": str(output), "rows": self.rows, **summary}))
            return
        for line in self.changed[:SHOWN]:
            click.echo(line)
        if len(self.changed) > SHOWN:
            click.echo(f"and {len(self.changed) - SHOWN:,} more")
        counts = f"{self.same:,} rewards are the same, {len(self.changed):,} changed"
        counts += f" ({self.lost:,} of them to null)" if self.lost else ""
        click.echo(counts + (f", {self.failed:,} could not be verified" if self.failed else ""))
        click.echo(f"{output}: {self.rows:,} rows")
