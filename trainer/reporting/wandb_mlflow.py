"""The process of a remote sink (sinks.py): W&B or MLflow, on the messages of its standard input."""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ngym.files.atomic import write_whole
from ngym.schema import Json
from ngym.telemetry.log_format import redact

from ..recipe.recipe import SWEEP, MlflowOptions, WandbOptions, run_file

PARAMS_AT_ONCE = 100  # limit of the server
PARAM_CHARS = 500
PARENT = "mlflow.parentRunId"  # the tag by which MLflow shows runs below another
FORBIDDEN = re.compile(r"[^\w\-. :/]")


class Mlflow:
    """The sink that `process` runs. output: the run's folder. recipe: becomes the run's parameters."""

    def __init__(self, options: MlflowOptions, output: Path, recipe: Json) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._client = MlflowClient(options.uri)
        stored = self._client.get_experiment_by_name(options.experiment)
        experiment = stored.experiment_id if stored else self._client.create_experiment(options.experiment)
        target = {"uri": options.uri, "experiment": options.experiment}

        def parent() -> str:
            run_id: str = self._client.create_run(experiment, run_name=Path(os.environ[SWEEP]).name).info.run_id
            self._client.set_terminated(run_id)
            return run_id

        def create() -> str:
            sweep = os.environ.get(SWEEP)
            tags = {PARENT: _run_id(Path(sweep), "mlflow", target, parent)[0]} if sweep else None
            return str(self._client.create_run(experiment, tags=tags, run_name=options.name or output.name).info.run_id)

        self._run_id, is_resumed = _run_id(output, "mlflow", target, create)
        if is_resumed:
            self._client.update_run(self._run_id, status="RUNNING")
            return  # it has the parameters, and MLflow refuses to change one
        params = [Param(name, value[:PARAM_CHARS]) for name, value in _flatten(recipe)]
        for start in range(0, len(params), PARAMS_AT_ONCE):
            self._client.log_batch(self._run_id, params=params[start : start + PARAMS_AT_ONCE])

    def write(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(_sanitize(name), value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def _sanitize(name: str) -> str:
    """The name with only the characters that MLflow accepts: avg@4 -> avg_at_4."""
    return FORBIDDEN.sub("_", name.replace("@", "_at_"))


def _flatten(values: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Dotted key and value of every leaf."""
    parts = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else None
    if not parts:
        yield _sanitize(path), str(values)
        return
    for key, value in parts:
        yield from _flatten(value, f"{path}.{key}" if path else str(key))


class Wandb:
    """The sink that `process` runs. output: the run's folder. recipe: becomes the run's config."""

    def __init__(self, options: WandbOptions, output: Path, recipe: Json) -> None:
        import wandb

        run_id, _ = _run_id(output, "wandb", {"project": options.project}, lambda: secrets.token_hex(4))
        sweep = os.environ.get(SWEEP)
        self._run = wandb.init(
            id=run_id,
            resume="allow",
            project=options.project,
            group=Path(sweep).name if sweep else None,
            name=options.name or output.name,
            mode=options.mode,
            dir=output,
            config=recipe,
            settings=wandb.Settings(console="off", silent=True),
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _run_id(folder: Path, name: str, target: Json, create: Callable[[], str]) -> tuple[str, bool]:
    """The id of the folder's run in this sink, and whether an earlier process created it.

    target: an id that belongs to another project or server is not used. Passwords in it are not written.
    """
    target = redact(target)
    file = run_file(folder, name)
    record: Json = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    if record and record == {"id": record["id"], **target}:
        return record["id"], True
    run_id = create()
    write_whole(file, json.dumps({"id": run_id, **target}).encode())
    return run_id, False


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # the packages' own output must not be taken for an answer
    sink: Wandb | Mlflow | None = None

    def begin(request: Json) -> None:
        nonlocal sink
        sink = _sink(request)

    def write(request: Json) -> None:
        assert sink is not None
        sink.write(request["step"], request["values"])

    for line in sys.stdin.buffer:
        request: Json = json.loads(line)
        answers.write(json.dumps(_error_of(begin if "name" in request else write, request)).encode() + b"\n")
    if sink is not None:
        sink.close()


def _sink(request: Json) -> Wandb | Mlflow:
    output, recipe = Path(request["output"]), request["recipe"]
    if request["name"] == "wandb":
        return Wandb(WandbOptions(**request["options"]), output, recipe)
    return Mlflow(MlflowOptions(**request["options"]), output, recipe)


def _error_of(do: Callable[[Json], None], request: Json) -> str | None:
    """Call the sink; returns its error as an answer, or None."""
    try:
        do(request)
    except Exception as error:  # noqa: BLE001
        text = str(error).strip().split("\n")[0]
        return f"{type(error).__name__}: {text}"
    return None
