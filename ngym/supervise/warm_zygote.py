"""A zygote that outlives commands: `ng_run --warm` leaves it behind, with vLLM imported, for the services of later ones.

It has imported an app with a `preload` function. For each command it forks a zygote of that command's own, which forks
the app's services and ends with the command, as the usual one does. It ends after IDLE_S without a command, or by
`ng_run --no-warm`. It needs Linux.

Its socket is in a folder that only this user can enter, and both sides check the other's user, because a command sends
its environment with it. The socket's name is a digest of everything that a process fixes when it starts: commands with
other code, other packages, other variables or other limits do not find it, and start their services as usual.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import hashlib
import importlib
import importlib.util
import os
import re
import resource
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from ngym.errors import ConfigError
from ngym.runtime.cpu_threads import SPINNING_BRIEFLY
from ngym.supervise.zygote_client import ZygoteClient, receive, send

IDLE_S = 1800.0  # seconds
IMPORT_TIMEOUT_S = 60.0  # a command waits so long for the imports, and then starts its services as usual
MESSAGE_S = 10.0  # for the message of a command that has connected
BACKLOG = 16
PRELOAD = re.compile(r"^def preload\(", re.MULTILINE)
IMPORT_TIME_VARIABLES = re.compile(
    r"PYTHON|LD_|MALLOC_|LANG$|LC_|HOME$|TMPDIR$|XDG_CACHE|XDG_CONFIG|OMP_|GOMP_|KMP_|MKL_|OPENBLAS_|NUMEXPR_|ONEDNN_|DNNL_|TOKENIZERS_"
    r"|VLLM_|TORCH|PYTORCH_|TRITON_|CUDA_|NVIDIA_|NCCL_|HF_|HUGGINGFACE_|TRANSFORMERS_|NGYM_"
)
"""Variables that Python, vLLM and the libraries below it may read when they are imported."""
IGNORED_VARIABLES = {*SPINNING_BRIEFLY}  # ng_train sets them, and model servers themselves
NAMESPACES = ("mnt", "net", "pid", "user")


class WarmZygote(NamedTuple):
    """A running one. file: its lock, with its pid."""

    file: Path
    pid: int


class Session:
    """The zygote of a command, which has another parent."""

    returncode = None

    def __init__(self, pid: int) -> None:
        self._fd = os.pidfd_open(pid)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        if not poll.poll(None if timeout is None else timeout * 1000):
            raise subprocess.TimeoutExpired("zygote", timeout or 0.0)
        return 0


async def session(app_file: Path, start: bool) -> ZygoteClient | None:
    """The connection to a zygote of this command that has imported the app, or None if the usual start is needed.

    Args:
        start: whether to start a process that outlives this command, if none is running.
    """
    if not start and not _is_used():
        return None
    sock = _connection(app_file, start)
    if sock is None:
        return None
    umask = os.umask(0o077)
    os.umask(umask)
    try:
        send(sock, {"environment": dict(os.environ), "folder": os.getcwd(), "umask": umask}, [1, 2])
        async with asyncio.timeout(IMPORT_TIMEOUT_S):
            await _readable(sock)
        hello = receive(sock)
        if hello is not None:
            return ZygoteClient(Session(hello.content["pid"]), sock)
    except OSError:  # also TimeoutError: it hangs or has ended, and its log says why
        pass
    except BaseException:
        sock.close()
        raise
    sock.close()
    return None


def _is_used() -> bool:
    """Whether there may be one. Another user's folder in our place is not an error of commands without --warm."""
    try:
        return sys.platform == "linux" and folder().exists() and any(_own_folder().glob("*.sock"))
    except (ConfigError, OSError):
        return False


async def _readable(sock: socket.socket) -> None:
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(sock)


def can_preload(app_file: Path) -> bool:
    return PRELOAD.search(app_file.read_text("utf-8")) is not None


def running() -> list[WarmZygote]:
    """Those of this user, on this machine."""
    return list(_running_zygotes()) if _is_used() else []


def end() -> list[WarmZygote]:
    """End all of this user. The services that they have forked go on."""
    ended = running()
    for zygote in ended:
        zygote.file.with_suffix(".sock").unlink(missing_ok=True)
        with contextlib.suppress(ProcessLookupError):
            os.kill(zygote.pid, signal.SIGTERM)
    return ended


def folder() -> Path:
    """The folder of the sockets: $XDG_RUNTIME_DIR, else the folder for temporary files."""
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"ngym-{os.getuid()}"


def _running_zygotes() -> Iterator[WarmZygote]:
    for file in sorted(_own_folder().glob("*.lock")):
        with file.open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield WarmZygote(file, int(lock.read() or b"0"))


def _own_folder() -> Path:
    """Raises ConfigError unless only this user can use it."""
    path = folder()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(f"{path}: must be a folder of this user that others cannot use; remove it, or set TMPDIR")
    return path


def _connection(app_file: Path, start: bool) -> socket.socket | None:
    path = _own_folder() / _digest(app_file)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    for _ in range(2):
        try:
            with _short(path.with_suffix(".sock")) as address:
                sock.connect(address)
        except OSError:
            if not start or not _start(path, app_file):
                break
        else:
            if _uid(sock) == os.getuid():
                return sock
            break
    sock.close()
    return None


def _start(path: Path, app_file: Path) -> bool:
    """Start one, unless another command does so now. Its socket listens at once; its imports follow."""
    descriptor = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.with_suffix(".sock").unlink(missing_ok=True)
            with (
                socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
                path.with_suffix(".log").open("wb") as log,
            ):
                with _short(path.with_suffix(".sock")) as address:
                    listener.bind(address)
                listener.listen(BACKLOG)
                fds = (listener.fileno(), descriptor)
                command = [sys.executable, "-P", "-m", __name__, *map(str, fds), str(app_file)]
                subprocess.Popen(
                    command, pass_fds=fds, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
            return True
    finally:
        os.close(descriptor)
    return False


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """The path as a name of at most 108 bytes, which a Unix socket can have."""
    descriptor = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)


def _uid(sock: socket.socket) -> int:
    """The user of the other side."""
    pid_uid_gid = struct.Struct("3i")
    return int(pid_uid_gid.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, pid_uid_gid.size))[1])


def _digest(app_file: Path) -> str:
    """Of what a process fixes when it starts: its program and packages, their code, variables, limits, namespaces."""
    import sysconfig

    digest = hashlib.sha256(repr((sys.executable, sys.version, sys.flags, sorted(os.sched_getaffinity(0)))).encode())
    limits = [resource.getrlimit(each) for each in (resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_MEMLOCK)]
    digest.update(repr((os.getpriority(os.PRIO_PROCESS, 0), limits)).encode())
    for name in NAMESPACES:
        digest.update(os.readlink(f"/proc/self/ns/{name}").encode())
    for name, value in sorted(os.environ.items()):
        if IMPORT_TIME_VARIABLES.match(name) and name not in IGNORED_VARIABLES and not name.endswith("_TOKEN"):
            digest.update(f"{name}={value}\0".encode(errors="surrogateescape"))
    package = importlib.util.find_spec("ngym")
    assert package is not None and package.origin is not None
    sources = [*Path(package.origin).parent.rglob("*.py"), *app_file.parent.rglob("*.py")]
    for path in [*sorted(sources), Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib"))]:
        digest.update(f"{path} {path.stat().st_mtime_ns}\0".encode())
    return digest.hexdigest()[:32]


def main() -> None:
    """Import the app, then fork a zygote for each command; in a child of that one, run its service."""
    from ngym.runtime.event_loop import exit_process
    from ngym.supervise.service_main import perform
    from ngym.supervise.service_zygote import PR_SET_CHILD_SUBREAPER, PR_SET_NAME, Zygote, prctl

    listener, lock = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    os.set_inheritable(lock, False)
    os.pwrite(lock, str(os.getpid()).encode(), 0)
    prctl(PR_SET_NAME, b"ng:warm")
    name = listener.getsockname()
    module = preload(Path(sys.argv[3]))
    control = _commands(listener, lock)
    if control is None:
        (_own_folder() / Path(name).name).unlink(missing_ok=True)
        return
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    if job := Zygote(control).serve():
        spec = job.request["spec"]
        if not module.is_preloaded_for(spec["options"], Path(spec["root"])):
            job.request["python"] = sys.executable
        perform(job)
    exit_process(0)


def preload(app_file: Path) -> ModuleType:
    """The app, after it has imported what its services need. Raises RuntimeError if that started threads, which a fork loses."""
    from ngym.supervise.service_main import RUNNER

    module: ModuleType = importlib.import_module(RUNNER).load(app_file)
    module.preload()
    if (count := len(os.listdir("/proc/self/task"))) > 1:
        raise RuntimeError(f"{app_file}: preload() has started {count - 1} threads")
    gc.collect()
    gc.freeze()
    return module


def _commands(listener: socket.socket, lock: int) -> socket.socket | None:
    """Serve commands until none has come or run for IDLE_S: returns None. In each forked child: its control socket."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while True:
        if not select.select([listener], [], [], IDLE_S)[0]:
            if children.read_text().strip():
                continue
            return None
        control, _ = listener.accept()
        control.settimeout(MESSAGE_S)
        try:
            message = receive(control) if _uid(control) == os.getuid() else None
        except TimeoutError:
            message = None
        if message is None:
            control.close()
            continue
        control.settimeout(None)
        if os.fork() == 0:
            listener.close()
            os.close(lock)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            for stream, descriptor in zip((1, 2), message.fds, strict=True):
                os.dup2(descriptor, stream)
                os.close(descriptor)
            os.environ.clear()
            os.environ.update(message.content["environment"])
            os.umask(message.content["umask"])
            os.chdir(message.content["folder"])
            with contextlib.suppress(OSError):  # the command is gone: its zygote sees that next, and ends
                send(control, {"pid": os.getpid()})
            return control
        control.close()
        for descriptor in message.fds:
            os.close(descriptor)


if __name__ == "__main__":
    main()
