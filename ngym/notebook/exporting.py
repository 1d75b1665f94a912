"""`ngym.export_rollouts`: converts rollouts to training rows, as a file, a sequence and a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngym.errors import UsageError
from ngym.export.exporter import export
from ngym.export.options import Format, Options, Strategy
from ngym.export.rollout_selection import ExportCounts
from ngym.notebook.arguments import INPUT, as_arguments, row_as_json
from ngym.notebook.collecting import rows_of
from ngym.notebook.frames import Table
from ngym.notebook.rollouts import FileRows, Folder
from ngym.option_names import python_option_names

if TYPE_CHECKING:
    import datasets  # type: ignore[import-not-found, import-untyped, unused-ignore]

Source = Any
"""A file, several, Rollouts, rows, or a data frame or dataset with all fields."""


class Exported(FileRows):
    """The rows of an export. path: their file. tally: the counts of kept and dropped rollouts."""

    def __init__(self, path: Path, tally: ExportCounts, format: Format, folder: Folder) -> None:
        super().__init__([path] if tally.rows else [])
        self.path = path
        self.tally = tally
        self._format = format
        self._folder = folder

    @property
    def dropped(self) -> dict[str, int]:
        """The number of dropped rollouts by reason, with the names of `ng_export --json`."""
        return {reason.value: count for reason, count in self.tally.dropped.items() if count}

    def to_dataset(self) -> datasets.Dataset:
        """For TRL and others: `SFTTrainer(train_dataset=exported.to_dataset(), ...)`."""
        if not len(self):
            raise UsageError(f"no rollout is left to export; left out: {self._reasons()}")
        # not from the file: a later file with the same name would hit its cache
        return Table(self).to_dataset(parsed=True)

    def __repr__(self) -> str:
        dropped = f"; left out: {self._reasons()}" if self.dropped else ""
        return f"<{len(self):,} {self._format} of {self.tally.read:,} rollouts{dropped}>"

    def _reasons(self) -> str:
        with python_option_names():
            return ", ".join(f"{count:,} {reason.text}" for reason, count in self.tally.dropped.items() if count)


def export_rollouts(
    source: Source,
    format: Format,
    output: str | Path | None = None,
    *,
    min_reward: float | None = None,
    best: int | None = None,
    pairs: Strategy | None = None,
    margin: float | None = None,
    max_pairs: int | None = None,
    dedupe: bool = False,
    keep_reasoning: bool = True,
    keep_truncated: bool = False,
    limit: int | None = None,
    seed: int = 0,
    overwrite: bool = False,
) -> Exported:
    """Turn scored rollouts into demonstrations, preferences, KTO or ShareGPT rows, or a filtered copy; docs/export.md has the rules.

        pairs = ngym.export_rollouts(rollouts, "preferences", margin=0.5)
        ngym.export_rollouts("out.jsonl", "demonstrations", "sft.jsonl", best=2, dedupe=True)

    Args:
        source: Rollouts, a file or several; rows, or a data frame or dataset with all fields (`full=True`).
        output: the file to write. None: a temporary one that lives as long as the result.

    Raises:
        UsageError: the options contradict each other, or the source has rows that are not rollouts.
    """
    folder = Folder()
    with as_arguments(folder.path, "source"):
        options = Options(
            format=format,
            inputs=_inputs(source, folder),
            output=Path(output) if output is not None else folder.path / f"{format}.jsonl",
            min_reward=min_reward,
            best=best,
            pairs=pairs,
            margin=margin,
            max_pairs=max_pairs,
            dedupe=dedupe,
            keep_reasoning=keep_reasoning,
            keep_truncated=keep_truncated,
            limit=limit,
            seed=seed,
            overwrite=overwrite,
        )
        return Exported(options.output, export(options, show=lambda line: None), format, folder)


def _inputs(source: Source, folder: Folder) -> tuple[Path, ...]:
    if isinstance(source, str | Path):
        return (Path(source),)
    if isinstance(source, list | tuple):
        if not source:
            raise UsageError("source is empty; give rollouts, or a file of them")
        if all(isinstance(each, str | Path) for each in source):
            return tuple(map(Path, source))
    path = folder.path / INPUT
    with path.open("wb") as file:
        for number, row in enumerate(rows_of(source, "a rollout's row", "source")):
            file.write(row_as_json(row, number) + b"\n")
    return (path,)
