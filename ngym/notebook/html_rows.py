"""Single rollouts and failed attempts, as a notebook shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ngym.notebook import html
from ngym.notebook.columns import OF_FAILURES, failed
from ngym.notebook.frames import Table
from ngym.rollout.transcript import transcript
from ngym.schema import Json

if TYPE_CHECKING:
    import pandas  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import polars  # type: ignore[import-not-found, unused-ignore]

SHOWN_ROWS = 8


class Failures(list[Json]):
    """Failed attempts, a row each."""

    def to_pandas(self) -> pandas.DataFrame:
        """Class, stage, service and message of each."""
        return self._table().to_pandas()

    def to_polars(self) -> polars.DataFrame:
        return self._table().to_polars()

    def _table(self) -> Table:
        return Table(map(failed, self), OF_FAILURES)

    def __repr__(self) -> str:
        return f"<{len(self):,} failed attempts>"

    def _repr_html_(self) -> str:
        shown = [failed(row) for row in self[:SHOWN_ROWS]]
        names = ("task_index", "rollout_index", "attempt", "class", "service", "message")
        return html.table(names, [[record.get(name) for name in names] for record in shown], repr(self)[1:-1])


class Transcript:
    """A rollout as a conversation."""

    def __init__(self, row: Json) -> None:
        self.row = row

    def __repr__(self) -> str:
        return transcript(self.row)

    def _repr_html_(self) -> str:
        return html.conversation(self.row)
