"""`ngym.training_metrics`: the metrics of a finished or running training run, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ngym.did_you_mean import did_you_mean
from ngym.errors import UsageError
from ngym.notebook.frames import Table, table
from ngym.plot.runs import METRICS, read_history
from ngym.schema import Json

if TYPE_CHECKING:
    import pandas  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import polars  # type: ignore[import-not-found, unused-ignore]

FEW = ("step", "reward/mean", "frac_unscored", "loss", "lag", "completions/mean_length", "tokens_per_s", "time/elapsed")
SHOWN_STEPS = 8


class TrainingMetrics(list[Json]):
    """A row for each step: its metrics, including evaluations after it (`eval/...`, `val/...`)."""

    def __init__(self, rows: list[Json], path: Path) -> None:
        super().__init__(rows)
        self.path = path

    @property
    def names(self) -> list[str]:
        """The names of all metrics, in alphabetical order."""
        return sorted({name for row in self for name in row} - {"step"})

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """The steps and values of a metric, for a plot: `plt.plot(*metrics.curve("reward/mean"))`.

        Raises:
            UsageError: no step has it.
        """
        points = [(row["step"], row[name]) for row in self if row.get(name) is not None]
        if not points:
            raise UsageError(f"{self.path}: no metric {name!r}{did_you_mean(name, self.names)}")
        return [step for step, _ in points], [value for _, value in points]

    def to_pandas(self) -> pandas.DataFrame:
        """A column for each metric, the step as the index."""
        return Table(self, {"step": "int"}).to_pandas().set_index("step")

    def to_polars(self) -> polars.DataFrame:
        return Table(self, {"step": "int"}).to_polars()

    def __repr__(self) -> str:
        steps = f"{len(self):,} steps, {len(self.names):,} metrics; {self.path}"
        return f"<{steps}>"

    def _repr_html_(self) -> str:
        names = [name for name in FEW if name == "step" or name in self.names]
        shown = self[-SHOWN_STEPS:]
        more = f"; the last {len(shown)}:" if len(self) > len(shown) else ""
        return table(names, [[row.get(name) for name in names] for row in shown], repr(self)[1:-1] + more)


def training_metrics(run: str | Path) -> TrainingMetrics:
    """The metrics of a run, from its folder or its metrics.jsonl. Call it again for newer steps.

    Steps that a resumed run repeated have their last values.

        metrics = ngym.training_metrics("runs/grpo")
        metrics.to_pandas()["reward/mean"].plot()

    Raises:
        UsageError: the run has no metrics.
    """
    path = Path(run)
    path = path / METRICS if path.is_dir() else path
    if not path.is_file():
        raise UsageError(f"{path}: no such file; name the output folder of an ng_train that has begun")
    return TrainingMetrics(read_history(path).rows(), path)
