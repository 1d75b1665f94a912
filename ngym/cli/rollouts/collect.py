"""`ng_collect_rollouts`: run an agent over the tasks of a file, and write scored rollouts. Translates NeMo Gym's flags.

`+agent_name=math +num_repeats=8` becomes `--agent math --repeats 8`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from ngym.cli.shell.completion_names import services
from ngym.cli.shell.main import Choice, Command, command, config_files, count
from ngym.did_you_mean import did_you_mean
from ngym.errors import UsageError

EPILOG = """\
Exit codes: 0    every rollout is done
            1    some were given up (see *_failures.jsonl), or a service stayed down
            2    the command, the config or the input is wrong; the lines say where
            75   the disk was full for ten minutes
            130  interrupted; finished rollouts are on the disk, and --resume continues

NeMo Gym's flags (+agent_name=... +input_jsonl_fpath=... +num_repeats=...) are accepted, too."""


class CollectCommand(Command):
    """Also accepts NeMo Gym's flags, and prints the equivalent command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if any("=" in argument for argument in args):
            try:
                text = hint(args)
                args = translate_flags(args)
            except UsageError as error:
                raise click.UsageError(str(error), ctx) from None
            if text:
                click.echo(text, err=True)
        return super().parse_args(ctx, args)


@command("ng_collect_rollouts", epilog=EPILOG, cls=CollectCommand)
@click.option(
    "--agent", metavar="NAME", shell_complete=services("agent"),
    help="Run every row with this agent, also rows whose agent_ref names another one.",
)  # fmt: skip
@click.option(
    "--map-agent", "mapped", multiple=True, metavar="OLD=NEW",
    help="Run the rows whose agent_ref names OLD with the agent NEW, also beside --agent; repeat it.",
)  # fmt: skip
@click.option(
    "--input", "sources", multiple=True, required=True, metavar="FILE",
    help="Tasks, JSONL, also .gz, .zst or hf://datasets/OWNER/NAME/PATH; a quoted pattern, or repeat it.",
)  # fmt: skip
@click.option("--output", type=click.Path(path_type=Path), required=True, metavar="FILE", help="Rollouts, JSONL.")
@count("--limit", "Only the first N tasks.")
@count("--repeats", "Rollouts of each task.", 1)
@count("--concurrency", "Rollouts in flight.", 64)
@click.option("--resume", is_flag=True, help="Continue a run that was stopped.")
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace --output when the first new row is written; the old file is kept as FILE.old.",
)
@click.option("--temperature", type=click.FloatRange(0), metavar="T", help="Overrides the value of every row.")
@count("--max-output-tokens", "Overrides the value of every row.")
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE",
    help="Set a key of responses_create_params, such as top_p=0.9; repeat it.",
)  # fmt: skip
@click.option(
    "--seed", type=int, metavar="N", help="Repeatable sampling: each rollout gets a seed of its own, derived from N."
)
@click.option(
    "--token-format", type=Choice(["ng", "nemo"]), default="ng", show_default=True,
    help="ng: tokens as segments; nemo: also on each output item, for NeMo RL.",
)  # fmt: skip
@click.option(
    "--timeout", type=click.FloatRange(0, min_open=True), default=1800, show_default=True, metavar="SECONDS",
    help="Limit of each attempt.",
)  # fmt: skip
@count("--max-attempts", "Attempts per rollout, for failures that a retry can fix.", 3)
@config_files("Start the services of this config, and stop them at the end; repeat it.")
@click.option(
    "--head", metavar="URL|FOLDER",
    help="The run to use: its URL, such as http://127.0.0.1:11000, or the folder of its config.  "
    "[default: the run in this folder]",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Check everything and show the plan; collect nothing.")
@click.option("--by", metavar="FIELD", help="Also print a table by the values of this field, such as level.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object at the end; progress goes to standard error.")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.pass_context
def main(ctx: click.Context, /, **options: Any) -> None:
    """Run an agent over the tasks of files, and write scored rollouts as they finish.

    The services come from a run of ng_run (in this folder, or --head), or are started here with --config. Then
    KEY=VALUE override the config as for ng_run.

    \b
    Examples: ng_collect_rollouts --agent math_agent --input data/math/train.jsonl --output out.jsonl --repeats 8
              ng_collect_rollouts --agent math_agent --input data/math/train.jsonl --output out.jsonl --repeats 8 --resume
              ng_collect_rollouts --config global_config.yaml --input tasks.jsonl --output out.jsonl policy.replicas=2
    """
    from ngym.cli.rollouts.collect_run import Options, collect_into_files

    ctx.exit(collect_into_files(Options(**options)))


PARAMS = "responses_create_params"
SAME = {
    "agent_name": "--agent",
    "input_jsonl_fpath": "--input",
    "output_jsonl_fpath": "--output",
    "limit": "--limit",
    "num_repeats": "--repeats",
    "num_samples_in_parallel": "--concurrency",
}
SPECIAL = ("config_paths", "resume_from_cache", "num_repeats_add_seed", PARAMS)
NOT_NEEDED = ("upload_rollouts", "upload_rollouts_to_wandb", "disable_aggregation")
FLAG = re.compile(r"(?P<plus>\+{0,2})(?P<key>[A-Za-z_][\w.]*)=(?P<value>.*)", re.DOTALL)


def translate_flags(arguments: Sequence[str]) -> list[str]:
    """The arguments with every NeMo Gym flag translated; other arguments and `key=value` config overrides are kept.

    Raises:
        UsageError: a `+flag=` has no counterpart.
    """
    result: list[str] = []
    for argument in arguments:
        match = FLAG.fullmatch(argument)
        if match and (match["plus"] or match["key"].partition(".")[0] in (*SAME, *SPECIAL, *NOT_NEEDED)):
            result += _translate_option(match["key"], match["value"])
        else:
            result.append(argument)
    return result


def hint(arguments: Sequence[str]) -> str | None:
    """One line with the translated command, if it has NeMo Gym's flags."""
    ours = translate_flags(arguments)
    return (
        None if ours == list(arguments) else f"NeMo Gym's flags, understood as: ng_collect_rollouts {shlex.join(ours)}"
    )


def _translate_option(key: str, text: str) -> list[str]:
    value = _value(key, text)
    if key in SAME:
        return [] if value is None else [SAME[key], text if isinstance(value, str) else str(value)]
    if key.partition(".")[0] == PARAMS:
        return list(_params(key, value))
    if key == "config_paths":
        paths = value if isinstance(value, list) else [value]
        return [part for path in paths for part in ("--config", str(path))]
    if key == "resume_from_cache":
        return ["--resume"] if value else []
    if key == "num_repeats_add_seed":
        return ["--seed", "0"] if value else []
    if key in NOT_NEEDED:
        return []
    known = did_you_mean(key, (*SAME, *SPECIAL)) or "; see ng_collect_rollouts --help"
    raise UsageError(f"+{key}: this flag of NeMo Gym's has no counterpart here{known}")


def _params(key: str, value: Any) -> Iterator[str]:
    """`responses_create_params.temperature=0.7`, or the whole mapping at once."""
    leaf = key.removeprefix(PARAMS).removeprefix(".")
    if not leaf and not isinstance(value, dict):
        raise UsageError(f"+{PARAMS} must be a mapping such as {{temperature: 0.7}}, not {value!r}")
    settings = {leaf: value} if leaf else value
    for name, setting in settings.items():
        yield from ("--set", f"{name}={json.dumps(setting)}")


def _value(key: str, text: str) -> Any:
    """Parse a value as YAML, which covers Hydra's value grammar as far as these flags use it."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise UsageError(f"+{key}={text}: not a value that YAML knows") from None
