"""`ng`: every command under one name; and what all share: the config options, errors as one line with an exit code."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ngym.errors import NgymError, UsageError

Function = TypeVar("Function", bound=Callable[..., Any])

# Command -> its module and its line in `ng --help`, so that the help of one does not import the others.
COMMANDS = {
    "run": ("ngym.cli.run", "Start every service of the config and keep it running."),
    "status": ("ngym.cli.status", "Show the services of the run in this folder."),
    "serve": ("ngym.cli.serve", "Run one service of the config, alone, in this process."),
    "collect_rollouts": ("ngym.cli.collect", "Run an agent over tasks and write scored rollouts."),
    "export": ("ngym.cli.export", "Turn rollouts into training files."),
    "profile": ("ngym.cli.profile", "Say which tasks are solved, and which teach nothing."),
    "reverify": ("ngym.cli.reverify", "Verify stored rollouts again, without a model."),
    "validate": ("ngym.cli.validate", "Check a config; try its environments without a model."),
    "train": ("ngym.cli.train", "Train a policy."),
    "quickstart": ("ngym.cli.quickstart", "Make a tiny policy, score its rollouts, and teach it."),
    "list": ("ngym.cli.list", "Show every environment: domain, kind, rows, licence."),
    "prepare": ("ngym.cli.prepare", "Turn a public set into rows that its environment accepts."),
    "init": ("ngym.cli.init", "Make a folder with an environment of your own."),
}


class Command(click.Command):
    """A command whose own errors end it with one clear line: exit code 2 for a wrong command or config, else 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except NgymError as error:
            click.echo(str(error), err=True)
            ctx.exit(2 if isinstance(error, UsageError) else 1)


class CommandList(click.Group):
    """Commands that are imported when they are used; a misspelt one gets the nearest name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(COMMANDS[name][0]).main
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0].removeprefix("ng_").replace("-", "_")
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        if name not in COMMANDS and not name.startswith("_"):
            ctx.fail(f"no command {args[0]!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
        return super().resolve_command(ctx, [name, *args[1:]])

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands (each also exists as ng_<command>)"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


def command(name: str, epilog: str = "") -> Callable[[Callable[..., Any]], Command]:
    """`@command("ng_run")` instead of `@click.command`. The epilog's lines are kept as they are."""
    kept = "\b\n" + epilog if epilog else None
    settings = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
    return click.command(name, cls=Command, epilog=kept, context_settings=settings)


def config_options(function: Function) -> Function:
    """`--config FILE ...` and `key=value ...`: what every command that reads the global config takes."""
    files = click.option(
        "--config",
        "configs",
        multiple=True,
        type=click.Path(path_type=Path),
        default=["global_config.yaml"],
        show_default=True,
        metavar="FILE",
        help="A config file; repeat it, and later files win.",
    )
    overrides = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
    return overrides(files(function))


@click.command(cls=CommandList, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="ngym")
def main() -> None:
    """Train and evaluate language-model agents against environments that are plain HTTP services."""
