"""Linux confinement through ctypes: Landlock, namespaces and seccomp. Errors are OSErrors that name the call.

Landlock limits file access, on newer kernels also TCP (ABI 4), signals to others and abstract sockets (ABI 6).

Namespaces need CAP_SYS_ADMIN for root and user namespaces for others; an OSError names the call that was refused.

The seccomp filter allows no sockets except stream pairs within the process (asyncio needs one), no other process, no
signal except its own abort, no exec, no shared memory, no tracing, no namespaces, no io_uring.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import struct
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

CAPABILITY_VERSION_3 = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)
VERSION = 1
PATH_BENEATH = 1
KNOWN_ACCESSES = {1: 13, 2: 14, 3: 15, 4: 15}  # ABI -> how many of the bits it knows; 16 from ABI 5
CONNECT_AND_BIND = 3
SCOPES = 3
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
MOUNT_SETATTR = 442
READ_ONLY_NO_SETUID = 1 | 2
BOX = "/box"
FILTER = 2
X32 = 0x40000000
SIGABRT = 6
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, locks, F_DUPFD_CLOEXEC. F_SETOWN and F_SETSIG would send signals.
FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 1030)
IOCTLS = (0x5421, 0x5450, 0x5451)  # FIONBIO, FIONCLEX, FIOCLEX
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
# These take a path: allowed only if a namespace or Landlock limits the visible paths.
PATH_CALLS: dict[str, tuple[int | None, int | None]] = {
    "open": (2, None), "stat": (4, None), "lstat": (6, None), "access": (21, None), "truncate": (76, 45),
    "getdents": (78, None), "chdir": (80, 49), "fchdir": (81, 50), "rename": (82, None), "mkdir": (83, None),
    "rmdir": (84, None), "creat": (85, None), "unlink": (87, None), "readlink": (89, None), "statfs": (137, 43),
    "openat": (257, 56), "mkdirat": (258, 34), "newfstatat": (262, 79), "unlinkat": (263, 35), "renameat": (264, 38),
    "readlinkat": (267, 78), "faccessat": (269, 48), "utimensat": (280, 88), "statx": (332, 291),
    "faccessat2": (439, 439),
}  # fmt: skip
Instruction = tuple[int, int, int, int]

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38


def call(name: str, *arguments: object) -> int:
    """Call a function of the C library that returns -1 and sets errno."""
    result: int = getattr(_libc, name)(*(ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def syscall(number: int, *arguments: object) -> int:
    """Make a system call by its number."""
    return call("syscall", number, *arguments)


def prctl(option: int, value: int) -> None:
    call("prctl", option, value, 0, 0, 0)


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent dies, for any reason."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def shut() -> None:
    """Drop setuid privileges for this process and its children, and protect its memory from reads."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_DUMPABLE, 0)


def become(uid: int | None) -> None:
    """Change the user (root only; None keeps the user), then drop all capabilities."""
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        die_with_parent()  # changing the user clears the setting
    header = struct.pack("=Ii", CAPABILITY_VERSION_3, 0)
    call("capset", header, bytes(24))
    shut()


CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, REMOVE_DIR, REMOVE_FILE = (1 << bit for bit in range(6))
MAKE_DIR, MAKE_REG = 1 << 7, 1 << 8
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
READ = EXECUTE | READ_FILE | READ_DIR
# No right to create links, sockets, pipes or devices, which could redirect a later reader.
WRITE = READ | WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | TRUNCATE | REFER
OF_A_FILE = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV


def landlock_abi() -> int:
    """The kernel's version of Landlock; 0 without Landlock."""
    with suppress(OSError):
        return syscall(CREATE_RULESET, None, 0, VERSION)
    return 0


def landlock_ruleset(readable: Iterable[str], writable: Iterable[str]) -> int:
    """A ruleset that allows these paths, as a file descriptor. Missing paths are left out."""
    version = landlock_abi()
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


def enforce_landlock(rules: int) -> None:
    """Apply the ruleset permanently. Needs no_new_privs."""
    syscall(RESTRICT_SELF, rules, 0)


NEW_MOUNTS, NEW_CGROUP, NEW_UTS, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NET = (
    0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
NO_SETUID, NO_DEVICES, BIND, RECURSIVE, PRIVATE, DETACH = 2, 4, 4096, 16384, 1 << 18, 2
AT_FDCWD, AT_RECURSIVE = 0xFFFFFF9C, 0x8000


def enter(visible: Iterable[str]) -> None:
    """Enter the new namespaces as their first process; the calling process waits outside and ends with it.

    Args:
        visible: absolute paths that are readable inside, under the same names.
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
    _change_root(visible)


def _change_root(visible: Iterable[str]) -> None:
    _mount(b"none", "/", None, RECURSIVE | PRIVATE)
    root = tempfile.mkdtemp(prefix="ngym-root-")  # a mount point; the folder itself stays empty and is removed
    _mount(b"tmpfs", root, b"tmpfs", NO_SETUID | NO_DEVICES, b"size=1m,nr_inodes=4096,mode=755")
    for path in visible:
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
    """A writable folder for this process alone, which disappears with the process."""
    call("unshare", NEW_MOUNTS)
    size = f"size={max(mib, 1)}m,nr_inodes={64 + 16 * mib},mode=1777".encode()
    _mount(b"tmpfs", BOX, b"tmpfs", NO_SETUID | NO_DEVICES, size)
    os.chdir(BOX)


def _mount(source: bytes, target: str, kind: bytes | None, flags: int, data: bytes | None = None) -> None:
    call("mount", source, target.encode(), kind, flags, data)


LOAD, EQUAL, ANY_BIT, AT_LEAST, AND, RETURN = 0x20, 0x15, 0x45, 0x35, 0x54, 0x06
ALLOW, ERROR, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16
CLONE_THREAD, CLONE_NEW = 0x10000, 0x7E020080
AF_UNIX, SOCK_STREAM = 1, 1
SET_NAME, GET_NAME = 15, 16
CLONE, CLONE3, FCNTL_CALL, IOCTL = (56, 220), (435, 435), (72, 25), (16, 29)
SOCKETPAIR, PRCTL, TGKILL, PRLIMIT64 = (53, 199), (157, 167), (234, 131), (302, 261)


def seccomp_supported() -> bool:
    return os.uname().machine in AUDIT


def seccomp_program(pid: int, *, paths: bool) -> bytes:
    """The filter for the process `pid`. paths: whether it may use system calls that take a path."""
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
    lines += _if_syscall(CLONE[column], [
        (LOAD, 0, 0, ARGUMENTS_AT), (ANY_BIT, 2, 0, CLONE_NEW), (ANY_BIT, 0, 1, CLONE_THREAD), (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, ERROR | errno.EPERM),
    ])  # fmt: skip
    # after ENOSYS the C library falls back to clone
    lines += _if_syscall(CLONE3[column], [(RETURN, 0, 0, ERROR | errno.ENOSYS)])
    lines += _if_syscall(IOCTL[column], _one_of(1, IOCTLS))
    lines += _if_syscall(FCNTL_CALL[column], _one_of(1, FCNTL))
    lines += _if_syscall(PRCTL[column], _one_of(0, (SET_NAME, GET_NAME)))
    # It may read its own limits. Lowering one could make the kernel kill it, which would look like a busy host.
    lines += _if_syscall(PRLIMIT64[column], [
        (LOAD, 0, 0, ARGUMENTS_AT), (EQUAL, 1, 0, 0), (EQUAL, 0, 5, pid), (LOAD, 0, 0, ARGUMENTS_AT + 16),
        (EQUAL, 0, 3, 0), (LOAD, 0, 0, ARGUMENTS_AT + 20), (EQUAL, 0, 1, 0), (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, ERROR | errno.EPERM),
    ])  # fmt: skip
    # A datagram socket could send to any address; a stream of a pair cannot.
    lines += _if_syscall(SOCKETPAIR[column], [
        (LOAD, 0, 0, ARGUMENTS_AT), (EQUAL, 0, 4, AF_UNIX), (LOAD, 0, 0, ARGUMENTS_AT + 8), (AND, 0, 0, 0xFF),
        (EQUAL, 0, 1, SOCK_STREAM), (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, ERROR | errno.EPERM),
    ])  # fmt: skip
    # Any other signal to itself could look like one from the kernel.
    lines += _if_syscall(TGKILL[column], [
        (LOAD, 0, 0, ARGUMENTS_AT), (EQUAL, 0, 3, pid), (LOAD, 0, 0, ARGUMENTS_AT + 16), (EQUAL, 0, 1, SIGABRT),
        (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, ERROR | errno.EPERM),
    ])  # fmt: skip
    lines.append((RETURN, 0, 0, ERROR | errno.EPERM))
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def enforce_seccomp(filter_program: bytes) -> None:
    """Apply the filter permanently. Needs no_new_privs."""
    code = ctypes.create_string_buffer(filter_program, len(filter_program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(filter_program) // 8, ctypes.addressof(code)))
    call("prctl", PR_SET_SECCOMP, FILTER, header, 0, 0)


def _if_syscall(number: int, lines: list[Instruction]) -> list[Instruction]:
    return [(EQUAL, 0, len(lines), number), *lines]


def _one_of(argument: int, values: Iterable[int]) -> list[Instruction]:
    """Allow if the argument is one of these, else return EPERM."""
    lines: list[Instruction] = [(LOAD, 0, 0, ARGUMENTS_AT + 8 * argument)]
    for value in values:
        lines += [(EQUAL, 0, 1, value), (RETURN, 0, 0, ALLOW)]
    return [*lines, (RETURN, 0, 0, ERROR | errno.EPERM)]
