"""Declarations of public sets: the files, their revision and licence, and the conversion of a record."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ngym.did_you_mean import did_you_mean
from ngym.errors import ConfigError, UsageError
from ngym.schema import Json

Split = Literal["train", "validation"]
FILE = "prepare.py"


class Unfit(Exception):
    """A record cannot be converted. The message says why, with the same text for equal reasons: they are counted."""


class Made(NamedTuple):
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
    convert: Callable[[Json], Made]

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
    return [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}]


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
    found: dict[str, PublicSet] = {}
    for root in roots:
        files = [*root.glob(f"gym_servers/*/data/{FILE}"), *root.glob(f"data/*/{FILE}")]
        for file in sorted({file.resolve() for file in files}):
            for each in _declared(file):
                found.setdefault(each.name, each)
    return found


def _declared(file: Path) -> tuple[PublicSet, ...]:
    name = f"_ngym_prepare_{file.parent.name}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{file}: not a Python file")
    module: Any = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (ImportError, SyntaxError, ValidationError) as error:
        raise ConfigError(f"{file}: {' '.join(str(error).split())}") from error
    if not hasattr(module, "SETS"):
        raise ConfigError(f"{file}: declares no `SETS = (PublicSet(...), ...)`")
    return tuple(module.SETS)


def named(sets: dict[str, PublicSet], name: str) -> PublicSet:
    """The set of this name, or a UsageError with the nearest name."""
    if name not in sets:
        raise UsageError(f"no public set is called {name!r}{did_you_mean(name, sets)}; ng_prepare --list shows them")
    return sets[name]
