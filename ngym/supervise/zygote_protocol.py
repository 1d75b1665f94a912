"""How `ng_run` and its zygote talk: length-prefixed JSON over a Unix socket, with file descriptors beside it."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_LENGTH = struct.Struct("!Q")
MAX_FDS = 16


@dataclass(frozen=True)
class Message:
    """One message; the descriptors are the receiver's own to close."""

    content: dict[str, Any]
    fds: list[int] = field(default_factory=list)


def send(sock: socket.socket, content: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one message. The descriptors travel with the length, which is small enough never to be split."""
    payload = json.dumps(content).encode()
    header = _LENGTH.pack(len(payload))
    if fds:
        socket.send_fds(sock, [header], list(fds))
        sock.sendall(payload)
        return
    sock.sendall(header + payload)


def receive(sock: socket.socket) -> Message | None:
    """The next message, or None when the other side has closed (also half-way through one)."""
    try:
        header, fds, _, _ = socket.recv_fds(sock, _LENGTH.size, MAX_FDS)
        header += _exactly(sock, _LENGTH.size - len(header))
        (length,) = _LENGTH.unpack(header)
        return Message(json.loads(_exactly(sock, length)), list(fds))
    except (ConnectionError, EOFError):
        return None


def _exactly(sock: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = sock.recv(min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
