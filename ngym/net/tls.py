"""TLS of clients and servers: the trusted certificate authorities, and the check of a server's certificate."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path
from tempfile import gettempdir, mkstemp

from ngym.errors import UsageError

CA = "NGYM_CA"
MACHINES = ("SSL_CERT_FILE", "SSL_CERT_DIR")  # OpenSSL's variables for the machine's authorities
_CERTIFICATE = re.compile(rb"-----BEGIN ((?:TRUSTED |X509 )?CERTIFICATE)-----.*?-----END \1-----", re.DOTALL)
_HASHED = re.compile(r"[0-9a-f]{8}\.\d+")  # the names of files that OpenSSL reads in a folder of authorities


def trust(ca: Path) -> None:
    """Also trust this authority (a PEM file), in this process and its child processes."""
    os.environ[CA] = str(ca)


def trust_in_all_clients(ca: Path) -> None:
    """Also trust this authority, in this process and its child processes, and also in HTTP clients of other libraries.

    httpx and the clients of OpenAI, Anthropic and MCP read SSL_CERT_FILE instead of the machine's authorities: then it
    names a file of both in the folder for temporary files, which all services of this user share.

    Raises:
        UsageError: the authority's file cannot be read, or the other one cannot be written.
    """
    trust(ca)
    try:
        content = b"\n".join(dict.fromkeys([*_certificates(ca), *_machines_certificates()]))  # each once
        digest = blake2b(content, digest_size=12).hexdigest()
        file = Path(gettempdir()) / f"ngym-authorities-{os.getuid()}-{digest}.pem"
        if not _has(file, content):
            number, name = mkstemp(prefix="ngym-authorities-", suffix=".new")
            with os.fdopen(number, "wb") as new:
                new.write(content)
            Path(name).replace(file)
    except OSError as error:
        raise UsageError(
            f"ngym.tls.ca: a file with {ca} and the machine's authorities cannot be written ({error})"
        ) from None
    os.environ[MACHINES[0]] = str(file)


def _has(file: Path, content: bytes) -> bool:
    """Whether the file has this content and is safe from changes by other users, who can write to the same folder."""
    try:
        with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as stream:
            status = os.fstat(stream.fileno())
            return status.st_uid == os.getuid() and not status.st_mode & 0o022 and stream.read() == content
    except OSError:
        return False


def _machines_certificates() -> Iterator[bytes]:
    """The certificates that clients read without the new file: those of SSL_CERT_FILE, or else of every default place.

    certifi's are httpx's default. Python itself also reads the folder next to SSL_CERT_FILE, and still does.
    """
    paths = ssl.get_default_verify_paths()
    files = [paths.cafile] if paths.cafile else []
    if not os.environ.get(MACHINES[0]):
        if paths.capath:
            files += [file.path for file in os.scandir(paths.capath) if _HASHED.fullmatch(file.name)]
        if not os.environ.get(MACHINES[1]):
            with suppress(ImportError):
                import certifi

                files.append(certifi.where())
    for file in files:
        with suppress(OSError):  # OpenSSL ignores them, too
            yield from _certificates(Path(file))


def _certificates(file: Path) -> list[bytes]:
    return [match[0] for match in _CERTIFICATE.finditer(file.read_bytes())]


def client_context() -> ssl.SSLContext:
    """The TLS context of https requests: TLS 1.2 or newer, with checked certificates and host names."""
    return _cached_context(*(os.environ.get(name) for name in (CA, *MACHINES)))


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
