"""`ng completion SHELL`: prints the completion script of a shell for `ng` and every `ng_x`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from ngym.cli.shell.main import COMMANDS, Choice, command
from ngym.cli.shell.main import main as ng

# Replacements in click's scripts: no space after a word that ends with `.` or `=`. fish does that by itself.
UNFINISHED = {
    "bash": {
        "COMPREPLY+=($value)\n": "COMPREPLY+=($value)\n"
        "            [[ $value == *[.=] ]] && compopt -o nospace 2>/dev/null\n"
    },
    "zsh": {
        "local -a completions\n": "local -a completions unfinished\n",
        'completions+=("$key")\n': '[[ "$key" == *[.=] ]] && unfinished+=("$key") || completions+=("$key")\n',
        "compadd -U -V unsorted -a completions\n    fi\n": "compadd -U -V unsorted -a completions\n    fi\n\n"
        "    if [ -n \"$unfinished\" ]; then\n        compadd -U -S '' -V unsorted -a unfinished\n    fi\n",
    },
    "fish": {},
}
SHELLS = tuple(UNFINISHED)


@command("completion")
@click.argument("shell", type=Choice(SHELLS))
def main(shell: str) -> None:
    """Print the completion script of a shell: commands, options, files, recipes, and the services and keys of a config.

    \b
    Examples: eval "$(ng completion bash)"       (into ~/.bashrc)
              eval "$(ng completion zsh)"        (into ~/.zshrc, after compinit)
              ng completion fish | source        (into ~/.config/fish/config.fish)
    """
    maker = get_completion_class(shell)
    assert maker is not None
    for script in ("ng", *(f"ng_{name}" for name in COMMANDS)):
        source = maker(ng, {}, script, f"_{script.upper()}_COMPLETE").source()
        for written, better in UNFINISHED[shell].items():
            source = source.replace(written, better)
        click.echo(source)
