"""The network interface of an address of this machine."""

from __future__ import annotations

import fcntl
import socket
import struct

GET_ADDRESS = 0x8915  # SIOCGIFADDR, see netdevice(7)
IFREQ = "16s24x"


def interface_of(address: str) -> str | None:
    """The network interface whose first IPv4 address this is, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        return next((name for _, name in socket.if_nameindex() if _address_of(sock, name) == address), None)


def _address_of(sock: socket.socket, interface: str) -> str | None:
    try:
        answer = fcntl.ioctl(sock, GET_ADDRESS, struct.pack(IFREQ, interface.encode()))
    except OSError:  # it has none
        return None
    return socket.inet_ntoa(answer[20:24])
