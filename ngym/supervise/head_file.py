"""Finds a live run by `.ngym/head.json` next to the config, and sends it small GET requests."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import socket
import ssl
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from ngym.errors import UsageError
from ngym.net.addresses import has_loopback
from ngym.net.auth import RUN_TOKEN, token_from
from ngym.net.tls import client_context, trust

MAX_REPLY_BYTES = 8 << 20
FOLDER = ".ngym"
FILE = "head.json"
LOCK = "head.lock"


@dataclass(frozen=True)
class Reply:
    status: int
    body: bytes


@dataclass(frozen=True)
class Health:
    """Whether a service can serve, and if not, why.

    is_late: it did not answer in time. is_distrusted: its certificate is wrong, and waiting does not help.
    """

    ready: bool
    reason: str = ""
    is_late: bool = False
    is_distrusted: bool = False


async def http_get(url: str, timeout_s: float, token: str | None = None) -> Reply:
    """GET a URL, with a bearer token if one is given.

    Raises:
        OSError: it cannot be reached. TimeoutError: there is no answer in time.
    """
    parts = urlsplit(url)
    secure = client_context() if parts.scheme == "https" else None
    port = parts.port or (443 if secure else 80)
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=secure)
        try:
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            opener = f"Authorization: Bearer {token}\r\n" if token else ""
            request = f"GET {target} HTTP/1.0\r\nHost: {parts.netloc}\r\nAccept: application/json\r\n{opener}\r\n"
            writer.write(request.encode())
            answer = await reader.read(MAX_REPLY_BYTES)
            while answer and len(answer) < MAX_REPLY_BYTES and (more := await reader.read(MAX_REPLY_BYTES)):
                answer += more
        finally:
            writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if len(words) < 2 or not words[1][:3].isdigit():
        raise ConnectionResetError(f"{url}: the connection was closed without an answer")
    return Reply(int(words[1][:3]), body)


async def health(url: str, timeout_s: float, token: str | None = None) -> Health:
    """Ask a service's /ready. A third-party service may not have it: any answer that is not a server error counts."""
    try:
        reply = await http_get(f"{url.rstrip('/')}/ready", timeout_s, token)
    except TimeoutError:
        return Health(False, f"no answer within {timeout_s:g} s", is_late=True)
    except ssl.SSLCertVerificationError as error:
        return Health(False, f"its certificate is not accepted: {error.verify_message}", is_distrusted=True)
    except OSError as error:
        return Health(False, f"not reachable: {error.strerror or error}")
    return Health(True) if reply.status < 500 else Health(False, _reason(reply))


def _reason(reply: Reply) -> str:
    """The one-line reason of a service that is not ready."""
    with contextlib.suppress(ValueError):
        problem = json.loads(reply.body)
        if isinstance(problem, dict) and (reason := problem.get("reason") or problem.get("detail")):
            return str(reason)
    return f"/ready answers {reply.status}"


@dataclass(frozen=True)
class RunningHead:
    """A live run: its head's URL, its process, its tokens and its certificate authority.

    admin_token authorizes weight updates, run_token (if the run is locked) everything else. ca: a PEM file.
    host: the name of its machine; other machines may see the same folder.
    """

    url: str
    pid: int
    admin_token: str
    run_token: str | None = None
    ca: str | None = None
    host: str = field(default_factory=socket.gethostname)

    def is_alive(self) -> bool:
        """Whether it runs, as far as this machine can see: not that of another machine with an address of its own."""
        if self.host == socket.gethostname():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, 0)
                return True
            return False
        return not has_loopback(self.url) and _accepts(self.url)


class HeadFile:
    """This run's claim on a folder. The first live run there owns the file; a second one only has its own logs."""

    def __init__(self, folder: Path, owned: str | None, owner: RunningHead | None = None) -> None:
        """owned: the content that this run wrote, if it owns the file. owner: the run that owns it otherwise."""
        self._path = folder / FILE
        self._owned = owned
        self.owner = owner
        self.logs = folder / ("logs" if owned else f"logs-{socket.gethostname()}-{os.getpid()}")

    @classmethod
    def claim(cls, root: Path, running: RunningHead) -> HeadFile:
        folder = root / FOLDER
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            problem = f"{folder}: cannot be made ({error.strerror}); the logs go there, so {root} must be writable"
            raise UsageError(problem) from None
        content = json.dumps(asdict(running))
        with (folder / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # only while checking and writing
            other = find_running(root)
            if other is not None and other.url != running.url and _accepts(other.url):
                return cls(folder, owned=None, owner=other)
            unfinished = folder / f"{FILE}.new"
            unfinished.unlink(missing_ok=True)
            try:
                with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                    file.write(content)
                unfinished.replace(folder / FILE)
            except OSError as error:  # of a full disk has no file name
                unfinished.unlink(missing_ok=True)
                raise OSError(error.errno, error.strerror, str(folder / FILE)) from error
        return cls(folder, owned=content)

    def remove(self) -> None:
        """Remove the file if it still belongs to this run."""
        with contextlib.suppress(OSError):
            if self._owned is not None and self._path.read_text() == self._owned:
                self._path.unlink()


def _accepts(url: str) -> bool:
    """Whether a server listens there: the pid alone may now belong to another program."""
    address = urlsplit(url)
    try:
        socket.create_connection((address.hostname or "", address.port or 80), timeout=1).close()
    except OSError:
        return False
    return True


def find_running(root: Path) -> RunningHead | None:
    """The live run in this folder, or None; the file of a killed run is ignored. The run's ca becomes trusted."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        running = RunningHead(**json.loads((root / FOLDER / FILE).read_text()))
        if not running.is_alive():
            return None
        if running.ca:
            trust(Path(running.ca))
        return running
    return None


def head_of(root: Path, address: str | None, otherwise: str) -> str:
    """The URL of the head: the given one, else that of the run in this folder.

    There is no default port: its listener might serve another folder's code under the same names.

    Args:
        otherwise: the alternative for the user, for the message.

    Raises:
        UsageError: no URL is given, and nothing runs here.
    """
    if address is not None:
        return address.rstrip("/")
    running = find_running(root)
    if running is None:
        raise UsageError(f"nothing runs in {root}: start the services there with ng_run, {otherwise}")
    return running.url


def token_of(url: str, root: Path) -> str | None:
    """The token for the head at this URL: that of the run in this folder if the URL is that run's, else NGYM_TOKEN."""
    running = find_running(root)
    return running.run_token if running is not None and running.url == url.rstrip("/") else token_from(RUN_TOKEN)
