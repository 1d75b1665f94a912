"""Records -> a table of typed columns -> a data frame of pandas or polars, or a dataset of `datasets`; none of them is needed before."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import orjson

from ngym.errors import UsageError
from ngym.schema import Json

if TYPE_CHECKING:
    import datasets  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import pandas  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import polars  # type: ignore[import-not-found, unused-ignore]

Kind = Literal["bool", "int", "float", "str", "json"]
"""json: lists and objects; in pandas they stay what they are, elsewhere they are JSON text, because a column has one type."""

PANDAS: dict[Kind, str] = {"bool": "boolean", "int": "Int64", "float": "float64", "str": "string", "json": "object"}
POLARS: dict[Kind, str] = {"bool": "Boolean", "int": "Int64", "float": "Float64", "str": "String", "json": "String"}
DATASETS: dict[Kind, str] = {"bool": "bool", "int": "int64", "float": "float64", "str": "string", "json": "string"}
LARGEST = 2**63 - 1


class Column(NamedTuple):
    """values: None where a record has none."""

    name: str
    kind: Kind
    values: list[Any]


class Table:
    """Columns in order of appearance. known: the kinds of columns that have one whatever the records hold."""

    def __init__(self, records: Iterable[Json], known: Mapping[str, Kind] | None = None) -> None:
        values: dict[str, list[Any]] = {name: [] for name in known or ()}
        count = 0
        for count, record in enumerate(records, 1):
            for name, value in record.items():
                column = values.setdefault(name, [])
                column.extend([None] * (count - 1 - len(column)))
                column.append(value)
        for column in values.values():
            column.extend([None] * (count - len(column)))
        self.columns = [_column(name, column, (known or {}).get(name)) for name, column in values.items()]

    def to_pandas(self) -> pandas.DataFrame:
        frames: Any = library("pandas")
        columns = {c.name: frames.Series(c.values, dtype=PANDAS[c.kind]) for c in self.columns}
        found: pandas.DataFrame = frames.DataFrame(columns)
        return found

    def to_polars(self) -> polars.DataFrame:
        frames: Any = library("polars")
        schema = {column.name: getattr(frames, POLARS[column.kind]) for column in self.columns}
        columns = {column.name: _flat(column) for column in self.columns}
        found: polars.DataFrame = frames.DataFrame(columns, schema=schema)
        return found

    def to_dataset(self) -> datasets.Dataset:
        made: Any = library("datasets")
        features = made.Features({column.name: made.Value(DATASETS[column.kind]) for column in self.columns})
        columns = {column.name: _flat(column) for column in self.columns}
        found: datasets.Dataset = made.Dataset.from_dict(columns, features=features)
        return found


def library(name: str) -> Any:
    """An optional package, imported.

    Raises:
        UsageError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise UsageError(f"the package {name} is not installed; `pip install {name}`") from None


def _column(name: str, values: list[Any], kind: Kind | None) -> Column:
    kind = kind or _kind(values)
    if kind == "str":
        values = [value if value is None or isinstance(value, str) else _text(value) for value in values]
    elif kind == "float":
        values = [None if value is None else float(value) for value in values]
    return Column(name, kind, values)


def _kind(values: Iterable[Any]) -> Kind:
    """The narrowest kind that all values have; text, where they are of several."""
    types = {type(value) for value in values if value is not None}
    if types == {bool}:
        return "bool"
    if types == {int}:
        return "int" if all(value is None or abs(value) <= LARGEST for value in values) else "str"
    if types and types <= {int, float}:
        return "float"
    return "json" if types and types <= {dict, list} else "str"


def _flat(column: Column) -> list[Any]:
    if column.kind != "json":
        return column.values
    return [None if value is None else _text(value) for value in column.values]


def _text(value: Any) -> str:
    return orjson.dumps(value).decode()
