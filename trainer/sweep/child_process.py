"""A command in a process of its own: what it says goes onto the screen and into a log, and it never outlives us."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from ngym.runtime.signals import await_exit, put_off

ENDING_S = 60  # for what it started to stop, and for its last words to arrive


class Ended(NamedTuple):
    """exit_code: negative for the signal that killed it. last: the last line that said something."""

    exit_code: int
    last: str


def run(command: Sequence[str], log: Path) -> Ended:
    """Wait until it ends. Interrupted here (Ctrl-C), it is told to end, too, and that is waited for.

    It has a process group of its own, so that Ctrl-C reaches it once, through us, with all that it started.
    """
    process: subprocess.Popen[bytes] | None = None
    reader: threading.Thread | None = None
    last = [""]
    try:
        with put_off():
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0)
            assert process.stdout is not None
            reader = threading.Thread(target=_copy, args=(process.stdout, log, last), daemon=True)
            reader.start()
        code = await_exit(process)
    except BaseException:
        if process is not None:
            _end(process)
        raise
    finally:
        if reader is not None:
            reader.join(ENDING_S)
    return Ended(code, last[0])


def _end(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C would; by force where that takes too long, or when we are interrupted again.

    Where Ctrl-C is ignored, as behind a script's `&`, it ignores it, too, and is terminated.
    """
    with put_off():
        if process.poll() is not None:
            return
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    os.killpg(process.pid, signal.SIGTERM if ignored else signal.SIGINT)
    try:
        with suppress(subprocess.TimeoutExpired):
            await_exit(process, ENDING_S)
    finally:
        with put_off():
            running = process.poll() is None
        if running:
            os.killpg(process.pid, signal.SIGKILL)
            await_exit(process)


def _copy(stream: IO[bytes], log: Path, last: list[str]) -> None:
    with log.open("wb") as file:
        for raw in stream:
            file.write(raw)
            line = raw.decode(errors="replace")
            print(line, end="", flush=True)
            last[0] = line.strip() or last[0]
