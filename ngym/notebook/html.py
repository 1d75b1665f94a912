"""What a notebook shows: tables and conversations. Whatever they hold is escaped, with control characters made visible."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

from ngym.rollout.transcript import headline, printable, turns
from ngym.schema import Json

CELL_CHARS = 120
CARD = "border-left:3px solid {colour};padding:2px 0 2px 10px;margin:6px 0"
BOX = "font-family:var(--jp-ui-font-family,system-ui,sans-serif);max-width:60em;line-height:1.4"
TEXT = "margin:0;white-space:pre-wrap;overflow-wrap:anywhere;font-family:inherit;background:none"
COLOURS = {"user": "#4a7fd6", "assistant": "#3a9a5c", "tool": "#c28a1e", "system": "#888", "reasoning": "#999"}


def escaped(value: Any) -> str:
    """As text between tags."""
    return html.escape(printable(str(value)))


def conversation(row: Json) -> str:
    """A rollout: what was said by whom, reasoning folded."""
    parts = "".join(_turn(who, text) for who, text in turns(row))
    return f'<div style="{BOX}"><strong>{escaped(headline(row))}</strong>{parts}</div>'


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "") -> str:
    """None is an empty cell; a long text is cut."""
    head = "".join(f"<th>{escaped(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    title = f"<div>{escaped(caption)}</div>" if caption else ""
    return f'<div style="{BOX};max-width:100%">{title}<table><tr>{head}</tr>{body}</table></div>'


def shortened(text: str, chars: int = CELL_CHARS) -> str:
    """In one line."""
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
