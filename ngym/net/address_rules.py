"""Which addresses may a config name, and which of them does only this machine reach?"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens at this address or name."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def wrong_url(url: str) -> str | None:
    """Why no service of a config can be at this address, or None. The text shows no credentials."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 (it raises for a port that is none)
    except ValueError as error:
        return f"{url!r} is no URL ({error})"
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or "\\" in url:
        return f"{url!r} is no service URL; write http://host:port or https://host:port"
    if "@" in parts.netloc:
        return f"the URL of {parts.hostname} carries credentials; name the variable of a token with token_env instead"
    if _is_link_local(parts.hostname):
        return f"{url!r}: link-local addresses are those of cloud metadata, not of services"
    return None


def _is_link_local(host: str) -> bool:
    """In whichever way it is written: `169.254.169.254`, `0xa9fea9fe`, `[::ffff:169.254.169.254]`."""
    with contextlib.suppress(OSError):
        return ipaddress.ip_address(socket.inet_aton(host)).is_link_local
    with contextlib.suppress(ValueError):
        address = ipaddress.IPv6Address(host.partition("%")[0])
        return (address.ipv4_mapped or address).is_link_local
    return False
