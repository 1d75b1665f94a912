"""Which system calls a confined process may make: an allow-list, as a BPF program. What is not on it fails.

No sockets but a pair of streams within the process (asyncio wants one), no other process, no signal but its own abort,
no exec, no shared memory, no tracing, no namespaces, no io_uring.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterable

from ngym.sandbox.kernel import PR_SET_SECCOMP, call

FILTER = 2
LOAD, EQUAL, ANY_BIT, AT_LEAST, AND, RETURN = 0x20, 0x15, 0x45, 0x35, 0x54, 0x06
ALLOW, ERROR, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16
X32 = 0x40000000
CLONE_THREAD, CLONE_NEW = 0x10000, 0x7E020080
SIGABRT = 6
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, locks, F_DUPFD_CLOEXEC. F_SETOWN and F_SETSIG would send signals.
FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 1030)
IOCTLS = (0x5421, 0x5450, 0x5451)  # FIONBIO, FIONCLEX, FIOCLEX
AF_UNIX, SOCK_STREAM = 1, 1
SET_NAME, GET_NAME = 15, 16

AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# name -> number on x86-64, number on aarch64 (None: not there)
CALLS: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "poll": (7, None), "lseek": (8, 62),
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "pread64": (17, 67), "pwrite64": (18, 68),
    "readv": (19, 65), "writev": (20, 66), "pipe": (22, None), "select": (23, None), "sched_yield": (24, 124),
    "mremap": (25, 216), "msync": (26, 227), "madvise": (28, 233), "dup": (32, 23), "dup2": (33, None),
    "pause": (34, None), "nanosleep": (35, 101), "getitimer": (36, 102), "alarm": (37, None), "setitimer": (38, 103),
    "getpid": (39, 172), "sendto": (44, 206), "recvfrom": (45, 207), "sendmsg": (46, 211), "recvmsg": (47, 212),
    "exit": (60, 93), "wait4": (61, 260), "uname": (63, 160), "flock": (73, 32), "fsync": (74, 82),
    "fdatasync": (75, 83), "ftruncate": (77, 46), "getcwd": (79, 17), "umask": (95, 166), "gettimeofday": (96, 169),
    "getrlimit": (97, 163), "getrusage": (98, 165), "sysinfo": (99, 179), "times": (100, 153), "getuid": (102, 174),
    "getgid": (104, 176), "geteuid": (107, 175), "getegid": (108, 177), "getppid": (110, 173), "getpgrp": (111, None),
    "sigaltstack": (131, 132), "fstatfs": (138, 44), "arch_prctl": (158, None), "gettid": (186, 178),
    "time": (201, None), "futex": (202, 98), "sched_getaffinity": (204, 123), "getdents64": (217, 61),
    "set_tid_address": (218, 96), "restart_syscall": (219, 128), "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "exit_group": (231, 94), "epoll_wait": (232, None),
    "epoll_ctl": (233, 21), "pselect6": (270, 72), "ppoll": (271, 73), "set_robust_list": (273, 99),
    "epoll_pwait": (281, 22), "eventfd2": (290, 19), "epoll_create1": (291, 20), "dup3": (292, 24),
    "pipe2": (293, 59), "getrandom": (318, 278), "rseq": (334, 293), "close_range": (436, 436),
}  # fmt: skip
# These take a path: only where something else (a namespace, Landlock) says which paths there are.
PATH_CALLS: dict[str, tuple[int | None, int | None]] = {
    "open": (2, None), "stat": (4, None), "lstat": (6, None), "access": (21, None), "truncate": (76, 45),
    "getdents": (78, None), "chdir": (80, 49), "fchdir": (81, 50), "rename": (82, None), "mkdir": (83, None),
    "rmdir": (84, None), "creat": (85, None), "unlink": (87, None), "readlink": (89, None), "statfs": (137, 43),
    "openat": (257, 56), "mkdirat": (258, 34), "newfstatat": (262, 79), "unlinkat": (263, 35), "renameat": (264, 38),
    "readlinkat": (267, 78), "faccessat": (269, 48), "utimensat": (280, 88), "statx": (332, 291),
    "faccessat2": (439, 439),
}  # fmt: skip
CLONE, CLONE3, FCNTL_CALL, IOCTL = (56, 220), (435, 435), (72, 25), (16, 29)
SOCKETPAIR, PRCTL, TGKILL, PRLIMIT64 = (53, 199), (157, 167), (234, 131), (302, 261)

Instruction = tuple[int, int, int, int]


def supported() -> bool:
    return os.uname().machine in AUDIT


def program(pid: int, *, paths: bool) -> bytes:
    """The filter for the process `pid`, which may name paths or not."""
    machine = os.uname().machine
    column = list(AUDIT).index(machine)
    calls = {**CALLS, **(PATH_CALLS if paths else {})}
    lines: list[Instruction] = [
        (LOAD, 0, 0, ARCHITECTURE_AT), (EQUAL, 1, 0, AUDIT[machine]), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER_AT),
        (AT_LEAST, 0, 1, X32), (RETURN, 0, 0, KILL),
    ]  # fmt: skip
    for numbers in calls.values():
        number = numbers[column]
        if number is not None:
            lines += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    lines += _when(CLONE[column], [
        (LOAD, 0, 0, ARGUMENTS_AT), (ANY_BIT, 2, 0, CLONE_NEW), (ANY_BIT, 0, 1, CLONE_THREAD), (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, ERROR | errno.EPERM),
    ])  # fmt: skip
    lines += _when(CLONE3[column], [(RETURN, 0, 0, ERROR | errno.ENOSYS)])  # the C library then takes clone
    lines += _when(IOCTL[column], _one_of(1, IOCTLS))
    lines += _when(FCNTL_CALL[column], _one_of(1, FCNTL))
    lines += _when(PRCTL[column], _one_of(0, (SET_NAME, GET_NAME)))
    # It may read its own limits. A limit that it lowers would let the kernel kill it, as a busy host does.
    lines += _when(PRLIMIT64[column], [
        (LOAD, 0, 0, ARGUMENTS_AT), (EQUAL, 1, 0, 0), (EQUAL, 0, 5, pid), (LOAD, 0, 0, ARGUMENTS_AT + 16),
        (EQUAL, 0, 3, 0), (LOAD, 0, 0, ARGUMENTS_AT + 20), (EQUAL, 0, 1, 0), (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, ERROR | errno.EPERM),
    ])  # fmt: skip
    # A datagram socket could be told to send to any address; a stream of a pair cannot.
    lines += _when(SOCKETPAIR[column], [
        (LOAD, 0, 0, ARGUMENTS_AT), (EQUAL, 0, 4, AF_UNIX), (LOAD, 0, 0, ARGUMENTS_AT + 8), (AND, 0, 0, 0xFF),
        (EQUAL, 0, 1, SOCK_STREAM), (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, ERROR | errno.EPERM),
    ])  # fmt: skip
    # Any other signal to itself could pass for the work of the kernel.
    lines += _when(TGKILL[column], [
        (LOAD, 0, 0, ARGUMENTS_AT), (EQUAL, 0, 3, pid), (LOAD, 0, 0, ARGUMENTS_AT + 16), (EQUAL, 0, 1, SIGABRT),
        (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, ERROR | errno.EPERM),
    ])  # fmt: skip
    lines.append((RETURN, 0, 0, ERROR | errno.EPERM))
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def enforce(filter_program: bytes) -> None:
    """From now on and for good. Needs no_new_privs."""
    code = ctypes.create_string_buffer(filter_program, len(filter_program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(filter_program) // 8, ctypes.addressof(code)))
    call("prctl", PR_SET_SECCOMP, FILTER, header, 0, 0)


def _when(number: int, lines: list[Instruction]) -> list[Instruction]:
    return [(EQUAL, 0, len(lines), number), *lines]


def _one_of(argument: int, values: Iterable[int]) -> list[Instruction]:
    """Allowed if the argument is one of these, else EPERM."""
    lines: list[Instruction] = [(LOAD, 0, 0, ARGUMENTS_AT + 8 * argument)]
    for value in values:
        lines += [(EQUAL, 0, 1, value), (RETURN, 0, 0, ALLOW)]
    return [*lines, (RETURN, 0, 0, ERROR | errno.EPERM)]
