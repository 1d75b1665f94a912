"""The parent's end of the zygote: starts it, makes it fork services, and learns when one exits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ngym.errors import NgymError

_LENGTH = struct.Struct("!Q")
MAX_FDS = 16
Result = TypeVar("Result")
# Seconds; it needs milliseconds unless the machine is overloaded, and killing it would leave orphans.
ZYGOTE_END_S = 10.0


@dataclass(frozen=True)
class Message:
    """One message; the receiver must close the descriptors."""

    content: dict[str, Any]
    fds: list[int] = field(default_factory=list)


def send(
    sock: socket.socket, content: dict[str, Any], fds: Sequence[int] = (), hear: Callable[[], None] | None = None
) -> None:
    """Send one message. The descriptors travel with its first bytes.

    hear: receives a message while this one waits. Needed on one side, or both could wait for the other to read; the
    socket of that side must not block.
    """
    payload = json.dumps(content).encode()
    unsent = memoryview(_LENGTH.pack(len(payload)) + payload)
    while unsent:
        write = partial(socket.send_fds, sock, [unsent], list(fds)) if fds else partial(sock.send, unsent)
        unsent, fds = unsent[_when_ready(sock, select.POLLOUT, write, hear) :], ()


def receive(sock: socket.socket) -> Message | None:
    """The next message, or None if the other side has closed (even within a message)."""
    try:
        read = partial(socket.recv_fds, sock, _LENGTH.size, MAX_FDS)
        header, fds, _, _ = _when_ready(sock, select.POLLIN, read)
        header += _exactly(sock, _LENGTH.size - len(header))
        (length,) = _LENGTH.unpack(header)
        return Message(json.loads(_exactly(sock, length)), list(fds))
    except (ConnectionError, EOFError):
        return None


def _exactly(sock: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = _when_ready(sock, select.POLLIN, partial(sock.recv, min(size, 1 << 20)))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _when_ready(
    sock: socket.socket, event: int, call: Callable[[], Result], hear: Callable[[], None] | None = None
) -> Result:
    """The call's result, once the socket is ready for it; calls `hear` for each message that arrives meanwhile."""
    while True:
        try:
            return call()
        except BlockingIOError:
            poll = select.poll()
            poll.register(sock, event | (select.POLLIN if hear else 0))
            ((_, events),) = poll.poll()
            if hear and events & select.POLLIN and not events & event:
                hear()


class ZygoteGone(NgymError):
    """The zygote died, because it was killed from outside (kill -9, out of memory) or could not import ngym."""


class Child:
    """One forked process: its pid, and its exit code once it has ended (negative: the signal that killed it)."""

    def __init__(self, launcher: ZygoteClient, number: int) -> None:
        self._launcher = launcher
        self._number = number
        self.pid: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def signal(self, number: signal.Signals) -> None:
        """Signal the process; SIGKILL goes to its whole group. Does nothing after its end."""
        if not self.exit_code.done():
            self._launcher.signal(self._number, number)


class ZygoteProcess(Protocol):
    """The interface of subprocess.Popen."""

    @property
    def returncode(self) -> int | Any: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...


class ZygoteClient:
    """Forks services. `start` returns at once, so that the zygote's imports overlap with reading the config."""

    def __init__(self, process: ZygoteProcess, control: socket.socket) -> None:
        self._process = process
        self._control = control
        control.setblocking(False)
        self._children: dict[int, Child] = {}
        self._count = 0
        self._loop: asyncio.AbstractEventLoop | None = None  # set while we listen to the zygote
        self.started = time.monotonic()

    @classmethod
    def start(cls) -> ZygoteClient:
        """Start the zygote in a separate session, so that Ctrl-C reaches only this process."""
        parent_end, child_end = socket.socketpair()
        with child_end:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "ngym.supervise.service_zygote", str(child_end.fileno())],
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        return cls(process, parent_end)

    async def fork(
        self,
        action: str,
        title: str,
        spec: dict[str, Any],
        log: int,
        sockets: Sequence[socket.socket] = (),
        python: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Fork a service; returns once it has a pid. `log` is the descriptor for its output, closed here.

        python: the interpreter of the service's own environment, which the forked process executes.
        environment: variables of its own.
        """
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._control, self._read_messages)
        self._count += 1
        child = self._children[self._count] = Child(self, self._count)
        request = {"action": action, "number": self._count, "title": title, "spec": spec}
        if python is not None:
            request["python"] = str(python)
        if environment:
            request["environment"] = dict(environment)
        try:
            self._send(request, [log, *(sock.fileno() for sock in sockets)])
        finally:
            os.close(log)
        await child.pid
        return child

    def signal(self, number: int, signal_number: signal.Signals) -> None:
        with contextlib.suppress(ZygoteGone):  # then the kernel kills the service
            self._send({"action": "signal", "number": number, "signal": int(signal_number)})

    def close(self) -> None:
        """End the zygote and every process that it or its services started. Blocks for milliseconds."""
        self._unlisten()
        self._control.close()
        if not self._count:  # it may still be importing, which is no longer needed
            self._process.kill()
        try:
            self._process.wait(ZYGOTE_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _unlisten(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._control)
        self._loop = None

    def _send(self, content: dict[str, Any], fds: Sequence[int] = ()) -> None:
        # Blocks on purpose: the zygote reads at once, except in its first second.
        try:
            send(self._control, content, fds, self._read_messages)
        except OSError:
            raise self._end_error() from None

    def _read_messages(self) -> None:
        message = receive(self._control)
        if message is None:
            self._on_lost()
            return
        event, child = message.content, self._children[message.content["number"]]
        if event["event"] == "forked":
            future, value = child.pid, event["pid"]
        else:
            del self._children[event["number"]]
            future, value = child.exit_code, event["code"]
        if not future.cancelled():  # the waiting task may have been cancelled
            future.set_result(value)

    def _on_lost(self) -> None:
        """The zygote is gone: the kernel kills its children, and this kills their workers."""
        self._unlisten()
        error = self._end_error()
        for child in self._children.values():
            if not child.pid.done():
                child.pid.set_exception(error)
            elif not child.pid.cancelled():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid.result(), signal.SIGKILL)
            if not child.exit_code.cancelled():
                child.exit_code.set_exception(error)
                child.exit_code.exception()  # retrieved, so that asyncio does not warn
        self._children.clear()

    def _end_error(self) -> ZygoteGone:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)  # its socket closes shortly before it ends
        code = self._process.returncode
        how = "its output above says why" if code == 1 else f"exit code {code}: killed, or out of memory?"
        return ZygoteGone(f"the process that starts the services ended ({how}); every service was stopped, run again")
