"""`out_run.json`: the identity of a run, and the digests that decide whether it may be resumed."""

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
from ngym.collect.inputs import digest_of
from ngym.collect.plan import Recipe
from ngym.collect.rollout_rows import TokenFormat
from ngym.errors import UsageError
from ngym.files.jsonl import write_whole
from ngym.schema import SCHEMA_VERSION, Json

PLACES = frozenset(
    {"url", "urls", "host", "port", "replicas"}
)  # the place of a service, which does not change its rollouts
REMEDY = "choose another --output, or start again with --overwrite"


@dataclass(frozen=True)
class Source:
    """The settings that a resumed run must share. services: the resolved config, name -> stanza."""

    input: Path
    recipe: Recipe
    token_format: TokenFormat = "ng"
    services: Json = field(default_factory=dict)

    def config(self) -> Json:
        """Everything except the row that decides a rollout; not repeats and limit, which only add rollouts."""
        recipe = asdict(self.recipe)
        stanzas = {
            name: {key: value for key, value in stanza.items() if key not in PLACES}
            for name, stanza in self.services.items()
            if name != "ngym" and isinstance(stanza, dict)
        }
        own = {key: recipe[key] for key in ("agent", "params", "seed")}
        return {**own, "token_format": self.token_format, "services": stanzas}

    def digests(self) -> dict[str, str | None]:
        """`{"input": sha256 of the file, "config": sha256 of config()}`."""
        return {"input": digest_of(self.input), "config": self.config_digest()}

    def config_digest(self) -> str:
        settings = orjson.dumps(self.config(), option=orjson.OPT_SORT_KEYS)
        return hashlib.sha256(settings).hexdigest()


class RunRecord:
    """`out_run.json`: the run's id, what it collects, and each sitting of it.

    path: of the file; it changes when a new run takes the place of an old one.
    input_digest: sha256 of the input; None until a new run has read its input to the end. A run that was interrupted before
    that is resumed without it: its rows name their tasks.
    """

    def __init__(self, path: Path, content: Json, input_digest: str | None = None) -> None:
        self.path = path
        self.input_digest = input_digest
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
            UsageError: there is no record, or its source differs; the message has both hashes.
        """
        record = cls(path, _read(path, output))
        before, config = record._content["digests"], source.config_digest()
        if before["config"] != config:
            difference = _difference(record._content["config"], source.config())
            raise UsageError(_changed(output, "the config or its overrides", before["config"], config) + difference)
        record.input_digest = digest_of(source.input)
        if before["input"] not in (None, record.input_digest):
            raise UsageError(_changed(output, f"the input ({source.input})", before["input"], record.input_digest))
        return record

    @property
    def knows_its_input(self) -> bool:
        """Whether an earlier sitting has read the input to its end."""
        return self._content.get("digests", {}).get("input") is not None

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
            "digests": {"input": self.input_digest, "config": source.config_digest()},
            "config": source.config(),
            "versions": {"ngym": ngym.__version__, "python": platform.python_version()},
        }
        self._content["sittings"].append({"started_at": _now(), "pid": os.getpid(), "command": command})
        self._save()

    def learn(self, rollouts: int, input_digest: str | None) -> None:
        """Record the number of rollouts and the digest, which are known when the input is read to its end."""
        self.input_digest = input_digest
        self._content["rollouts"] = rollouts
        self._content["digests"]["input"] = input_digest
        self._save()

    def end(self, status: str) -> None:
        """Record how the sitting ended."""
        self._content["sittings"][-1] |= {"ended_at": _now(), "status": status}
        self._save()

    def _save(self) -> None:
        write_whole(self.path, orjson.dumps(self._content, option=orjson.OPT_INDENT_2))


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
    raise UsageError(f"{path} {problem}, so the run that wrote {output} is unknown; {REMEDY}")


def _changed(output: Path, what: str, before: str, now: str | None) -> str:
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
