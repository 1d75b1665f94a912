"""Views of rollouts, failed attempts and training metrics for notebooks: data frames and HTML."""

from __future__ import annotations

import html
import importlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import orjson

from ngym.convert import last_user_text
from ngym.did_you_mean import did_you_mean
from ngym.errors import UsageError, printable
from ngym.grading.answers import last_text
from ngym.plot.runs import METRICS, read_history
from ngym.rollout import headline, transcript, turns
from ngym.schema import Json, agent_name, trace_of
from ngym.stats import parts_of

if TYPE_CHECKING:
    import datasets  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import pandas  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import polars  # type: ignore[import-not-found, unused-ignore]

Kind = Literal["bool", "int", "float", "str", "json"]
"""json: lists and objects; pandas keeps them, elsewhere they are JSON text, because a column has one type."""
PANDAS: dict[Kind, str] = {"bool": "boolean", "int": "Int64", "float": "float64", "str": "string", "json": "object"}
POLARS: dict[Kind, str] = {"bool": "Boolean", "int": "Int64", "float": "Float64", "str": "String", "json": "String"}
DATASETS: dict[Kind, str] = {"bool": "bool", "int": "int64", "float": "float64", "str": "string", "json": "string"}
LARGEST = 2**63 - 1
KINDS: dict[str, Kind] = {
    "task_index": "int", "rollout_index": "int", "agent": "str", "reward": "float", "status": "str",
    "stop_reason": "str", "turns": "int", "tool_calls": "int", "tool_errors": "int", "input_tokens": "int",
    "output_tokens": "int", "queue_s": "float", "model_s": "float", "tools_s": "float", "verify_s": "float",
    "total_s": "float", "policy_version": "int", "asked": "str", "answered": "str", "task_id": "str",
    "rollout_id": "str", "run_id": "str", "started_at": "str",
}  # fmt: skip
FAILURE_COLUMNS: dict[str, Kind] = {
    "task_index": "int", "rollout_index": "int", "agent": "str", "attempt": "int", "class": "str", "stage": "str",
    "service": "str", "http_status": "int", "retryable": "bool", "message": "str", "asked": "str",
}  # fmt: skip
TRACE_FIELDS = (
    "status", "stop_reason", "turns", "tool_calls", "tool_errors", "task_id", "rollout_id", "run_id", "started_at",
)  # fmt: skip
RENAMED_FIELDS = frozenset({"reward", "reward_components", "agent_ref"})  # in columns with other names
OBJECT_FIELDS = frozenset({"responses_create_params", "response", "ng"})
ROW_OBJECTS = OBJECT_FIELDS | {"agent_ref"}
JSON_FIELDS = "_ng_json_fields"  # the row's own fields that are not text, also where their column is


class Column(NamedTuple):
    """values: None for records without this column."""

    name: str
    kind: Kind
    values: list[Any]


class Table:
    """Columns in order of appearance. known: columns with a fixed kind, which always exist."""

    def __init__(self, records: Iterable[Json], known: Mapping[str, Kind] | None = None) -> None:
        values: dict[str, list[Any]] = {name: [] for name in known or ()}
        count = 0
        for count, record in enumerate(records, 1):
            for name, value in record.items():
                column = values.setdefault(name, [])
                column.extend([None] * (count - 1 - len(column)))
                column.append(_plain(value))
        for column in values.values():
            column.extend([None] * (count - len(column)))
        self.columns = [_column(name, column, (known or {}).get(name)) for name, column in values.items()]

    def to_pandas(self) -> pandas.DataFrame:
        frames: Any = library("pandas")
        columns = {c.name: frames.Series(c.values, dtype=PANDAS[c.kind]) for c in self.columns}
        frame: pandas.DataFrame = frames.DataFrame(columns)
        return frame

    def to_polars(self) -> polars.DataFrame:
        frames: Any = library("polars")
        schema = {column.name: getattr(frames, POLARS[column.kind]) for column in self.columns}
        columns = {column.name: _flat(column) for column in self.columns}
        frame: polars.DataFrame = frames.DataFrame(columns, schema=schema)
        return frame

    def to_dataset(self, *, parsed: bool = False) -> datasets.Dataset:
        """parsed: lists and objects are such when a row is read, with the keys of their own row; else JSON text."""
        made: Any = library("datasets")
        parts = made.Json() if parsed else made.Value(DATASETS["json"])
        types = {kind: parts if kind == "json" else made.Value(name) for kind, name in DATASETS.items()}
        features = made.Features({column.name: types[column.kind] for column in self.columns})
        columns = {column.name: _flat(column) for column in self.columns}
        dataset: datasets.Dataset = made.Dataset.from_dict(columns, features=features)
        return dataset


def library(name: str) -> Any:
    """Import an optional package.

    Raises:
        UsageError: the package is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise UsageError(f"the package {name} is not installed; `pip install {name}`") from None


def _plain(value: Any) -> Any:
    """Python's number for a scalar of numpy, which would be text."""
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () else value


def _column(name: str, values: list[Any], kind: Kind | None) -> Column:
    kind = kind or _kind(values)
    if kind == "str":
        values = [value if value is None or isinstance(value, str) else _text(value) for value in values]
    elif kind == "float":
        values = [None if value is None else float(value) for value in values]
    return Column(name, kind, values)


def _kind(values: Iterable[Any]) -> Kind:
    """The narrowest kind of all values; text if they have several."""
    types = {type(value) for value in values if value is not None}
    if types == {bool}:
        return "bool"
    if types and types <= {int, float}:
        if any(isinstance(value, int) and abs(value) > LARGEST for value in values):
            return "str"
        return "int" if types == {int} else "float"
    return "json" if types and types <= {dict, list} else "str"


def _flat(column: Column) -> list[Any]:
    if column.kind != "json":
        return column.values
    return [None if value is None else _text(value) for value in column.values]


def _text(value: Any) -> str:
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY).decode()
    except TypeError:  # integers beyond 64 bits
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def slim(row: Json) -> Json:
    """A scored rollout as one flat record. policy_version: the newest. asked: the last user message of the prompt."""
    trace, usage = trace_of(row), row["response"].get("usage") or {}
    timings = trace.get("timings") or {}
    record = {
        **_identity(row),
        "reward": row["reward"],
        **{name: usage.get(name) for name in ("input_tokens", "output_tokens")},
        **{name: timings.get(name) for name in ("queue_s", "model_s", "tools_s", "verify_s", "total_s")},
        **{name: trace.get(name) for name in TRACE_FIELDS},
        "policy_version": max(trace.get("policy_version") or (), default=None),
        "answered": last_text(row["response"]),
        **dict(parts_of(row)),
    }
    for name, value in row.items():
        if not isinstance(value, dict | list) and not _is_elsewhere(name):
            record[_column_name(name)] = value
    return record


def full(row: Json) -> Json:
    """The record of `slim` with all other fields, lists and objects unchanged; `restore_row` is the inverse."""
    own = {name: value for name, value in row.items() if not _is_elsewhere(name)}
    columns = {_column_name(name): value for name, value in own.items() if isinstance(value, dict | list)}
    objects = {name: row.get(name) for name in sorted(OBJECT_FIELDS)}
    name = agent_name(row)
    reference = row["agent_ref"] if isinstance(row.get("agent_ref"), dict) else name and {"name": name}
    values = [name for name, value in own.items() if not isinstance(value, str)]
    return {**slim(row), **columns, **objects, "agent_ref": reference, JSON_FIELDS: values}


def restore_row(record: Mapping[str, Any]) -> Json:
    """The row of a record of `full`, from a table with nulls for absent fields, and with JSON text for values that are
    not text; any other row is unchanged, except that JSON text of the objects of a row is parsed.
    """
    row = {name: _parse_json(value) if name in ROW_OBJECTS else value for name, value in record.items()}
    values = _parse_json(row.pop(JSON_FIELDS, None))
    if values is None:
        return row
    fields = {name: value for name, value in row.items() if value is not None and not _is_derived(name)}
    fields |= {name: fields.pop(column) for name in KINDS if (column := _column_name(name)) in fields}
    fields |= {name: _parse_json(row.get(_column_name(name))) for name in values}
    indices = {f"_ng_{name}": row[name] for name in ("task_index", "rollout_index") if row.get(name) is not None}
    return {"reward": row.get("reward"), **fields, **indices}


def _parse_json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)  # also integers beyond 64 bits
    except ValueError:
        return value


def failure_record(row: Json) -> Json:
    """A failed attempt as one flat record."""
    return {**_identity(row), "attempt": row.get("attempt"), **row["failure"]}


def _identity(row: Json) -> Json:
    params: Any = row.get("responses_create_params") or {}
    return {
        "task_index": row.get("_ng_task_index"),
        "rollout_index": row.get("_ng_rollout_index"),
        "agent": agent_name(row),
        "asked": last_user_text(params.get("input") or ""),
    }


def _column_name(name: str) -> str:
    """The column of a row's field, with a prefix if it is the name of a fixed column."""
    return name if name not in KINDS else f"row.{name}"


def _is_derived(name: str) -> bool:
    """Whether a column of `full` is not a field of the row."""
    return name in KINDS or name.startswith("reward_components/")


def _is_elsewhere(name: str) -> bool:
    return name.startswith("_ng_") or name in RENAMED_FIELDS or name in OBJECT_FIELDS


CELL_CHARS = 120
CARD = "border-left:3px solid {colour};padding:2px 0 2px 10px;margin:6px 0"
BOX = "font-family:var(--jp-ui-font-family,system-ui,sans-serif);max-width:60em;line-height:1.4"
TEXT = "margin:0;white-space:pre-wrap;overflow-wrap:anywhere;font-family:inherit;background:none"
COLOURS = {"user": "#4a7fd6", "assistant": "#3a9a5c", "tool": "#c28a1e", "system": "#888", "reasoning": "#999"}
SHOWN_ROWS = 8


def escape_html(value: Any) -> str:
    """The value as HTML text."""
    return html.escape(printable(str(value)))


def conversation(row: Json) -> str:
    """A rollout as a conversation, with folded reasoning."""
    parts = "".join(_turn(who, text) for who, text in turns(row))
    return f'<div style="{BOX}"><strong>{escape_html(headline(row))}</strong>{parts}</div>'


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "") -> str:
    """An HTML table; None is an empty cell, long texts are cut."""
    head = "".join(f"<th>{escape_html(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    title = f"<div>{escape_html(caption)}</div>" if caption else ""
    return f'<div style="{BOX};max-width:100%">{title}<table><tr>{head}</tr>{body}</table></div>'


def shorten(text: str, chars: int = CELL_CHARS) -> str:
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
    return f'<td style="text-align:left">{escape_html(shorten(str(value)))}</td>'


def _turn(who: str, text: str) -> str:
    block = f'<pre style="{TEXT}">{escape_html(text)}</pre>'
    style = CARD.format(colour=COLOURS.get(who, "#888"))
    if who == "reasoning":
        return f'<details style="{style}"><summary>reasoning</summary>{block}</details>'
    return f'<div style="{style}"><small>{escape_html(who)}</small>{block}</div>'


class Failures(list[Json]):
    """Failed attempts, a row each."""

    def to_pandas(self) -> pandas.DataFrame:
        """Class, stage, service and message of each."""
        return self._table().to_pandas()

    def to_polars(self) -> polars.DataFrame:
        return self._table().to_polars()

    def _table(self) -> Table:
        return Table(map(failure_record, self), FAILURE_COLUMNS)

    def __repr__(self) -> str:
        return f"<{len(self):,} failed attempts>"

    def _repr_html_(self) -> str:
        records = [failure_record(row) for row in self[:SHOWN_ROWS]]
        names = ("task_index", "rollout_index", "attempt", "class", "service", "message")
        return table(names, [[record.get(name) for name in names] for record in records], repr(self)[1:-1])


class Transcript:
    """A rollout as a conversation."""

    def __init__(self, row: Json) -> None:
        self.row = row

    def __repr__(self) -> str:
        return transcript(self.row)

    def _repr_html_(self) -> str:
        return conversation(self.row)


REPR_METRICS = (
    "step",
    "reward/mean",
    "frac_unscored",
    "loss",
    "lag",
    "completions/mean_length",
    "tokens_per_s",
    "time/elapsed",
)
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
        names = [name for name in REPR_METRICS if name == "step" or name in self.names]
        rows = self[-SHOWN_STEPS:]
        more = f"; the last {len(rows)}:" if len(self) > len(rows) else ""
        return table(names, [[row.get(name) for name in names] for row in rows], repr(self)[1:-1] + more)


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
