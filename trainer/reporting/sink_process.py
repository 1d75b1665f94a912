"""The process of a remote sink (sinks.py): W&B or MLflow, on the messages of its standard input."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ngym.schema import Json

from ..recipe.recipe import MlflowOptions, WandbOptions

PARAMS_AT_ONCE = 100  # limit of the server
PARAM_CHARS = 500
FORBIDDEN = re.compile(r"[^\w\-. :/]")


class Mlflow:
    """The sink that `process` runs. output: the run's folder. recipe: becomes the run's parameters."""

    def __init__(self, options: MlflowOptions, output: Path, recipe: Json) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._client = MlflowClient(options.uri)
        known = self._client.get_experiment_by_name(options.experiment)
        experiment = known.experiment_id if known else self._client.create_experiment(options.experiment)
        self._run_id = self._client.create_run(experiment, run_name=options.name or output.name).info.run_id
        params = [Param(name, value[:PARAM_CHARS]) for name, value in _flat(recipe)]
        for start in range(0, len(params), PARAMS_AT_ONCE):
            self._client.log_batch(self._run_id, params=params[start : start + PARAMS_AT_ONCE])

    def write(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(_allowed(name), value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def _allowed(name: str) -> str:
    """The name with only the characters that MLflow accepts: avg@4 -> avg_at_4."""
    return FORBIDDEN.sub("_", name.replace("@", "_at_"))


def _flat(values: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Dotted key and value of every leaf."""
    parts = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else None
    if not parts:
        yield _allowed(path), str(values)
        return
    for key, value in parts:
        yield from _flat(value, f"{path}.{key}" if path else str(key))


class Wandb:
    """The sink that `process` runs. output: the run's folder. recipe: becomes the run's config."""

    def __init__(self, options: WandbOptions, output: Path, recipe: Json) -> None:
        import wandb

        self._run = wandb.init(
            project=options.project,
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


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # the packages' own output must not be taken for an answer
    sink: Wandb | Mlflow | None = None

    def begin(asked: Json) -> None:
        nonlocal sink
        sink = _sink(asked)

    def write(asked: Json) -> None:
        assert sink is not None
        sink.write(asked["step"], asked["values"])

    for line in sys.stdin.buffer:
        asked: Json = json.loads(line)
        answers.write(json.dumps(_problem(begin if "name" in asked else write, asked)).encode() + b"\n")
    if sink is not None:
        sink.close()


def _sink(asked: Json) -> Wandb | Mlflow:
    output, recipe = Path(asked["output"]), asked["recipe"]
    if asked["name"] == "wandb":
        return Wandb(WandbOptions(**asked["options"]), output, recipe)
    return Mlflow(MlflowOptions(**asked["options"]), output, recipe)


def _problem(do: Callable[[Json], None], asked: Json) -> str | None:
    """Call the sink; returns its error as an answer, or None."""
    try:
        do(asked)
    except Exception as error:  # noqa: BLE001
        text = str(error).strip().split("\n")[0]
        return f"{type(error).__name__}: {text}"
    return None
