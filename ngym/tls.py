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
    if os.environ.get(CA) != str(ca):
        os.environ[CA] = str(ca)
        client_context.cache_clear()


@cache
def client_context() -> ssl.SSLContext:
    """What every https request of this process is made with: TLS 1.2 or newer, certificates and host names checked."""
    context = ssl.create_default_context()
    if ca := os.environ.get(CA):
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
