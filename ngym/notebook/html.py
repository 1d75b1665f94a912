"""HTML views of rollouts for notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ngym.notebook.frames import OF_FAILURES, Table, failed
from ngym.rollout import headline, printable, transcript, turns
from ngym.schema import Json

if TYPE_CHECKING:
    import pandas  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import polars  # type: ignore[import-not-found, unused-ignore]


CELL_CHARS = 120
CARD = "border-left:3px solid {colour};padding:2px 0 2px 10px;margin:6px 0"
BOX = "font-family:var(--jp-ui-font-family,system-ui,sans-serif);max-width:60em;line-height:1.4"
TEXT = "margin:0;white-space:pre-wrap;overflow-wrap:anywhere;font-family:inherit;background:none"
COLOURS = {"user": "#4a7fd6", "assistant": "#3a9a5c", "tool": "#c28a1e", "system": "#888", "reasoning": "#999"}
SHOWN_ROWS = 8


def escaped(value: Any) -> str:
    """The value as HTML text."""
    return html.escape(printable(str(value)))


def conversation(row: Json) -> str:
    """A rollout as a conversation, with folded reasoning."""
    parts = "".join(_turn(who, text) for who, text in turns(row))
    return f'<div style="{BOX}"><strong>{escaped(headline(row))}</strong>{parts}</div>'


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "") -> str:
    """An HTML table; None is an empty cell, long texts are cut."""
    head = "".join(f"<th>{escaped(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    title = f"<div>{escaped(caption)}</div>" if caption else ""
    return f'<div style="{BOX};max-width:100%">{title}<table><tr>{head}</tr>{body}</table></div>'


def shortened(text: str, chars: int = CELL_CHARS) -> str:
    """The text in one line, cut to `chars` characters."""
    line = " ".join(text.split())
    return line if len(line) <= chars else f"{line[: chars - 1]}…"


def _cell(value: Any) -> str:
    if value is None:
        return "<td></td>"
    if isinstance(value, float):
        return f"<td>{value:.4g}</td>"
    if isinstance(value, int):
        return f"<td>{value:,}</td>"
    return f'<td style="text-align:left">{escaped(shortened(str(value)))}</td>'


def _turn(who: str, text: str) -> str:
    said = f'<pre style="{TEXT}">{escaped(text)}</pre>'
    style = CARD.format(colour=COLOURS.get(who, "#888"))
    if who == "reasoning":
        return f'<details style="{style}"><summary>reasoning</summary>{said}</details>'
    return f'<div style="{style}"><small>{escaped(who)}</small>{said}</div>'


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
        return table(names, [[record.get(name) for name in names] for record in shown], repr(self)[1:-1])


class Transcript:
    """A rollout as a conversation."""

    def __init__(self, row: Json) -> None:
        self.row = row

    def __repr__(self) -> str:
        return transcript(self.row)

    def _repr_html_(self) -> str:
        return conversation(self.row)
