"""Whom do we believe over https? The machine's authorities, and the one that the run names; and how do we show ourselves?"""

from __future__ import annotations

import os
import ssl
from functools import cache
from pathlib import Path

from ngym.errors import UsageError

CA = "NGYM_CA"


def trust(ca: Path) -> None:
    """Believe this authority (a PEM file), too, from now on; so do the processes that this one starts."""
    os.environ[CA] = str(ca)


def client_context() -> ssl.SSLContext:
    """What https requests are made with: TLS 1.2 or newer, certificates and host names checked."""
    return _context(*(os.environ.get(name) for name in (CA, "SSL_CERT_FILE", "SSL_CERT_DIR")))


@cache  # to read the machine's authorities takes milliseconds
def _context(ca: str | None, *machines: str | None) -> ssl.SSLContext:
    """machines: where OpenSSL looks for the machine's authorities, as far as its own variables say."""
    context = ssl.create_default_context()
    if ca:
        try:
            context.load_verify_locations(ca)
        except (OSError, ssl.SSLError) as error:
            raise UsageError(f"{CA}: {ca} is no file of PEM certificates ({error.strerror or error})") from None
    return context


def check_pair(certificate: Path, key: Path) -> None:
    """UsageError where a server could not show this certificate."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (OSError, ssl.SSLError) as error:
        raise UsageError(
            f"{certificate} and {key} are no PEM certificate and its unencrypted key ({error.strerror or error})"
        ) from None
