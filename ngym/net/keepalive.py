"""TCP keepalive: detects connections to a machine that has gone silent.

A machine that loses power, and a network that drops packets, end no connection: TCP sends again for a quarter of an hour.
So the kernel asks a quiet peer whether it is there. The peer's kernel answers, whatever its programs do.
"""

from __future__ import annotations

import socket
import struct
import sys
from typing import Protocol

IDLE_S, PROBE_S, PROBES = 10, 5, 4  # until the first question; between two; then, unanswered, they end the connection
SILENT_S = float(IDLE_S + PROBES * PROBE_S)  # without a packet; then the connection is broken
_RECEIVED = struct.Struct("=II")  # tcpi_last_data_recv and tcpi_last_ack_recv, in milliseconds
_RECEIVED_AT = 52  # in Linux's struct tcp_info
_INFO_BYTES = _RECEIVED_AT + _RECEIVED.size


class TcpSocket(Protocol):
    """The methods of a socket that are used here; the sockets of uvloop's transports have them."""

    def setsockopt(self, level: int, option: int, value: int, /) -> None: ...

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...


def enable_keepalive(sock: TcpSocket) -> None:
    """Let the kernel ask the other machine. Of a listening socket: for each connection that it accepts."""
    if sys.platform == "linux":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)


def break_when_silent(sock: socket.socket) -> None:
    """Let the calls of a blocking socket raise TimeoutError after SILENT_S without a packet, also those that send."""
    enable_keepalive(sock)
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENT_S * 1000))


def silence_s(sock: TcpSocket) -> float:
    """Seconds since the last packet of the other machine; 0 if the system does not tell.

    Also while data waits for its acknowledgement: then the kernel asks no questions, and SO_KEEPALIVE ends nothing.
    """
    if sys.platform != "linux":
        return 0.0
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except OSError:  # it is closed, or not of TCP
        return 0.0
    return float(min(_RECEIVED.unpack_from(info, _RECEIVED_AT))) / 1000
