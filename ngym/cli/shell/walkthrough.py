"""Runs several commands in order; each step is announced and shown as the command that it runs."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from types import FrameType

import click


@dataclass
class Walk:
    """of: the number of steps. dry_run: show steps without running them. err: print to standard error.

    commands: the commands shown so far.
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
        """Run a step. A failed step has printed its error, so this command only ends with the same exit code."""
        if self.dry_run:
            return
        code = _exit_code(arguments, sys.stderr.fileno() if self.err else None)
        if code:
            click.echo(f"{name} ended with exit code {code}; its message is above", err=True)
            sys.exit(code if code > 0 else 128 - code)


def _exit_code(arguments: list[str], stdout: int | None) -> int:
    """The exit code of a step. A step is never left running: it stops what it has started, and this waits for it.

    A terminal sends Ctrl-C to the step, too. SIGTERM, a Ctrl-C while the step starts, and every Ctrl-C after the first
    are passed on as SIGTERM. The handlers raise nothing: an exception within Popen.wait can leave its lock taken, and
    the next wait would not return.

    Raises:
        KeyboardInterrupt, SystemExit: for the first signal, once the step has ended.
    """
    came: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def handle(number: int, _: FrameType | None) -> None:
        came.append(number)
        if process is not None and (number == signal.SIGTERM or len(came) > 1):
            process.terminate()

    heard = [each for each in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(each) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in heard}
    try:
        process = subprocess.Popen(arguments, stdout=stdout)
        if came:
            process.terminate()
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt if came[0] == signal.SIGINT else SystemExit(128 + came[0])
    return code
