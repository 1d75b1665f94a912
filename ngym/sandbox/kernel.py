"""The Linux calls that Python does not offer, through ctypes; an error is an OSError that names the call."""

from __future__ import annotations

import ctypes
import os
import signal
import struct

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> int:
    """A function of the C library that returns -1 and sets errno."""
    result: int = getattr(_libc, name)(*(ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def syscall(number: int, *arguments: object) -> int:
    """A system call by its number."""
    return call("syscall", number, *arguments)


def prctl(option: int, value: int) -> None:
    call("prctl", option, value, 0, 0, 0)


def die_with_parent() -> None:
    """The kernel kills this process when its parent dies, however that dies."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def shut() -> None:
    """No setuid program gives this process or its children anything, and nobody reads its memory."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_DUMPABLE, 0)


def become(uid: int | None) -> None:
    """Another user, for root (None stays who it is); then no capabilities, whoever it is."""
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        die_with_parent()  # forgotten with the old user
    header = struct.pack("=Ii", CAPABILITY_VERSION_3, 0)
    call("capset", header, bytes(24))
    shut()
