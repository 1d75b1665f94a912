"""The summary that `ng_train --json` prints at the end: the paths of the results and the final metrics."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from ngym.files import jsonl
from ngym.schema import Json

from .output_files import METRICS, POLICY
from .sweep import read


def of_run(output: Path) -> Json:
    """last: the last entry of its metrics; {} if there is none."""
    entries = (line.row for line in jsonl.read(output / METRICS) if line.problem is None)
    last = deque(entries, maxlen=1)
    files = {"policy": str(output / POLICY), "metrics": str(output / METRICS)}
    return {"output": str(output), **files, "last": last[0] if last else {}}


def of_sweep(folder: Path) -> Json:
    return {"output": str(folder), "runs": [outcome._asdict() for outcome in read(folder).values()]}
