"""A walk through several commands: each step is announced, shown as the command that it is, and run."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from types import FrameType

import click

from ngym.runtime.signals import put_off


@dataclass
class Walk:
    """of: how many steps there are. dry_run: they are shown, and not run. err: all that is said goes to standard error.

    commands: those that were shown.
    """

    of: int
    dry_run: bool = False
    err: bool = False
    number: int = 0
    commands: list[str] = field(default_factory=list)

    def step(self, what: str) -> None:
        self.number += 1
        click.secho(f"\n[{self.number}/{self.of}] {what}", bold=True, err=self.err)

    def ng(self, name: str, *arguments: str) -> None:
        """Run `ng_<name>`."""
        self._show(f"ng_{name}", *arguments)
        self._run([sys.executable, "-m", "ngym", name, *arguments], f"ng_{name}")

    def python(self, *arguments: str) -> None:
        """Run a script."""
        self._show("python", *arguments)
        self._run([sys.executable, *arguments], arguments[0])

    def say(self, text: str) -> None:
        click.echo(text, err=self.err)

    def _show(self, *words: str) -> None:
        self.commands.append(shlex.join(words))
        click.secho(f"$ {self.commands[-1]}", dim=True, err=self.err)

    def _run(self, arguments: list[str], name: str) -> None:
        """A step's own words say what went wrong, so a failure only ends this command with the same exit code."""
        if self.dry_run:
            return
        before = signal.signal(signal.SIGTERM, _terminated)
        try:
            code = _ended(arguments, sys.stderr.fileno() if self.err else None)
        finally:
            signal.signal(signal.SIGTERM, before)
        if code:
            click.echo(f"{name} ended with exit code {code}; its message is above", err=True)
            sys.exit(code if code > 0 else 128 - code)


def _terminated(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def _ended(arguments: list[str], stdout: int | None) -> int:
    """The exit code of a step, which is never left alone: what it has started, it stops itself.

    Of a Ctrl-C it hears from the terminal; of one as it starts, of SIGTERM, and of every Ctrl-C but the first, from us.

    Raises:
        KeyboardInterrupt, SystemExit: what came first, once the step has ended.
    """
    process: subprocess.Popen[bytes] | None = None
    stopped: BaseException | None = None
    hears = False
    while True:
        try:
            if process is None:
                with put_off():
                    process = subprocess.Popen(arguments, stdout=stdout)
            hears = True
            code = process.wait()
            break
        except (KeyboardInterrupt, SystemExit) as error:
            if process is None:
                raise
            if not hears or stopped is not None or isinstance(error, SystemExit):
                process.terminate()
            stopped = stopped or error
    if stopped is not None:
        raise stopped
    return code
