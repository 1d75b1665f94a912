"""Weights & Biases: a run of a project, online or kept in the output folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ngym.schema import Json

from ...recipe.recipe import WandbOptions


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
