"""Converts public sets to rows for `ng_prepare`: downloads files at a pinned revision, converts and checks records.

A set is declared next to its environment's data, in `gym_servers/NAME/data/prepare.py`, as a `PublicSet` in `SETS`.
"""

from __future__ import annotations

import asyncio
import csv
import hashlib
import importlib
import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from http.client import HTTPException, HTTPResponse
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

import orjson
from pydantic import BaseModel, ConfigDict, Field

from ngym.config.import_path import load_file
from ngym.did_you_mean import did_you_mean
from ngym.errors import ConfigError, NgymError, ServiceError, UsageError
from ngym.files.atomic import check_writable, write_whole
from ngym.files.jsonl import check_lines
from ngym.files.task_rows import assistant_message, task_row
from ngym.option_names import another_output
from ngym.peers import Peer
from ngym.runtime.live_region import sanitize
from ngym.schema import Json

Split = Literal["train", "validation"]
FILE = "prepare.py"


class Unconvertible(Exception):
    """A record cannot be converted. The message says why, with the same text for equal reasons: they are counted."""


class ConvertedRow(NamedTuple):
    """A row, and the set's reference answer (Responses items), if any, which the verifier must give the full reward.

    split: if the record defines it.
    """

    row: Json
    answer: list[Json] | None = None
    split: Split | None = None


class File(BaseModel):
    """A file of a set. sha256: None if no public record of it was found; then only the revision identifies the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    path: str
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")


class Part(BaseModel):
    """Files whose records belong together, by their `id` or line by line. split: None: a tenth is held out."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    files: tuple[File, ...] = Field(min_length=1)
    split: Split | None = None


def part(path: str, sha256: str | None = None, split: Split | None = None) -> Part:
    """A part that is one file."""
    return Part(files=(File(path=path, sha256=sha256),), split=split)


class PublicSet(BaseModel):
    """title: the set's common name, as in the README of the environment, with the same licence.

    rows: of the source, None if unknown. note: a hint for users, such as that it is a benchmark.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str = Field(pattern=r"^[a-z0-9_]+$")
    title: str
    environment: str  # folder of its gym server
    host: Literal["hugging_face", "github"]
    repo: str
    revision: str = Field(pattern=r"^[0-9a-f]{40}$")
    licence: str
    rows: int | None
    note: str = ""
    parts: tuple[Part, ...] = Field(min_length=1)
    convert: Callable[[Json], ConvertedRow]

    def url(self, file: File, hub: str, github: str) -> str:
        """hub, github: the URLs of the two hosts, without a trailing slash."""
        if self.host == "github":
            return f"{github}/{self.repo}/{self.revision}/{quote(file.path)}"
        return f"{hub}/datasets/{self.repo}/resolve/{self.revision}/{quote(file.path)}"

    def at(self, revision: str) -> PublicSet:
        """The set at another revision, whose digests and number of rows are unknown."""
        parts = tuple(
            Part(files=tuple(File(path=file.path) for file in part.files), split=part.split) for part in self.parts
        )
        return self.model_copy(update={"revision": revision, "parts": parts, "rows": None})


def saying(text: str) -> list[Json]:
    """An answer of text."""
    return [assistant_message(text)]


def calling(calls: Iterable[tuple[str, Json]]) -> list[Json]:
    """An answer that calls tools."""
    return [
        {"type": "function_call", "call_id": f"c{number}", "name": name, "arguments": json.dumps(arguments)}
        for number, (name, arguments) in enumerate(calls)
    ]


def find_sets(roots: Iterable[Path]) -> dict[str, PublicSet]:
    """The sets that prepare.py in the data of these folders' environments declare, by name; an earlier folder wins.

    It is gym_servers/NAME/data/prepare.py or data/NAME/prepare.py, and one of them may be a link to the other.
    """
    sets: dict[str, PublicSet] = {}
    for root in roots:
        files = [*root.glob(f"gym_servers/*/data/{FILE}"), *root.glob(f"data/*/{FILE}")]
        for file in sorted({file.resolve() for file in files}):
            for each in _load_sets(file):
                sets.setdefault(each.name, each)
    return sets


def _load_sets(file: Path) -> tuple[PublicSet, ...]:
    module = load_file(file)
    if not hasattr(module, "SETS"):
        raise ConfigError(f"{file}: declares no `SETS = (PublicSet(...), ...)`")
    return tuple(module.SETS)


def find_set(sets: dict[str, PublicSet], name: str) -> PublicSet:
    """The set of this name, or a UsageError with the nearest name."""
    if name not in sets:
        raise UsageError(f"no public set is called {name!r}{did_you_mean(name, sets)}; ng_prepare --list shows them")
    return sets[name]


MAX_FIELD_CHARS = 1 << 24  # per field of a CSV file
BATCH_ROWS = 1_000
MAX_BYTES = 1 << 30  # per file
CHUNK_BYTES = 1 << 20
TIMEOUT_S = 60.0  # for a connection, and for each piece
AGAIN = "run the command again, it continues where it stopped"


def merge_records(paths: Sequence[Path]) -> Iterator[Json]:
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
        yield from (line.row for line in check_lines(path, lambda row: None))
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
            raise DownloadFailed(_refusal_text(error.code, url)) from None
        part.unlink()  # it is complete, or belongs to another file
        _stream(url, part, target, token)
    except (URLError, HTTPException, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        raise DownloadFailed(
            f"{urlsplit(url).netloc} cannot be reached ({reason}); {AGAIN}. Without internet access, "
            f"name a mirror with --hub or --github, or put the file of {url} at {target}"
        ) from None


def _copy(reply: HTTPResponse, file: BinaryIO, url: str) -> None:
    expected_bytes = int(reply.headers.get("Content-Length") or -1)
    copied = 0
    while chunk := reply.read(CHUNK_BYTES):
        copied += len(chunk)
        file.write(chunk)
        if file.tell() > MAX_BYTES:
            raise DownloadFailed(f"{url}: larger than the limit of {MAX_BYTES >> 20} MiB")
    if expected_bytes not in (-1, copied):
        raise DownloadFailed(f"{url}: broke off after {copied:,} of {expected_bytes:,} bytes; {AGAIN}")


def _refusal_text(status: int, url: str) -> str:
    message = f"{url}: HTTP {status}"
    if status in (401, 403):
        page = url.partition("/resolve/")[0]
        return f"{message}: gated, private or missing. Accept its terms at {page}, and set HF_TOKEN to your token"
    if status == 404:
        return f"{message}: no such file at this revision; choose another with --revision"
    return f"{message}; try again later, it continues where it stopped"


HELD_OUT = 10  # one in 10 rows is for validation, if the set does not define a split
MANIFEST = "manifest.json"
SPLITS: tuple[Split, ...] = ("validation", "train")  # a row in both is for validation
CONCURRENCY = 16
SLICE = 1_000  # rows per batch of checks
FULL_REWARD = 1.0 - 1e-6
SHOWN_CHARS = 160


class SplitRow(NamedTuple):
    """A row with its split and the set's reference answer."""

    split: Split
    converted: ConvertedRow


def convert_rows(
    public_set: PublicSet, paths: Mapping[File, Path], agent: str, limit: int | None, left_out: Counter[str]
) -> Iterator[SplitRow]:
    """The rows of all parts, at most `limit` of each split; records without a row are counted in `left_out`, by reason.

    Raises:
        UsageError: a file or a record does not have the format that the converter reads.
    """
    counts: Counter[Split] = Counter()

    def full(split: Split | None) -> bool:
        return limit is not None and all(counts[each] >= limit for each in ([split] if split else SPLITS))

    for part in public_set.parts:
        for number, record in enumerate(merge_records([paths[file] for file in part.files]), 1):
            if full(part.split):
                break
            try:
                made = public_set.convert(record)
            except Unconvertible as error:
                left_out[str(error)] += 1
                continue
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                raise UsageError(
                    f"{paths[part.files[0]]}: record {number} does not have the format that "
                    f"gym_servers/{public_set.environment}/data/prepare.py reads ({type(error).__name__}: {error}); is it another "
                    "--revision?"
                ) from error
            row = {**task_row(agent, made.row["responses_create_params"]), **made.row}
            split = made.split or part.split or _share(row)
            if not full(split):
                counts[split] += 1
                yield SplitRow(split, made._replace(row=row))


def distinct(rows: Iterable[SplitRow], left_out: Counter[str]) -> dict[Split, list[SplitRow]]:
    """The rows by split, each question once; no question of validation is in training."""
    by_split: dict[Split, list[SplitRow]] = {"train": [], "validation": []}
    for each in rows:
        by_split[each.split].append(each)
    digests: set[bytes] = set()
    for split in SPLITS:
        unique = []
        for each in by_split[split]:
            key = hashlib.sha256(_question(each.converted.row)).digest()
            if key in digests:
                left_out["a duplicate question"] += 1
            else:
                digests.add(key)
                unique.append(each)
        by_split[split] = unique
    return by_split


def write(
    folder: Path,
    public_set: PublicSet,
    rows: Mapping[Split, list[SplitRow]],
    left_out: Counter[str],
    files: list[Json],
) -> None:
    """Write train.jsonl, validation.jsonl, and last the manifest; the same set gives the same bytes.

    Raises:
        UsageError: the folder has rows from elsewhere.
    """
    check_free(folder, public_set.name)
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        lines = [orjson.dumps(each.converted.row, option=orjson.OPT_APPEND_NEWLINE) for each in rows[split]]
        write_whole(folder / f"{split}.jsonl", b"".join(lines))
    # the function that made the rows, and the sha256 of its file
    file = Path(inspect.getfile(public_set.convert))
    place = "/".join(file.parts[-4:] if file.parent.name == "data" else file.parts[-3:])
    manifest = {
        "set": public_set.name,
        "title": public_set.title,
        "environment": public_set.environment,
        "source": f"{public_set.host}:{public_set.repo}",
        "revision": public_set.revision,
        "licence": public_set.licence,
        "note": public_set.note,
        "files": files,
        "converter": {"function": f"{place}:{public_set.convert.__name__}", "sha256": digest(file)},
        "ngym": version("ngym"),
        "rows": {split: {"count": len(rows[split]), "sha256": digest(folder / f"{split}.jsonl")} for split in SPLITS},
        "left_out": dict(sorted(left_out.items())),
    }
    write_whole(folder / MANIFEST, orjson.dumps(manifest, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def check_free(folder: Path, name: str) -> None:
    """Raise a UsageError if nothing can be written there, or it would replace rows that ng_prepare did not write for this
    set.
    """
    check_writable(folder)
    manifest = folder / MANIFEST
    try:
        own = orjson.loads(manifest.read_bytes()).get("set") == name if manifest.is_file() else False
    except (orjson.JSONDecodeError, AttributeError):
        own = False
    existing = [file for split in SPLITS if (file := folder / f"{split}.jsonl").exists()]
    if existing and not own:
        raise UsageError(f"{existing[0]} exists and was not prepared from {name}; {another_output()}")


def some(reasons: Counter[str], count: int) -> list[str]:
    """The most common reasons with their counts. A reason may quote the public set."""
    return [f"{times:>7,}  {sanitize(reason)}" for reason, times in reasons.most_common(count)]


def _share(row: Json) -> Split:
    """The split of a row, by its question only, so that it does not depend on the order of the set."""
    return "validation" if hashlib.sha256(_question(row)).digest()[0] % HELD_OUT == 0 else "train"


def _question(row: Json) -> bytes:
    """The request to the policy: the same text with other tools is another question."""
    return orjson.dumps(row["responses_create_params"], option=orjson.OPT_SORT_KEYS)


async def accept_rows(
    peer: Peer, rows: Mapping[Split, list[SplitRow]], left_out: Counter[str]
) -> dict[Split, list[SplitRow]]:
    """The rows that the server accepts and whose reference answer gets the full reward; the others are counted.

    A row without a reference answer must get a verdict on an empty one.
    """
    limit = asyncio.Semaphore(CONCURRENCY)

    async def right(each: SplitRow) -> bool:
        async with limit:
            problem = await _problem(peer, each.converted)
        if problem:
            left_out[problem[:SHOWN_CHARS]] += 1
        return problem is None

    result: dict[Split, list[SplitRow]] = {}
    for split, several in rows.items():
        result[split] = []
        for start in range(0, len(several), SLICE):
            some = several[start : start + SLICE]
            verdicts = await asyncio.gather(*map(right, some))
            result[split] += [each for each, is_right in zip(some, verdicts, strict=True) if is_right]
    return result


async def _problem(peer: Peer, made: ConvertedRow) -> str | None:
    session = peer.session()
    request = {**made.row, "response": {"output": made.answer or saying("")}}
    try:
        await session.post("/seed_session", made.row)
        verdict = await session.post("/verify", request)
        await session.request("/session", None, method="DELETE")
    except ServiceError as error:
        return f"refused: {error.detail}"
    reward = verdict["reward"]
    if reward is None:
        return f"cannot be verified: {verdict.get('outcome') or ''} {verdict.get('reason') or ''}".rstrip(" :")
    if made.answer and reward < FULL_REWARD:
        return "its reference answer does not get the full reward"
    return None
