"""Several machines made of Linux namespaces, on a network of their own.

Each machine has its own network interface, loopback, host name, process ids, /tmp, /dev/shm and $HOME. A bridge connects
them; its lines can be slow, or cut as by a broken switch. All see the files of the real machine, as on a shared disk, except
under the paths of `private`. Needs root and util-linux, iproute2. The real machine's network stays as it is.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
from paths import ROOT

Program = subprocess.Popen[str]
PATH = f"{os.environ.get('PATH', '/usr/bin:/bin')}:/usr/sbin:/sbin"  # where iproute2 is
PROGRAMS = ("unshare", "nsenter", "setpriv", "ip", "tc")
SUBNET = "10.77.0"
NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")
BURST = "256kb"  # bytes that a slow line sends at once
QUEUE = "400ms"  # the longest that a packet waits for a slow line
WAIT = "echo ready; while :; do sleep 3600 & wait; done"  # an init process, which reaps orphans
SWITCH = f"set -e; ip link add switch type bridge; ip link set switch up; {WAIT}"
MACHINE = f"""set -e
hostname "$NAME"
mkdir -p "$OWN/tmp/home" "$OWN/shm"
for path in $SHARED; do mkdir -p "$OWN$path"; mount --bind "$path" "$OWN$path"; done
mount --bind "$OWN/hosts" /etc/hosts
mount --bind "$OWN/shm" /dev/shm
mount --rbind "$OWN/tmp" /tmp
for path in $PRIVATE; do mkdir -p "$path"; mount -t tmpfs tmpfs "$path"; done
ip link set lo up
{WAIT}
"""


class Machine:
    """One machine. `name` and `address` reach it from the others, `localhost` only from itself."""

    def __init__(self, name: str, address: str, init: int, switch: int) -> None:
        self.name, self.address = name, address
        self._init, self._switch = init, switch
        self._line = f"to-{name}"

    def connect(self) -> None:
        """Put it on the network (again, after `cut`)."""
        _run_in(self._switch, ["--net"], f"ip link set {self._line} master switch up")

    def cut(self) -> None:
        """Lose all packets from and to it. Neither side gets an error, as when a switch breaks."""
        _run_in(self._switch, ["--net"], f"ip link set {self._line} nomaster")

    def power_off(self) -> None:
        """End all its processes at once, without a packet to anybody."""
        self.cut()
        os.kill(self._init, signal.SIGKILL)

    def popen(self, *words: str, cwd: Path, env: Mapping[str, str] = MappingProxyType({}), **options: Any) -> Program:
        """Start a program there. `kill` ends it, and what it has started in its session."""
        enter = ["nsenter", f"--target={self._init}", *NAMESPACES, f"--wdns={cwd}", "--", *words]
        environment = {**os.environ, "PATH": PATH, "HOME": "/tmp/home", "TMPDIR": "/tmp", **env}
        return subprocess.Popen(enter, env=environment, text=True, start_new_session=True, **options)

    def run(self, *words: str, cwd: Path, timeout_s: float = 600, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a program there to its end; the result has its output."""
        program = self.popen(*words, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
        try:
            stdout, stderr = program.communicate(timeout=timeout_s)
        finally:
            kill(program)
        return subprocess.CompletedProcess(words, program.returncode, stdout, stderr)


def kill(program: Program) -> None:
    """End a program of `Machine.popen`, and what it has started in its session."""
    with suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    program.wait()


@contextmanager
def machines(
    count: int = 2,
    *,
    shared: Sequence[Path] = (),
    private: Sequence[Path] = (),
    rate: str | None = None,
    debian: bool = False,
) -> Iterator[list[Machine]]:
    """`count` machines: node1, node2, ... Their processes end with the block.

    Args:
        shared: folders below /tmp that all see; ngym and its environment are always among them.
        private: folders that are empty, and another on each machine.
        rate: bits a second of each line, as tc writes them ("100mbit"). By default as fast as the kernel.
        debian: each machine's own name is 127.0.1.1 for itself, as Debian's installer writes it into /etc/hosts.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="machines")))
        below_tmp = [path for path in (*shared, ROOT, Path(sys.prefix)) if path.is_relative_to("/tmp")]
        hosts = [f"{SUBNET}.{number} node{number}" for number in range(1, count + 1)]
        switch = _hold(stack, ["--net", "--pid"], SWITCH)
        made = []
        for number in range(1, count + 1):
            own = folder / str(number)
            own.mkdir()
            names = ["127.0.0.1 localhost", *([f"127.0.1.1 node{number}"] if debian else []), *hosts]
            (own / "hosts").write_text("\n".join([*names, ""]))
            paths = {"SHARED": " ".join(map(str, below_tmp)), "PRIVATE": " ".join(map(str, private))}
            init = _hold(
                stack, [*NAMESPACES, "--mount-proc"], MACHINE, {"NAME": f"node{number}", "OWN": str(own), **paths}
            )
            machine = Machine(f"node{number}", f"{SUBNET}.{number}", init, switch)
            _run_in(switch, ["--net"], f"ip link add to-node{number} type veth peer name eth0 netns {init}")
            machine.connect()
            _run_in(
                init,
                ["--net"],
                f"ip address add {machine.address}/24 dev eth0; ip link set eth0 up; ip route add default dev eth0",
            )
            if rate is not None:
                _run_in(init, ["--net"], f"tc qdisc add dev eth0 root tbf rate {rate} burst {BURST} latency {QUEUE}")
            made.append(machine)
        yield made


@cache
def can_make_machines() -> bool:
    """Whether this user and kernel can."""
    if os.geteuid() != 0 or not all(shutil.which(name, path=PATH) for name in PROGRAMS):
        return False
    try:
        with machines(1, rate="100mbit"):
            return True
    except subprocess.CalledProcessError:
        return False


def _hold(
    stack: ExitStack, namespaces: Sequence[str], script: str, env: Mapping[str, str] = MappingProxyType({})
) -> int:
    """The process id of a script that keeps new namespaces until the stack is closed."""
    unshare = ["unshare", *namespaces, "--fork", "--kill-child", "sh", "-c", script]
    command = ["setpriv", "--pdeathsig", "KILL", *unshare]  # ends also when these tests are killed
    outside = subprocess.Popen(command, env={**os.environ, "PATH": PATH, **env}, stdout=subprocess.PIPE, text=True)
    stack.callback(outside.wait)
    stack.callback(outside.kill)
    if outside.stdout is None or outside.stdout.readline() != "ready\n":
        raise subprocess.CalledProcessError(outside.wait(), command)
    return int(psutil.Process(outside.pid).children()[0].pid)


def _run_in(process: int, namespaces: Sequence[str], script: str) -> None:
    subprocess.run(
        ["nsenter", f"--target={process}", *namespaces, "sh", "-ec", script],
        check=True,
        env={**os.environ, "PATH": PATH},
    )
