"""`ng help [COMMAND]`: the same text as `ng --help` and `ng COMMAND --help`."""

from __future__ import annotations

import click

from ngym.cli.shell.main import COMMANDS, Command, CommandList, command


def _names(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    return [name for name in COMMANDS if name.startswith(begun)]


@command("help")
@click.argument("name", required=False, metavar="[COMMAND]", shell_complete=_names)
@click.pass_context
def main(ctx: click.Context, name: str | None) -> None:
    """Show the help of a command, or of `ng` with all commands.

    \b
    Examples: ng help
              ng help run
    """
    ng = ctx.find_root()
    assert isinstance(ng.command, CommandList)
    if name is None:
        click.echo(ng.get_help())
        return
    found, named, _ = ng.command.resolve_command(ng, [name])
    assert isinstance(named, Command)
    with click.Context(named, info_name=found, parent=ng) as context:
        click.echo(context.get_help())
