"""TLS of clients and servers: the trusted certificate authorities, and the check of a server's certificate."""

from __future__ import annotations

import os
import ssl
from functools import cache
from pathlib import Path

from ngym.errors import UsageError

CA = "NGYM_CA"


def trust(ca: Path) -> None:
    """Also trust this authority (a PEM file), in this process and its child processes."""
    os.environ[CA] = str(ca)


def client_context() -> ssl.SSLContext:
    """The TLS context of https requests: TLS 1.2 or newer, with checked certificates and host names."""
    return _context(*(os.environ.get(name) for name in (CA, "SSL_CERT_FILE", "SSL_CERT_DIR")))


@cache  # reading the machine's authorities takes milliseconds
def _context(ca: str | None, *machines: str | None) -> ssl.SSLContext:
    """machines: the values of OpenSSL's variables for the machine's authorities, as part of the cache key."""
    context = ssl.create_default_context()
    if ca:
        try:
            context.load_verify_locations(ca)
        except (OSError, ssl.SSLError) as error:
            raise UsageError(f"{CA}: {ca} is not a file of PEM certificates ({error.strerror or error})") from None
    return context


def check_pair(certificate: Path, key: Path) -> None:
    """Raise a UsageError if a server cannot use this certificate and key."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (OSError, ssl.SSLError) as error:
        raise UsageError(
            f"{certificate} and {key} are not a PEM certificate and its unencrypted key ({error.strerror or error})"
        ) from None
