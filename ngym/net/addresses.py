"""Addresses and network interfaces of this machine, and whether other machines can call an address."""

from __future__ import annotations

import fcntl
import socket
import struct
from typing import NamedTuple
from urllib.parse import urlsplit

from ngym.net.auth import is_loopback

WILDCARDS = ("0.0.0.0", "::", "")  # a socket that is bound to one of them listens at every address of its machine
_ANY_PORT = 9  # a UDP socket that connects sends nothing
_GET_ADDRESS = 0x8915  # SIOCGIFADDR, see netdevice(7)
_IFREQ = "16s24x"


class Route(NamedTuple):
    """The addresses of both ends of a connection between two machines."""

    own: str
    other: str

    @property
    def is_local(self) -> bool:
        """Whether both ends are this machine."""
        return self.own == self.other or is_loopback(self.other)


def route_to(url: str) -> Route:
    """The addresses that a connection to this URL has.

    Raises:
        OSError: the name cannot be resolved, or there is no network.
    """
    family, _, _, _, address = socket.getaddrinfo(urlsplit(url).hostname, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return Route(probe.getsockname()[0], str(address[0]))


def is_own(url: str) -> bool:
    """Whether the host of this URL is this machine, as far as it can be resolved."""
    try:
        return route_to(url).is_local
    except OSError:
        return False


def has_loopback(url: str) -> bool:
    """Whether only its own machine can call this URL."""
    return is_loopback(urlsplit(url).hostname or "")


def with_host(url: str, host: str) -> str:
    """The URL with another host."""
    parts = urlsplit(url)
    netloc = f"[{host}]" if ":" in host else host
    return parts._replace(netloc=f"{netloc}:{parts.port}" if parts.port else netloc).geturl()


def interface_of(address: str) -> str | None:
    """The network interface whose first IPv4 address this is, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        return next((name for _, name in socket.if_nameindex() if _address_of(sock, name) == address), None)


def _address_of(sock: socket.socket, interface: str) -> str | None:
    try:
        answer = fcntl.ioctl(sock, _GET_ADDRESS, struct.pack(_IFREQ, interface.encode()))
    except OSError:  # it has none
        return None
    return socket.inet_ntoa(answer[20:24])
