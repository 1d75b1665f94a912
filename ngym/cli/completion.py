"""`ng completion SHELL`: the text that makes a shell complete `ng` and every `ng_x`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from ngym.cli.main import COMMANDS, Choice, command
from ngym.cli.main import main as ng

SHELLS = ("bash", "zsh", "fish")


@command("completion")
@click.argument("shell", type=Choice(SHELLS))
def main(shell: str) -> None:
    """Print what makes a shell complete commands, options, files, and the services of the config in the folder.

    \b
    Examples: eval "$(ng completion bash)"       (into ~/.bashrc)
              eval "$(ng completion zsh)"        (into ~/.zshrc, after compinit)
              ng completion fish | source        (into ~/.config/fish/config.fish)
    """
    maker = get_completion_class(shell)
    assert maker is not None
    for script in ("ng", *(f"ng_{name}" for name in COMMANDS)):
        click.echo(maker(ng, {}, script, f"_{script.upper()}_COMPLETE").source())
