"""Which run do these files belong to? Its digests, and `out_run.json`, which says whether a run may be resumed."""

from __future__ import annotations

import hashlib
import os
import platform
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

import ngym
from ngym.collect.outcome import TokenFormat
from ngym.collect.plan import Recipe
from ngym.errors import UsageError
from ngym.jsonl import write_whole
from ngym.schema import SCHEMA_VERSION, Json

PLACES = frozenset({"url", "urls", "host", "port", "replicas"})  # where a service runs, not what it does
REMEDY = "choose another --output, or start again with --overwrite"


@dataclass(frozen=True)
class Source:
    """What is collected, as far as a resumed run must agree. services: the resolved config, name -> stanza."""

    input: Path
    recipe: Recipe
    token_format: TokenFormat = "ng"
    services: Json = field(default_factory=dict)

    def config(self) -> Json:
        """What decides a rollout beside its row. More repeats or rows are more rollouts, not others, so they are not in it."""
        recipe = asdict(self.recipe)
        stanzas = {
            name: {key: value for key, value in stanza.items() if key not in PLACES}
            for name, stanza in self.services.items()
            if name != "ngym" and isinstance(stanza, dict)
        }
        own = {key: recipe[key] for key in ("agent", "params", "seed")}
        return {**own, "token_format": self.token_format, "services": stanzas}

    def digests(self) -> dict[str, str]:
        """`{"input": sha256 of the file, "config": sha256 of config()}`."""
        try:
            with self.input.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise UsageError(f"{self.input}: cannot be read: {error.strerror}") from None
        settings = orjson.dumps(self.config(), option=orjson.OPT_SORT_KEYS)
        return {"input": content, "config": hashlib.sha256(settings).hexdigest()}


class RunRecord:
    """`out_run.json`: the run's id, what it collects, and each sitting of it."""

    def __init__(self, path: Path, content: Json) -> None:
        self._path = path
        self._content = content

    @classmethod
    def new(cls, path: Path) -> RunRecord:
        """The record of a run that begins; nothing is written yet."""
        run_id = f"{datetime.now(UTC):%Y%m%dt%H%M%S}-{os.urandom(3).hex()}"  # sorts by time
        return cls(path, {"schema_version": SCHEMA_VERSION, "run_id": run_id, "sittings": []})

    @classmethod
    def resumed(cls, path: Path, source: Source, output: Path) -> RunRecord:
        """The record of the run that wrote `output`.

        Raises:
            UsageError: there is none, or what it collected is not `source`; both hashes are named.
        """
        record = cls(path, _read(path, output))
        before, now = record._content["digests"], source.digests()
        if before["input"] != now["input"]:
            raise UsageError(_changed(output, f"the input ({source.input})", before["input"], now["input"]))
        if before["config"] != now["config"]:
            difference = _difference(record._content["config"], source.config())
            raise UsageError(
                _changed(output, "the config or its overrides", before["config"], now["config"]) + difference
            )
        return record

    @property
    def run_id(self) -> str:
        return str(self._content["run_id"])

    def begin(self, source: Source, rollouts: int, command: list[str]) -> None:
        """Note that a sitting begins; `rollouts` are in the plan."""
        self._content |= {
            "input": str(source.input),
            "repeats": source.recipe.repeats,
            "limit": source.recipe.limit,
            "rollouts": rollouts,
            "digests": source.digests(),
            "config": source.config(),
            "versions": {"ngym": ngym.__version__, "python": platform.python_version()},
        }
        self._content["sittings"].append({"started_at": _now(), "pid": os.getpid(), "command": command})
        self._save()

    def end(self, status: str) -> None:
        """Note how the sitting ended."""
        self._content["sittings"][-1] |= {"ended_at": _now(), "status": status}
        self._save()

    def _save(self) -> None:
        write_whole(self._path, orjson.dumps(self._content, option=orjson.OPT_INDENT_2))


def _read(path: Path, output: Path) -> Json:
    try:
        content = orjson.loads(path.read_bytes())
        if {"run_id", "digests", "config", "sittings"} <= content.keys():
            return dict(content)
        problem = "is not a run's record"
    except FileNotFoundError:
        problem = "does not exist"
    except (OSError, orjson.JSONDecodeError, AttributeError) as error:
        problem = f"cannot be read ({error})"
    raise UsageError(f"{path} {problem}, so nobody can tell which run wrote {output}; {REMEDY}")


def _changed(output: Path, what: str, before: str, now: str) -> str:
    return f"{output}: {what} changed since this run began: sha256 {before} then, {now} now; restore it, {REMEDY}"


def _difference(before: Any, now: Any, path: str = "") -> str:
    """` (first difference: policy.model: 'a' then, 'b' now)`."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            if before.get(key) != now.get(key):
                return _difference(before.get(key), now.get(key), f"{path}.{key}".lstrip("."))
    return f" (first difference: {path}: {before!r:.80} then, {now!r:.80} now)"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
