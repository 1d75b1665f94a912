"""The process that imports the services' libraries once and then forks each service in a few milliseconds.

`ng_run` starts it (`python -P -m ngym.supervise.service_zygote FD`) and controls it over a Unix socket: forking from a process
with one thread and no event loop is safe, and forked services share the imported pages. When that socket closes for any
reason, it ends with every service and all their descendants.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from ngym.supervise.service_main import RUNNER, ServiceJob, perform
from ngym.supervise.zygote_client import receive, send

PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36
LAST_SWEEP_S = 8.0  # seconds; we are killed after 10 s


def main() -> None:
    """Preload, then fork on request until the socket closes; in a child, run its service."""
    control = socket.socket(fileno=int(sys.argv[1]))
    importlib.import_module(RUNNER)  # the heavy part: fastapi, uvicorn
    gc.collect()
    gc.freeze()  # a collection in a child would touch, and so copy, every shared page
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # adopts daemons that a service leaves behind, to end them
    job = Zygote(control).serve()
    if job is not None:
        perform(job)


class Zygote:
    """The loop that forks, reaps and signals. A service's key is the number from the parent."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._alive: dict[int, int] = {}  # number -> pid, which is also the process group
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._wakeup_write = socket.socketpair()

    def serve(self) -> ServiceJob | None:
        """Serve until the socket closes: returns None. In each forked child: returns its job at once."""
        self._wakeup.setblocking(False)
        self._wakeup_write.setblocking(False)
        signal.set_wakeup_fd(self._wakeup_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        # A scheduler's warning, which can go to all processes of a job: the command decides what ends. Services inherit it.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        self._selector.register(self._control, selectors.EVENT_READ)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._wakeup:
                    self._wakeup.recv(4096)
                    self._reap()
                    continue
                message = receive(self._control)
                if message is None:
                    self._end_all()
                    return None
                if message.content["action"] == "signal":
                    self._signal(message.content["number"], message.content["signal"])
                    continue
                job = self._fork(message.content, message.fds)
                if job is not None:
                    return job

    def _fork(self, request: dict[str, Any], fds: list[int]) -> ServiceJob | None:
        """Fork one service; fds are its log pipe and its sockets. In the child: its job."""
        zygote_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            return self._become_service(request, fds, zygote_pid)
        for fd in fds:
            os.close(fd)
        self._alive[request["number"]] = pid
        self._send({"event": "forked", "number": request["number"], "pid": pid})
        return None

    def _become_service(self, request: dict[str, Any], fds: list[int], zygote_pid: int) -> ServiceJob:
        """Drop all state of the zygote: signals, sockets, terminal, standard streams."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for own_socket in (self._control, self._wakeup, self._wakeup_write):
            own_socket.close()
        os.setsid()
        # make the kernel kill this process when the parent dies (Linux; elsewhere the zygote's own end does it)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != zygote_pid:  # it died between the fork and the line above
            os._exit(1)
        prctl(PR_SET_NAME, f"ng:{request['title']}"[:15].encode())
        log, *listening = fds
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        sys.stdout = open(1, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        return ServiceJob(request, [socket.socket(fileno=fd) for fd in listening])

    def _signal(self, number: int, signal_number: int) -> None:
        """SIGTERM and the like go to the service, which ends its workers; SIGKILL goes to its whole group."""
        pid = self._alive.get(number)
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if signal_number == signal.SIGKILL:
                os.killpg(pid, signal_number)
            else:
                os.kill(pid, signal_number)

    def _reap(self) -> None:
        """Reap dead processes; the rest of a dead service's process group is killed before its pid can be reused."""
        numbers = {pid: number for number, pid in self._alive.items()}
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            pid = ended.si_pid
            if pid in numbers:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            number = numbers.get(pid)
            if number is not None:
                del self._alive[number]
                code = os.waitstatus_to_exitcode(status)
                self._send({"event": "exited", "number": number, "pid": pid, "code": code})

    def _end_all(self) -> None:
        """Kill every service's group, then orphans of services that had already ended."""
        deadline = time.monotonic() + LAST_SWEEP_S
        for pid in self._alive.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        children = Path(f"/proc/self/task/{os.getpid()}/children")
        while time.monotonic() < deadline:
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            if children.exists():
                for pid in map(int, children.read_text().split()):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)

    def _send(self, content: dict[str, Any]) -> None:
        with contextlib.suppress(ConnectionError):  # the other side is gone: the next receive ends the loop
            send(self._control, content)


def prctl(option: int, value: int | bytes) -> None:
    """Linux's prctl(2); does nothing on other systems."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main()
