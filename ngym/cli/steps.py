"""A walk through several commands: each step is announced, shown as the command that it is, and run."""

from __future__ import annotations

import shlex
import subprocess
import sys

import click


def step(number: int, of: int, what: str) -> None:
    click.secho(f"\n[{number}/{of}] {what}", bold=True)


def ng(name: str, *arguments: str) -> None:
    """Run `ng_<name>`."""
    click.secho(f"$ ng_{name} {shlex.join(arguments)}", dim=True)
    _run([sys.executable, "-m", "ngym", name, *arguments], f"ng_{name}")


def python(*arguments: str) -> None:
    """Run a script."""
    click.secho(f"$ python {shlex.join(arguments)}", dim=True)
    _run([sys.executable, *arguments], arguments[0])


def _run(arguments: list[str], name: str) -> None:
    """A step's own words say what went wrong, so a failure only ends this command with the same exit code."""
    code = subprocess.run(arguments, check=False).returncode
    if code:
        click.echo(f"{name} ended with exit code {code}; its message is above", err=True)
        sys.exit(code if code > 0 else 1)
