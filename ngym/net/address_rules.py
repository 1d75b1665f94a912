"""Checks of addresses: loopback detection, and the URLs that a config may name."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach this address or name."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def wrong_url(url: str) -> str | None:
    """Why this URL is not valid for a service of a config, or None. The text shows no credentials."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 (it raises for an invalid port)
    except ValueError as error:
        return f"{url!r} is not a URL ({error})"
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or "\\" in url:
        return f"{url!r} is not a service URL; write http://host:port or https://host:port"
    if "@" in parts.netloc:
        return f"the URL of {parts.hostname} has credentials; use token_env with the variable of a token instead"
    if _is_link_local(parts.hostname):
        return f"{url!r}: link-local addresses belong to cloud metadata services"
    return None


def _is_link_local(host: str) -> bool:
    """Whether it is link-local in any notation: `169.254.169.254`, `0xa9fea9fe`, `[::ffff:169.254.169.254]`."""
    with contextlib.suppress(OSError):
        return ipaddress.ip_address(socket.inet_aton(host)).is_link_local
    with contextlib.suppress(ValueError):
        address = ipaddress.IPv6Address(host.partition("%")[0])
        return (address.ipv4_mapped or address).is_link_local
    return False
