"""`ngym.load_rollouts`: files of rollouts, by name or by pattern; a row is read when it is looked at."""

from __future__ import annotations

from glob import glob
from pathlib import Path

from ngym.errors import UsageError
from ngym.notebook.rollouts import Rollouts
from ngym.notebook.rows import FileRows
from ngym.schema import Json

BESIDE = ("_failures.jsonl", "_materialized_inputs.jsonl")  # of a collection, and no rollouts


def load_rollouts(*sources: str | Path) -> Rollouts:
    """The rollouts of one or several files; a pattern such as `runs/*/out.jsonl` names several. A row is read when it is looked at.

        rollouts = ngym.load_rollouts("out.jsonl")
        rollouts.worst(3).show(0)

    Raises:
        UsageError: there is no such file, or its first row is no rollout.
    """
    paths = [path for source in sources for path in _named(str(source))]
    if not paths:
        raise UsageError("load_rollouts: name a file that ng_collect_rollouts wrote")
    for path in paths:
        rows = iter(FileRows([path]))
        first = next(rows, None)
        if first is not None:
            _check(first, path)
    return Rollouts(FileRows(paths), paths=paths)


def _named(source: str) -> list[Path]:
    if Path(source).is_file():
        return [Path(source)]
    found = sorted(glob(source, recursive=True))
    if not found:
        raise UsageError(f"{source}: no such file")
    return [Path(path) for path in found if not path.endswith(BESIDE)]


def _check(row: Json, path: Path) -> None:
    if not isinstance(row.get("response"), dict) or "reward" not in row:
        other = "is a failed attempt" if "failure" in row else "has no response and reward"
        raise UsageError(f"{path}: its first row {other}; ng_collect_rollouts writes rollouts")
