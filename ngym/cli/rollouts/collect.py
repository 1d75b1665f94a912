"""`ng_collect_rollouts`: run an agent over the tasks of a file, and write scored rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ngym.cli.shell.completion_names import services
from ngym.cli.shell.main import Choice, Command, command
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
            from ngym.collect.nemo_flags import hint, translated

            try:
                text = hint(args)
                args = translated(args)
            except UsageError as error:
                raise click.UsageError(str(error), ctx) from None
            if text:
                click.echo(text, err=True)
        return super().parse_args(ctx, args)


@command("ng_collect_rollouts", epilog=EPILOG, cls=CollectCommand)
@click.option(
    "--agent", metavar="NAME", shell_complete=services("agent"), help="The agent of rows without an agent_ref."
)
@click.option("--input", "source", type=click.Path(path_type=Path), required=True, metavar="FILE", help="Tasks, JSONL.")
@click.option("--output", type=click.Path(path_type=Path), required=True, metavar="FILE", help="Rollouts, JSONL.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Only the first N tasks.")
@click.option(
    "--repeats", type=click.IntRange(1), default=1, show_default=True, metavar="N", help="Rollouts of each task."
)
@click.option(
    "--concurrency", type=click.IntRange(1), default=64, show_default=True, metavar="N", help="Rollouts in flight."
)
@click.option("--resume", is_flag=True, help="Continue a run that was stopped.")
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace --output when the first new row is written; the old file is kept as FILE.old.",
)
@click.option("--temperature", type=click.FloatRange(0), metavar="T", help="Overrides the value of every row.")
@click.option("--max-output-tokens", type=click.IntRange(1), metavar="N", help="Overrides the value of every row.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set a key of responses_create_params, such as top_p=0.9; repeat it.",
)
@click.option("--seed", type=int, metavar="N", help="Rollout i of a task samples with seed N + i.")
@click.option(
    "--token-format",
    type=Choice(["ng", "nemo"]),
    default="ng",
    show_default=True,
    help="ng: tokens as segments; nemo: also on each output item, for NeMo RL.",
)
@click.option(
    "--timeout", type=click.FloatRange(0, min_open=True), default=1800, show_default=True, metavar="SECONDS",
    help="Limit of each attempt.",
)  # fmt: skip
@click.option(
    "--max-attempts", type=click.IntRange(1), default=3, show_default=True, metavar="N",
    help="Attempts per rollout, for failures that a retry can fix.",
)  # fmt: skip
@click.option(
    "--config",
    "configs",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE",
    help="Start the services of this config, and stop them at the end; repeat it.",
)
@click.option(
    "--head", metavar="URL", help="The run to use, such as http://127.0.0.1:11000.  [default: the run in this folder]"
)
@click.option("--dry-run", is_flag=True, help="Check everything and show the plan; collect nothing.")
@click.option("--by", metavar="FIELD", help="Also print a table by the values of this field, such as level.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object at the end; progress goes to standard error.")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.pass_context
def main(ctx: click.Context, /, **options: Any) -> None:
    """Run an agent over the tasks of a file, and write scored rollouts as they finish.

    The services come from a run of ng_run (in this folder, or --head), or are started here with --config. Then
    KEY=VALUE override the config as for ng_run.

    \b
    Examples: ng_collect_rollouts --agent math_agent --input data/math/train.jsonl --output out.jsonl --repeats 8
              ng_collect_rollouts --agent math_agent --input data/math/train.jsonl --output out.jsonl --repeats 8 --resume
              ng_collect_rollouts --config global_config.yaml --input tasks.jsonl --output out.jsonl policy.replicas=2
    """
    from ngym.cli.rollouts.collect_run import Options, collect_into_files

    ctx.exit(collect_into_files(Options(**options)))
