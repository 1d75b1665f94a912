"""Options of logging: TensorBoard, W&B and MLflow, besides metrics.jsonl."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import Field, field_validator

from .base import Record

Value = TypeVar("Value")


class WandbOptions(Record):
    """Weights & Biases. project: where the run is listed. name: of the run; null: the output folder's. mode: offline runs are kept in the output folder, for `wandb sync`."""

    project: str
    name: str | None = None
    mode: Literal["online", "offline"] = "online"


class MlflowOptions(Record):
    """MLflow. experiment: where the run is listed. uri: of the tracking server or database, such as http://host:5000 or sqlite:///runs/mlflow.db. name: of the run; null: the output folder's."""

    uri: str
    experiment: str
    name: str | None = None


class LoggingOptions(Record):
    """Where the metrics go besides metrics.jsonl. tensorboard: true is `tensorboard` in the output folder."""

    tensorboard: bool | Path = Field(default=False, union_mode="left_to_right")
    wandb: WandbOptions | None = None
    mlflow: MlflowOptions | None = None

    @field_validator("tensorboard")
    @classmethod
    def _has_tensorboard(cls, value: bool | Path) -> bool | Path:
        return _with_package(value, "tensorboard")

    @field_validator("wandb")
    @classmethod
    def _has_wandb(cls, value: WandbOptions | None) -> WandbOptions | None:
        return _with_package(value, "wandb")

    @field_validator("mlflow")
    @classmethod
    def _has_mlflow(cls, value: MlflowOptions | None) -> MlflowOptions | None:
        return _with_package(value, "mlflow")


def _with_package(value: Value, package: str) -> Value:
    if value and find_spec(package) is None:
        raise ValueError(f"the package {package} is not installed; `pip install {package}`, or remove this")
    return value
