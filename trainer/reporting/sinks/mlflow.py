"""MLflow: a run of an experiment, on a tracking server or in a database."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ngym.schema import Json

from ...recipe.recipe import MlflowOptions

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
