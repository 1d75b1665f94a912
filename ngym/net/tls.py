"""TLS of clients and servers: the trusted certificate authorities, and the check of a server's certificate."""

from __future__ import annotations

import os
import ssl
from contextlib import suppress
from functools import cache
from pathlib import Path

from ngym.errors import UsageError

CA = "NGYM_CA"


def trust(ca: Path) -> None:
    """Also trust this authority (a PEM file), in this process and its child processes."""
    os.environ[CA] = str(ca)


def client_context() -> ssl.SSLContext:
    """The TLS context of https requests: TLS 1.2 or newer, with checked certificates and host names."""
    return _cached_context(*(os.environ.get(name) for name in (CA, "SSL_CERT_FILE", "SSL_CERT_DIR")))


@cache  # reading the machine's authorities takes milliseconds
def _cached_context(ca: str | None, *_machines: str | None) -> ssl.SSLContext:
    """machines: the values of OpenSSL's variables for the machine's authorities, as part of the cache key."""
    return _context(ca)


def _context(ca: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if ca:
        try:
            context.load_verify_locations(ca)
        except (OSError, ssl.SSLError) as error:
            raise UsageError(f"{CA}: {ca} is not a file of PEM certificates ({error.strerror or error})") from None
    return context


def check_pair(certificate: Path, key: Path) -> None:
    """Raise a UsageError if a server cannot use this certificate and key, or if clients of this run do not trust it.

    Client and server shake hands in memory. The name or address in the certificate is not checked: each connection does.
    """
    try:
        serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        serving.load_cert_chain(certificate, key, password="")
    except (OSError, ssl.SSLError) as error:
        raise UsageError(
            f"{certificate} and {key} are not a PEM certificate and its unencrypted key ({error.strerror or error})"
        ) from None
    asking = _context(os.environ.get(CA))
    asking.check_hostname = False
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = asking.wrap_bio(to_client, to_server)
    server = serving.wrap_bio(to_server, to_client, server_side=True)
    try:
        for side in (client, server, client):  # the second message of the client follows from its check
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLError as error:
        reason = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else error.reason
        raise UsageError(
            f"clients would not trust {certificate}: {reason}; `ca` names the file of its authority"
        ) from None
