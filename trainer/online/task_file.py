"""The tasks of a JSONL file, by their index; in memory are only their places in it."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from ngym.collect.plan import AGENT_TYPE
from ngym.errors import UsageError
from ngym.files import jsonl
from ngym.schema import Json


class TaskFile:
    """The rows of a JSONL file by their index, without those in memory.

    Args:
        check: what is wrong with a row, or None.
        limit: the first rows only.

    Raises:
        UsageError: a row does not pass the check, or there is none.
    """

    def __init__(self, path: Path, check: Callable[[Json], str | None], limit: int | None = None) -> None:
        self._path = path
        self._starts, self._ends = array("Q"), array("Q")
        for line in jsonl.checked(path, check, limit):
            self._starts.append(line.start)
            self._ends.append(line.end)
        if not self._starts:
            raise UsageError(f"{path}: no tasks in it; each line is one")

    def __len__(self) -> int:
        return len(self._starts)

    def rows(self, indices: Iterable[int]) -> Iterator[Json]:
        with self._path.open("rb") as file:
            for index in indices:
                file.seek(self._starts[index])
                text = file.read(self._ends[index] - self._starts[index])
                try:
                    yield orjson.loads(text.removeprefix(jsonl.BOM))
                except orjson.JSONDecodeError:
                    raise UsageError(f"{self._path}: changed while this run reads it; leave it as it was") from None

    def digest(self) -> str:
        """Of the file's content."""
        with self._path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def task_problem(row: Json, agent: str) -> str | None:
    """Why a row is no task for this agent, or None."""
    params = row.get("responses_create_params")
    if not isinstance(params, dict):
        return 'no task: it needs {"responses_create_params": {"input": ...}}'
    reference = row.get("agent_ref")
    if reference is None:
        return None
    named = reference.get("name") if isinstance(reference, dict) else reference
    if named != agent:
        return f"agent_ref names {named!r}, and these tasks are for {agent!r}; give it an environment of its own"
    return None


def sampling_seed(*parts: object) -> int:
    """A seed for the sampling of an attempt: the same for the same parts, and as good as random."""
    digest = hashlib.sha256(" ".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def for_agent(row: Json, agent: str, params: Mapping[str, Any]) -> Json:
    """The row with its agent, and these parameters over its own."""
    return {
        "agent_ref": {"type": AGENT_TYPE, "name": agent},
        **row,
        "responses_create_params": {**row["responses_create_params"], **params},
    }
