"""The process of a remote sink (remote.py): holds one sink and executes the messages on its standard input."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from ngym.schema import Json

from ...recipe.recipe import MlflowOptions, WandbOptions
from .mlflow import Mlflow
from .wandb import Wandb


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
