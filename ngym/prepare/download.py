"""Downloads a public set at its pinned revision, and reads its records."""

from __future__ import annotations

import csv
import hashlib
import importlib
from collections.abc import Iterator, Sequence
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, BinaryIO
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import orjson

from ngym.errors import NgymError, UsageError
from ngym.files.jsonl import checked
from ngym.schema import Json

MAX_FIELD_CHARS = 1 << 24  # per field of a CSV file
BATCH_ROWS = 1_000
MAX_BYTES = 1 << 30  # per file
CHUNK_BYTES = 1 << 20
TIMEOUT_S = 60.0  # for a connection, and for each piece
AGAIN = "run the command again, it continues where it stopped"


def joined(paths: Sequence[Path]) -> Iterator[Json]:
    """The merged records of files that belong together: by `id` if they have one, else line by line.

    Raises:
        UsageError: a file does not have the format of its name, or the files do not match.
    """
    first, *others = paths
    if not others:
        yield from records(first)
        return
    rest = [list(records(path)) for path in others]
    by_id = [{row["id"]: row for row in rows if "id" in row} for rows in rest]
    number = -1
    for number, record in enumerate(records(first)):
        merged = dict(record)
        for path, rows, known in zip(others, rest, by_id, strict=True):
            other = known.get(record["id"]) if "id" in record else rows[number] if number < len(rows) else None
            if other is None:
                raise UsageError(f"{path}: has nothing for record {number + 1} of {first.name}")
            merged |= other
        yield merged
    for path, rows in zip(others, rest, strict=True):
        if len(rows) != number + 1:
            raise UsageError(f"{path}: has {len(rows)} records, and {first.name} has {number + 1}")


def records(path: Path) -> Iterator[Json]:
    """The records of a file, in the format of its suffix. Each line of a text file is `{name of the file: line}`."""
    match path.suffix:
        case ".jsonl" | ".json":
            yield from _json(path)
        case ".csv":
            csv.field_size_limit(MAX_FIELD_CHARS)
            with path.open(encoding="utf-8-sig", newline="") as file:
                yield from csv.DictReader(file)
        case ".parquet":
            yield from _parquet(path)
        case ".txt":
            with path.open(encoding="utf-8-sig", newline="\n") as file:
                for line in file:
                    yield {path.name: line.rstrip("\r\n")}
        case other:
            raise UsageError(f"{path}: no reader for {other or 'a file without an ending'}")


def _json(path: Path) -> Iterator[Json]:
    with path.open("rb") as file:
        is_array = file.read(64).lstrip()[:1] == b"["
    if not is_array:
        yield from (line.row for line in checked(path, lambda row: None))
        return
    try:
        yield from orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise UsageError(f"{path}: not JSON: {error}") from None


def _parquet(path: Path) -> Iterator[Json]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
        arrow: Any = importlib.import_module("pyarrow")
    except ImportError as error:
        raise UsageError(f"{path.name} is a Parquet file: pip install 'ngym[prepare]' ({error})") from None
    try:
        for batch in parquet.ParquetFile(path).iter_batches(BATCH_ROWS):
            yield from batch.to_pylist()
    except arrow.ArrowException as error:
        raise UsageError(f"{path}: not a Parquet file that can be read: {error}") from None


class DownloadFailed(NgymError):
    """The download failed; the message has a remedy."""


def fetch(url: str, target: Path, sha256: str | None = None, token: str | None = None) -> None:
    """Download a file, unless it exists.

    Args:
        sha256: the expected digest; None accepts any.
        token: a bearer token for the host of `url` only; it is not sent to a redirect's host.

    Raises:
        DownloadFailed: the file is not available, is too large, or has another digest.
        UsageError: the file cannot be written.
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
                f"{url}: its sha256 is {got} and must be {sha256}: the download is damaged, or this is no longer the "
                "same file; run the command again, and if that does not help, choose another --revision"
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
        part.unlink()  # it is complete, or belongs to another file
        _stream(url, part, target, token)
    except (URLError, HTTPException, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        raise DownloadFailed(
            f"{urlsplit(url).netloc} cannot be reached ({reason}); {AGAIN}. Without internet access, "
            f"set HF_ENDPOINT to a mirror, or put the file of {url} at {target}"
        ) from None


def _copy(reply: HTTPResponse, file: BinaryIO, url: str) -> None:
    wanted = int(reply.headers.get("Content-Length") or -1)
    copied = 0
    while chunk := reply.read(CHUNK_BYTES):
        copied += len(chunk)
        file.write(chunk)
        if file.tell() > MAX_BYTES:
            raise DownloadFailed(f"{url}: larger than the limit of {MAX_BYTES >> 20} MiB")
    if wanted not in (-1, copied):
        raise DownloadFailed(f"{url}: broke off after {copied:,} of {wanted:,} bytes; {AGAIN}")


def _refused(status: int, url: str) -> str:
    told = f"{url}: HTTP {status}"
    if status in (401, 403):
        page = url.partition("/resolve/")[0]
        return f"{told}: gated, private or missing. Accept its terms at {page}, and set HF_TOKEN to your token"
    if status == 404:
        return f"{told}: no such file at this revision; choose another with --revision"
    return f"{told}; try again later, it continues where it stopped"
