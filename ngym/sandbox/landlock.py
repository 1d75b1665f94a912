"""Which files a process may open, by Landlock (Linux 5.13 and later): allowed paths, and nothing else.

Newer kernels also keep it from TCP (ABI 4), from signalling others and from abstract sockets (ABI 6).
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable
from contextlib import suppress

from ngym.sandbox.kernel import syscall

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
VERSION = 1
PATH_BENEATH = 1

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, REMOVE_DIR, REMOVE_FILE = (1 << bit for bit in range(6))
MAKE_DIR, MAKE_REG = 1 << 7, 1 << 8
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
READ = EXECUTE | READ_FILE | READ_DIR
# Nothing here makes a link, a socket, a pipe or a device: whoever comes by later must not be led elsewhere.
WRITE = READ | WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | TRUNCATE | REFER
OF_A_FILE = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
KNOWN_ACCESSES = {1: 13, 2: 14, 3: 15, 4: 15}  # ABI -> how many of the bits it knows; 16 from ABI 5
CONNECT_AND_BIND = 3
SCOPES = 3


def abi() -> int:
    """The kernel's version of Landlock; 0 where there is none."""
    with suppress(OSError):
        return syscall(CREATE_RULESET, None, 0, VERSION)
    return 0


def ruleset(readable: Iterable[str], writable: Iterable[str]) -> int:
    """A ruleset that allows this much, as a file descriptor. Paths that are missing are left out."""
    version = abi()
    accesses = (1 << KNOWN_ACCESSES.get(version, 16)) - 1
    attributes = struct.pack("QQQ", accesses, CONNECT_AND_BIND, SCOPES)
    attributes = attributes[: 8 if version < 4 else 16 if version < 6 else 24]
    rules = syscall(CREATE_RULESET, ctypes.create_string_buffer(attributes, len(attributes)), len(attributes), 0)
    for paths, access in ((readable, READ), (writable, WRITE)):
        for path in paths:
            with suppress(FileNotFoundError):
                _allow(rules, path, access & accesses)
    return rules


def _allow(rules: int, path: str, access: int) -> None:
    opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not os.path.isdir(path):
            access &= OF_A_FILE
        syscall(ADD_RULE, rules, PATH_BENEATH, struct.pack("=Qi", access, opened), 0)
    finally:
        os.close(opened)


def enforce(rules: int) -> None:
    """From now on and for good. Needs no_new_privs."""
    syscall(RESTRICT_SELF, rules, 0)
