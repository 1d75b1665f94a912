"""Converts the records of a public set to rows, splits them, checks them on the gym server, and writes them."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import orjson

from ngym.errors import ServiceError, UsageError
from ngym.files.jsonl import write_whole
from ngym.peers import Peer
from ngym.prepare.download import digest, joined
from ngym.prepare.sets import File, Made, PublicSet, Split, Unfit, saying
from ngym.schema import Json

HELD_OUT = 10  # one in 10 rows is for validation, if the set does not define a split
MANIFEST = "manifest.json"
SPLITS: tuple[Split, ...] = ("validation", "train")  # a row in both is for validation
AT_ONCE = 16
SLICE = 1_000  # rows per batch of checks
FULL = 1.0 - 1e-6
SHOWN_CHARS = 160


class Converted(NamedTuple):
    """A row with its split and the set's reference answer."""

    split: Split
    made: Made


def converted(
    chosen: PublicSet, paths: Mapping[File, Path], agent: str, limit: int | None, left_out: Counter[str]
) -> Iterator[Converted]:
    """The rows of all parts, at most `limit` of each split; records without a row are counted in `left_out`, by reason.

    Raises:
        UsageError: a file or a record does not have the format that the converter reads.
    """
    counts: Counter[Split] = Counter()

    def full(split: Split | None) -> bool:
        return limit is not None and all(counts[each] >= limit for each in ([split] if split else SPLITS))

    for part in chosen.parts:
        for number, record in enumerate(joined([paths[file] for file in part.files]), 1):
            if full(part.split):
                break
            try:
                made = chosen.convert(record)
            except Unfit as error:
                left_out[str(error)] += 1
                continue
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                raise UsageError(
                    f"{paths[part.files[0]]}: record {number} does not have the format that "
                    f"gym_servers/{chosen.environment}/data/prepare.py reads ({type(error).__name__}: {error}); is it another --revision?"
                ) from error
            agent_ref = {"type": "responses_api_agents", "name": agent}
            row = {"responses_create_params": made.row["responses_create_params"], "agent_ref": agent_ref, **made.row}
            split = made.split or part.split or _share(row)
            if not full(split):
                counts[split] += 1
                yield Converted(split, made._replace(row=row))


def distinct(rows: Iterable[Converted], left_out: Counter[str]) -> dict[Split, list[Converted]]:
    """The rows by split, each question once; no question of validation is in training."""
    by_split: dict[Split, list[Converted]] = {"train": [], "validation": []}
    for each in rows:
        by_split[each.split].append(each)
    seen: set[bytes] = set()
    for split in SPLITS:
        kept = []
        for each in by_split[split]:
            key = hashlib.sha256(_question(each.made.row)).digest()
            if key in seen:
                left_out["a duplicate question"] += 1
            else:
                seen.add(key)
                kept.append(each)
        by_split[split] = kept
    return by_split


def write(
    folder: Path, chosen: PublicSet, rows: Mapping[Split, list[Converted]], left_out: Counter[str], files: list[Json]
) -> None:
    """Write train.jsonl, validation.jsonl, and last the manifest; the same set gives the same bytes.

    Raises:
        UsageError: the folder has rows from elsewhere.
    """
    check_free(folder, chosen.name)
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        lines = [orjson.dumps(each.made.row, option=orjson.OPT_APPEND_NEWLINE) for each in rows[split]]
        write_whole(folder / f"{split}.jsonl", b"".join(lines))
    manifest = {
        "set": chosen.name,
        "title": chosen.title,
        "environment": chosen.environment,
        "source": f"{chosen.host}:{chosen.repo}",
        "revision": chosen.revision,
        "licence": chosen.licence,
        "note": chosen.note,
        "files": files,
        "converter": converter_of(chosen),
        "ngym": version("ngym"),
        "rows": {split: {"count": len(rows[split]), "sha256": digest(folder / f"{split}.jsonl")} for split in SPLITS},
        "left_out": dict(sorted(left_out.items())),
    }
    write_whole(folder / MANIFEST, orjson.dumps(manifest, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def check_free(folder: Path, name: str) -> None:
    """Raise a UsageError if writing would replace rows that ng_prepare did not write for this set."""
    manifest = folder / MANIFEST
    try:
        own = orjson.loads(manifest.read_bytes()).get("set") == name if manifest.is_file() else False
    except (orjson.JSONDecodeError, AttributeError):
        own = False
    taken = [file for split in SPLITS if (file := folder / f"{split}.jsonl").exists()]
    if taken and not own:
        raise UsageError(f"{taken[0]} exists and was not prepared from {name}; choose another --output")


def converter_of(chosen: PublicSet) -> Json:
    """The function that made the rows, and the sha256 of its file."""
    file = Path(inspect.getfile(chosen.convert))
    place = "/".join(file.parts[-4:] if file.parent.name == "data" else file.parts[-3:])
    return {"function": f"{place}:{chosen.convert.__name__}", "sha256": digest(file)}


def some(reasons: Counter[str], count: int) -> list[str]:
    """The most common reasons with their counts."""
    return [f"{times:>7,}  {reason}" for reason, times in reasons.most_common(count)]


def _share(row: Json) -> Split:
    """The split of a row, by its question only, so that it does not depend on the order of the set."""
    return "validation" if hashlib.sha256(_question(row)).digest()[0] % HELD_OUT == 0 else "train"


def _question(row: Json) -> bytes:
    """The request to the policy: the same text with other tools is another question."""
    return orjson.dumps(row["responses_create_params"], option=orjson.OPT_SORT_KEYS)


async def accepted(
    peer: Peer, rows: Mapping[Split, list[Converted]], left_out: Counter[str]
) -> dict[Split, list[Converted]]:
    """The rows that the server accepts and whose reference answer gets the full reward; the others are counted.

    A row without a reference answer must get a verdict on an empty one.
    """
    limit = asyncio.Semaphore(AT_ONCE)

    async def right(each: Converted) -> bool:
        async with limit:
            problem = await _problem(peer, each.made)
        if problem:
            left_out[problem[:SHOWN_CHARS]] += 1
        return problem is None

    kept: dict[Split, list[Converted]] = {}
    for split, several in rows.items():
        kept[split] = []
        for start in range(0, len(several), SLICE):
            some = several[start : start + SLICE]
            verdicts = await asyncio.gather(*map(right, some))
            kept[split] += [each for each, is_right in zip(some, verdicts, strict=True) if is_right]
    return kept


async def _problem(peer: Peer, made: Made) -> str | None:
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
    if made.answer and reward < FULL:
        return "its reference answer does not get the full reward"
    return None
