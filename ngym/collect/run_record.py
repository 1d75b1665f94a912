"""The settings of a collection, and their record beside the rows, which `--resume` compares.

The settings that decide a rollout and the bytes of the input must be those of the run's beginning.
"""

from __future__ import annotations

import hashlib
import os
import platform
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import orjson

from ngym.collect.plan import CollectionPlan, digest_of, title
from ngym.collect.rollout_rows import TokenFormat
from ngym.errors import UsageError
from ngym.files.atomic import write_whole
from ngym.option_names import another_output, option
from ngym.schema import SCHEMA_VERSION, Json

# The place of a service, which does not change its rollouts.
ADDRESS_KEYS = frozenset({"url", "urls", "host", "port", "replicas"})


@dataclass(frozen=True)
class CollectionSettings:
    """The settings that a resumed run must share.

    Attributes:
        input: the file of the tasks, or several.
        services: the resolved config, name -> stanza.
    """

    input: Path | tuple[Path, ...]
    recipe: CollectionPlan
    token_format: TokenFormat = "ng"
    services: Json = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[Path, ...]:
        return (self.input,) if isinstance(self.input, Path) else self.input

    @property
    def title(self) -> str:
        """The input in a message."""
        return title(self.inputs)

    def config(self) -> Json:
        """Everything except the row that decides a rollout; not repeats and limit, which only add rollouts."""
        recipe = asdict(self.recipe)
        stanzas = {
            name: {key: value for key, value in stanza.items() if key not in ADDRESS_KEYS}
            for name, stanza in self.services.items()
            if name != "ngym" and isinstance(stanza, dict)
        }
        own = {key: recipe[key] for key in ("agent", "params", "seed")}
        if recipe["agents"]:
            own["agents"] = dict(recipe["agents"])
        return {**own, "token_format": self.token_format, "services": stanzas}

    def digests(self) -> dict[str, str | None]:
        """`{"input": digest_of(inputs), "config": sha256 of config()}`."""
        return {"input": digest_of(self.inputs), "config": self.config_digest()}

    def config_digest(self) -> str:
        settings = orjson.dumps(self.config(), option=orjson.OPT_SORT_KEYS)
        return hashlib.sha256(settings).hexdigest()


class RunRecord:
    """`out_run.json`: the run's id, what it collects, and each session of it.

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
        return cls(path, {"schema_version": SCHEMA_VERSION, "run_id": run_id, "invocations": []})

    @classmethod
    def resume(cls, path: Path, source: CollectionSettings, output: Path) -> RunRecord:
        """The record of the run that wrote `output`.

        Raises:
            UsageError: there is no record, or its source differs; the message has both hashes.
        """
        record = cls(path, _read(path, output))
        before, config = record._content["digests"], source.config_digest()
        if before["config"] != config:
            difference = _difference(record._content["config"], source.config())
            raise UsageError(
                _changed_message(output, "the config or its overrides", before["config"], config) + difference
            )
        record.input_digest = digest_of(source.inputs)
        if before["input"] not in (None, record.input_digest):
            raise UsageError(
                _changed_message(output, f"the input ({source.title})", before["input"], record.input_digest)
            )
        return record

    @property
    def has_input_digest(self) -> bool:
        """Whether an earlier session has read the input to its end."""
        return self._content.get("digests", {}).get("input") is not None

    @property
    def run_id(self) -> str:
        return str(self._content["run_id"])

    def begin(self, source: CollectionSettings, rollouts: int, command: list[str]) -> None:
        """Note that a session begins; `rollouts` are in the plan."""
        self._content |= {
            "input": str(source.inputs[0]) if len(source.inputs) == 1 else list(map(str, source.inputs)),
            "repeats": source.recipe.repeats,
            "limit": source.recipe.limit,
            "rollouts": rollouts,
            "digests": {"input": self.input_digest, "config": source.config_digest()},
            "config": source.config(),
            "versions": {"ngym": version("ngym"), "python": platform.python_version()},
        }
        self._content["invocations"].append({"started_at": _now(), "pid": os.getpid(), "command": command})
        self._save()

    def learn(self, rollouts: int, input_digest: str | None) -> None:
        """Record the number of rollouts and the digest, which are known when the input is read to its end."""
        self.input_digest = input_digest
        self._content["rollouts"] = rollouts
        self._content["digests"]["input"] = input_digest
        self._save()

    def end(self, status: str) -> None:
        """Record how the session ended."""
        self._content["invocations"][-1] |= {"ended_at": _now(), "status": status}
        self._save()

    def _save(self) -> None:
        write_whole(self.path, orjson.dumps(self._content, option=orjson.OPT_INDENT_2))


def remedy() -> str:
    return f"{another_output()}, or start again with {option('overwrite', True)}"


def _read(path: Path, output: Path) -> Json:
    try:
        content = orjson.loads(path.read_bytes())
        if {"run_id", "digests", "config", "invocations"} <= content.keys():
            return dict(content)
        problem = "is not a run's record"
    except FileNotFoundError:
        problem = "does not exist"
    except (OSError, orjson.JSONDecodeError, AttributeError) as error:
        problem = f"cannot be read ({error})"
    raise UsageError(f"{path} {problem}, so the run that wrote {output} is unknown; {remedy()}")


def _changed_message(output: Path, what: str, before: str, now: str | None) -> str:
    return f"{output}: {what} changed since this run began: sha256 {before} then, {now} now; restore it, {remedy()}"


def _difference(before: Any, now: Any, path: str = "") -> str:
    """` (first difference: policy.model: 'a' then, 'b' now)`."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            if before.get(key) != now.get(key):
                return _difference(before.get(key), now.get(key), f"{path}.{key}".lstrip("."))
    return f" (first difference: {path}: {before!r:.80} then, {now!r:.80} now)"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
