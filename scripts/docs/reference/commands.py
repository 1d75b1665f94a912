"""The command line: what each command's own `--help` says, as a page."""

from __future__ import annotations

import importlib
import inspect
import re

import click

from ngym.cli.shell.main import COMMANDS
from ngym.cli.shell.main import main as everything

from .markup import code, fence, table, words
from .specimen import Specimen

WIDTH = 120
KEPT = "\b"


def text(specimen: Specimen) -> str:
    """Every command that `ng` lists, in its order."""
    said = "\n".join(_listed(name, line) for name, (_, line) in COMMANDS.items())
    intro = words(inspect.cleandoc(everything.help or ""))
    head = f"# Commands\n\n{intro}\n\n| | |\n|---|---|\n{said}\n"
    return "\n".join([head, *(_command(name, module) for name, (module, _) in COMMANDS.items())])


def _listed(name: str, line: str) -> str:
    return f"| [`ng_{name}`](#ng_{name}) | {words(line)} |"


def _command(name: str, module: str) -> str:
    command: click.Command = importlib.import_module(module).main
    context = click.Context(command, info_name=f"ng_{name}", max_content_width=WIDTH, terminal_width=WIDTH)
    parts = [f"## ng_{name} {{#ng_{name}}}\n", fence("text", _usage(command, context)), *_prose(command.help or "")]
    if isinstance(command, click.Group):
        parts += [_subcommands(command, context)]
    records = [record for each in command.get_params(context) if (record := each.get_help_record(context))]
    parts += [table(("Option", ""), [(code(options), words(what)) for options, what in records])]
    parts += _prose(command.epilog or "")
    return "\n".join(part for part in parts if part)


def _usage(command: click.Command, context: click.Context) -> str:
    return " ".join(command.get_usage(context).removeprefix("Usage: ").split())


def _subcommands(group: click.Group, context: click.Context) -> str:
    rows = [
        (code(name), words(group.get_command(context, name).get_short_help_str(200)))
        for name in group.list_commands(context)
    ]
    return table(("Command", ""), rows)


def _prose(help: str) -> list[str]:
    """A help text: paragraphs, and those that click keeps as they are."""
    found = []
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(help)):
        if KEPT in paragraph:
            found.append(fence("text", paragraph.replace(KEPT, "").strip("\n")))
        elif paragraph.strip():
            found.append(words(paragraph) + "\n")
    return found
