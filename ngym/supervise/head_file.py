"""Where commands in a second terminal find the run: `.ngym/head.json` beside the config, while the run lives."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ngym.errors import UsageError
from ngym.net.auth import RUN_TOKEN, token_from
from ngym.net.tls import trust

FOLDER = ".ngym"
FILE = "head.json"
LOCK = "head.lock"


@dataclass(frozen=True)
class Running:
    """A run that lives: its head's URL, its process, its tokens and whom it believes.

    admin_token opens the weights, run_token (if it is locked) anything else. ca: a PEM file.
    """

    url: str
    pid: int
    admin_token: str
    run_token: str | None = None
    ca: str | None = None


class HeadFile:
    """This run's claim on a folder. The first run that lives there has the file; a second one only has its own logs."""

    def __init__(self, folder: Path, owned: str | None) -> None:
        """owned: what this run wrote into it, if it has the file."""
        self._path = folder / FILE
        self._owned = owned
        self.logs = folder / ("logs" if owned else f"logs-{os.getpid()}")

    @classmethod
    def claim(cls, root: Path, running: Running) -> HeadFile:
        folder = root / FOLDER
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            problem = f"{folder}: cannot be made ({error.strerror}); the logs go there, so {root} must be writable"
            raise UsageError(problem) from None
        content = json.dumps(asdict(running))
        with (folder / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # for as long as it takes to look and to write
            other = find_running(root)
            if other is not None and other.url != running.url and _accepts(other.url):
                return cls(folder, owned=None)
            unfinished = folder / f"{FILE}.new"
            unfinished.unlink(missing_ok=True)
            with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(content)
            unfinished.replace(folder / FILE)
        return cls(folder, owned=content)

    def remove(self) -> None:
        """If it still is this run's."""
        with contextlib.suppress(OSError):
            if self._owned is not None and self._path.read_text() == self._owned:
                self._path.unlink()


def _accepts(url: str) -> bool:
    """Whether anybody listens there: a pid alone may by now be that of another program."""
    address = urlsplit(url)
    try:
        socket.create_connection((address.hostname or "", address.port or 80), timeout=1).close()
    except OSError:
        return False
    return True


def find_running(root: Path) -> Running | None:
    """The run that lives in this folder, or None; a file that a killed run left behind counts as none. Its ca is trusted."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        running = Running(**json.loads((root / FOLDER / FILE).read_text()))
        os.kill(running.pid, 0)
        if running.ca:
            trust(Path(running.ca))
        return running
    return None


def head_of(root: Path, given: str | None, otherwise: str) -> str:
    """The URL of the head to use: the given one, else that of the run in this folder.

    There is no default port: who listens there may serve another folder's code under the same names.

    Args:
        otherwise: what else the user can do, for the message.

    Raises:
        UsageError: none is given, and nothing runs here.
    """
    if given is not None:
        return given.rstrip("/")
    running = find_running(root)
    if running is None:
        raise UsageError(f"nothing runs in {root}: start the services there with ng_run, {otherwise}")
    return running.url


def token_of(url: str, root: Path) -> str | None:
    """What opens the head at this URL: the token of the run in this folder if it is that one's, else NGYM_TOKEN's."""
    running = find_running(root)
    return running.run_token if running is not None and running.url == url.rstrip("/") else token_from(RUN_TOKEN)
