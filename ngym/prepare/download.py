"""A file from the web, once: streamed, bounded, resumed where it broke off, checked, and only then under its name."""

from __future__ import annotations

import hashlib
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import BinaryIO
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from ngym.errors import NgymError, UsageError

MAX_BYTES = 1 << 30  # of a file
CHUNK_BYTES = 1 << 20
TIMEOUT_S = 60.0  # for a connection, and for each piece
AGAIN = "run the command again, it goes on where it stopped"


class DownloadFailed(NgymError):
    """The file did not come; the message says what would help."""


def fetch(url: str, target: Path, sha256: str | None = None, token: str | None = None) -> None:
    """Put the file there, unless it is there.

    Args:
        sha256: what it must have; None takes any.
        token: a bearer token for the host of `url` alone; a host that it redirects to is not shown it.

    Raises:
        DownloadFailed: it cannot be had, is too large, or is not what it should be.
        UsageError: it cannot be written.
    """
    if target.is_file() and sha256 in (None, digest(target)):
        return
    part = target.with_name(f"{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _stream(url, part, target, token)
        if sha256 is not None and (got := digest(part)) != sha256:
            part.unlink()
            raise DownloadFailed(
                f"{url}: its sha256 is {got} and must be {sha256}: it was damaged on the way, or is no longer the same "
                "file; run the command again, and if that does not help take another --revision"
            )
        part.replace(target)
    except OSError as error:
        raise UsageError(f"{target}: cannot be written ({error.strerror}); choose another --cache") from None


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stream(url: str, part: Path, target: Path, token: str | None) -> None:
    have = part.stat().st_size if part.exists() else 0
    request = Request(url, headers={"User-Agent": "ngym", **({"Range": f"bytes={have}-"} if have else {})})
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urlopen(request, timeout=TIMEOUT_S) as reply, part.open("ab" if reply.status == 206 else "wb") as file:
            _copy(reply, file, url)
    except HTTPError as error:
        if error.code != 416 or not have:
            raise DownloadFailed(_refused(error.code, url)) from None
        part.unlink()  # it was whole, or is of another file
        _stream(url, part, target, token)
    except (URLError, HTTPException, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        raise DownloadFailed(
            f"{urlsplit(url).netloc} cannot be reached ({reason}); {AGAIN}. Where there is no way out, "
            f"set HF_ENDPOINT to a mirror, or put the file of {url} at {target}"
        ) from None


def _copy(reply: HTTPResponse, file: BinaryIO, url: str) -> None:
    wanted = int(reply.headers.get("Content-Length") or -1)
    copied = 0
    while chunk := reply.read(CHUNK_BYTES):
        copied += len(chunk)
        file.write(chunk)
        if file.tell() > MAX_BYTES:
            raise DownloadFailed(f"{url}: larger than {MAX_BYTES >> 20} MiB, which is as much as is taken")
    if wanted not in (-1, copied):
        raise DownloadFailed(f"{url}: broke off after {copied:,} of {wanted:,} bytes; {AGAIN}")


def _refused(status: int, url: str) -> str:
    told = f"{url}: HTTP {status}"
    if status in (401, 403):
        page = url.partition("/resolve/")[0]
        return (
            f"{told}: gated, private or not there. Accept its terms at {page}, and put a token of yours into HF_TOKEN"
        )
    if status == 404:
        return f"{told}: no such file at this revision; --revision names another"
    return f"{told}; try again later, it goes on where it stopped"
