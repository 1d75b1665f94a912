"""Runs several commands in order; each step is announced and shown as the command that it runs."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import click

BACKGROUND_POLL_S = 0.2
LAST_LINES = 12


class Background(NamedTuple):
    """A command that runs in the background of the steps, with its output in a file."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path


@dataclass
class Walkthrough:
    """step_count: the number of steps. dry_run: show steps without running them. err: print to standard error.

    commands: the commands shown so far.
    """

    step_count: int
    dry_run: bool = False
    err: bool = False
    number: int = 0
    commands: list[str] = field(default_factory=list)
    _background: Background | None = None

    def step(self, what: str) -> None:
        self.number += 1
        click.secho(f"\n[{self.number}/{self.step_count}] {what}", bold=True, err=self.err)

    def ng(self, name: str, *arguments: str) -> None:
        """Run `ng_<name>`."""
        self._show(shlex.join([f"ng_{name}", *arguments]))
        self._run([sys.executable, "-m", "ngym", name, *arguments], f"ng_{name}")

    def python(self, *arguments: str) -> None:
        """Run a script."""
        self._show(shlex.join(["python", *arguments]))
        self._run([sys.executable, *arguments], arguments[0])

    @contextmanager
    def background(self, log: Path, name: str, *arguments: str) -> Iterator[None]:
        """Run `ng_<name>` in the background of this block, with its output in the file `log`. It stops with the block,
        and also when this process dies. If it ends by itself, the step that runs then is stopped, and so is the walk.
        """
        self._show(shlex.join([f"ng_{name}", *arguments]) + f" > {shlex.quote(str(log))} 2>&1 &")
        if self.dry_run:
            yield
        else:
            with _background_command([sys.executable, "-m", "ngym", name, *arguments], log) as process:
                self._background = Background(f"ng_{name}", process, log)
                try:
                    yield
                finally:
                    self._background = None
        self._show("kill %1")

    def say(self, text: str) -> None:
        click.echo(text, err=self.err)

    def _show(self, line: str) -> None:
        self.commands.append(line)
        click.secho(f"$ {line}", dim=True, err=self.err)

    def _run(self, arguments: list[str], name: str) -> None:
        """Run a step. A failed step has printed its error, so this command only ends with the same exit code."""
        if self.dry_run:
            return
        background = self._background
        code = _exit_code(
            arguments, sys.stderr.fileno() if self.err else None, background.process if background else None
        )
        if background is not None and background.process.poll() is not None:
            _report(background)
            sys.exit(_shell_code(background.process.returncode) or 1)
        if code:
            click.echo(f"{name} ended with exit code {code}; its message is above", err=True)
            sys.exit(_shell_code(code))


def _shell_code(code: int) -> int:
    """A process's exit code as a shell has it: a signal's is 128 and its number."""
    return code if code >= 0 else 128 - code


def _report(ended: Background) -> None:
    """Show why a background command ended."""
    lines = ended.log.read_text(encoding="utf-8", errors="replace").splitlines()
    click.echo("\n".join(lines[-LAST_LINES:]), err=True)
    click.echo(
        f"{ended.name} ended with exit code {ended.process.returncode}; its last lines are above, all in {ended.log}",
        err=True,
    )


def _exit_code(arguments: Sequence[str], stdout: int | None, background: subprocess.Popen[bytes] | None = None) -> int:
    """The exit code of a step. A step is never left running: it stops what it has started, and this waits for it.

    background: a process that the step needs; when it ends, the step is stopped.

    Raises:
        KeyboardInterrupt, SystemExit: for the first signal, once the step has ended.
    """
    process: subprocess.Popen[bytes] | None = None
    with _forward_signals(lambda: process) as signals:
        process = subprocess.Popen(arguments, stdout=stdout)
        if signals:
            process.terminate()
        code = process.wait() if background is None else _wait_with(process, background)
    _raise_first(signals)
    return code


def _wait_with(process: subprocess.Popen[bytes], background: subprocess.Popen[bytes]) -> int:
    """The exit code of a process that is stopped when the other one ends."""
    while background.poll() is None:
        try:
            return process.wait(BACKGROUND_POLL_S)
        except subprocess.TimeoutExpired:
            pass
    process.terminate()
    return process.wait()


@contextmanager
def _background_command(arguments: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs until the block ends, in whatever way; on Linux also when SIGKILL ends this process."""
    from ngym.supervise.service_zygote import PR_SET_PDEATHSIG, prctl

    end_with_us = partial(prctl, PR_SET_PDEATHSIG, signal.SIGTERM)
    process: subprocess.Popen[bytes] | None = None
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with log.open("wb") as output:
            with _forward_signals(lambda: process) as signals:
                process = subprocess.Popen(
                    arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    preexec_fn=end_with_us,  # noqa: PLW1509 (this process has one thread)
                )
            _raise_first(signals)
        yield process
    finally:
        if process is not None:
            with _forward_signals(lambda: process):
                process.terminate()
                process.wait()
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _forward_signals(running: Callable[[], subprocess.Popen[bytes] | None]) -> Iterator[list[int]]:
    """Record signals instead of raising, and pass some on to the running process; yields those that came.

    A terminal sends Ctrl-C to the process, too. SIGTERM, a Ctrl-C while the process starts, and every Ctrl-C after the
    first are passed on as SIGTERM. The handlers raise nothing: an exception within Popen.wait can leave its lock taken,
    and the next wait would not return.
    """
    signals: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        signals.append(number)
        process = running()
        if process is not None and (number == signal.SIGTERM or len(signals) > 1):
            process.terminate()

    handled = [each for each in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(each) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in handled}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise_first(signals: Sequence[int]) -> None:
    if signals:
        raise KeyboardInterrupt if signals[0] == signal.SIGINT else SystemExit(128 + signals[0])
