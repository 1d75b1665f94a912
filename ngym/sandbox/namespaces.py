"""A world of its own for a process and its children: no network, no other processes, a root with only what is shown.

As root it needs CAP_SYS_ADMIN, as anybody else user namespaces; an OSError names the call that was refused.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from ngym.sandbox.kernel import call, die_with_parent, syscall

NEW_MOUNTS, NEW_CGROUP, NEW_UTS, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NET = (
    0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
NO_SETUID, NO_DEVICES, BIND, RECURSIVE, PRIVATE, DETACH = 2, 4, 4096, 16384, 1 << 18, 2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
MOUNT_SETATTR = 442
AT_FDCWD, AT_RECURSIVE = 0xFFFFFF9C, 0x8000
READ_ONLY_NO_SETUID = 1 | 2
BOX = "/box"


def enter(shown: Iterable[str]) -> None:
    """Into the new world, as its first process; the caller's process waits outside until that ends, and ends with it.

    Args:
        shown: absolute paths that are there, for reading, under their old names.
    """
    uid, gid = os.getuid(), os.getgid()
    apart = NEW_MOUNTS | NEW_UTS | NEW_IPC | NEW_PIDS | NEW_NET | NEW_CGROUP
    call("unshare", apart | (NEW_USER if uid else 0))
    if uid:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    first = os.fork()
    if first:
        os.waitpid(first, 0)
        os._exit(0)
    die_with_parent()
    _change_root(shown)


def _change_root(shown: Iterable[str]) -> None:
    _mount(b"none", "/", None, RECURSIVE | PRIVATE)
    root = tempfile.mkdtemp(prefix="ngym-root-")  # the place of a mount; the folder itself stays empty, and goes
    _mount(b"tmpfs", root, b"tmpfs", NO_SETUID | NO_DEVICES, b"size=1m,nr_inodes=4096,mode=755")
    for path in shown:
        _show(path, root)
    os.mkdir(root + BOX)
    os.mkdir(root + "/.old")
    syscall(PIVOT_ROOT[os.uname().machine], root.encode(), f"{root}/.old".encode())
    os.chdir("/")
    os.rmdir(f"/.old{root}")
    call("umount2", b"/.old", DETACH)
    os.rmdir("/.old")
    attributes = READ_ONLY_NO_SETUID.to_bytes(8, "little") + bytes(24)
    syscall(MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, attributes, len(attributes))


def _show(path: str, root: str) -> None:
    if not os.path.exists(path):
        return
    place = root + path
    if os.path.isdir(path):
        os.makedirs(place, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        os.close(os.open(place, os.O_CREAT))
    _mount(path.encode(), place, None, BIND | RECURSIVE)


def own_box(mib: int) -> None:
    """A folder to write in, this process's alone, which goes when the process does."""
    call("unshare", NEW_MOUNTS)
    size = f"size={max(mib, 1)}m,nr_inodes={64 + 16 * mib},mode=1777".encode()
    _mount(b"tmpfs", BOX, b"tmpfs", NO_SETUID | NO_DEVICES, size)
    os.chdir(BOX)


def _mount(source: bytes, target: str, kind: bytes | None, flags: int, data: bytes | None = None) -> None:
    call("mount", source, target.encode(), kind, flags, data)
