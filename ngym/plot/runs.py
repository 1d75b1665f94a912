"""Which runs are drawn, what are they called, and which of them differ in nothing but their seed?"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ngym.errors import UsageError
from ngym.plot.history import History, metrics_file, read_history
from ngym.schema import Json

RECIPE = "recipe.yaml"
SEED, OWN = "seed", {"seed", "output"}


class Recipe(NamedTuple):
    """A run's recipe as it was resolved. values: by dotted keys; lists stay whole. text: as it is written."""

    values: Json
    text: str


@dataclass(frozen=True)
class Run:
    """name: short, and no other run's. recipe: {} of a bare file of metrics."""

    name: str
    history: History
    recipe: Json


def read_runs(places: Sequence[Path]) -> list[Run]:
    """The runs in these folders or files of metrics.

    Raises:
        UsageError: there is none in one of them, or its metrics or recipe cannot be read.
    """
    files = list(dict.fromkeys(metrics_file(place) for place in places))
    recipes = [file.with_name(RECIPE) for file in files]
    return [
        Run(name, read_history(file), read_recipe(recipe).values if recipe.is_file() else {})
        for name, file, recipe in zip(distinct(files), files, recipes, strict=True)
    ]


def read_recipe(file: Path) -> Recipe:
    """
    Raises:
        UsageError: it is no YAML.
    """
    try:
        text = file.read_text(encoding="utf-8")
        values = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{file}: no recipe as ng_train writes it: {' '.join(str(error).split())}") from None
    return Recipe(flat(values) if isinstance(values, dict) else {}, text)


def flat(values: Mapping[str, Any], prefix: str = "") -> Json:
    """`{"engine": {"zero_stage": 2}}` as `{"engine.zero_stage": 2}`."""
    found: Json = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return found


def distinct(files: Sequence[Path]) -> list[str]:
    """A name for each file: its folder's, with so many folders above it that no two are the same."""
    parts = [file.resolve().parent.parts for file in files]
    deepest = max((len(one) for one in parts), default=1)
    for depth in range(1, deepest + 1):
        names = ["/".join(one[-depth:]) for one in parts]
        if len(set(names)) == len(names):
            return names
    return [str(file) for file in files]


def by_seed(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs that differ in nothing but their seed, by a common name.

    Two recipes do so if they are the same without `seed` and `output`, where texts that differ, such as a `model.path`, are
    compared without the seed's number. Runs without a recipe do so if their names are the same up to a number at the end.
    """
    groups: list[list[Run]] = []
    for run in runs:
        alike = next((group for group in groups if all(_same_but_seed(run, other) for other in group)), None)
        if alike is None:
            groups.append([run])
        else:
            alike.append(run)
    names = [_common(group) for group in groups]
    return {
        name if names.count(name) == 1 else ", ".join(run.name for run in group): group
        for name, group in zip(names, groups, strict=True)
    }


def _same_but_seed(one: Run, other: Run) -> bool:
    if not (one.recipe and other.recipe):
        return one.recipe == other.recipe and _unnumbered(one.name) == _unnumbered(other.name)
    keys = one.recipe.keys() - OWN
    return keys == other.recipe.keys() - OWN and all(
        one.recipe[key] == other.recipe[key] or _unseeded(one.recipe, key) == _unseeded(other.recipe, key)
        for key in keys
    )


def _unnumbered(name: str) -> str:
    return re.sub(r"\d+$", "", name)


def _unseeded(recipe: Json, key: str) -> Any:
    value = recipe[key]
    return re.sub(rf"(?<!\d){re.escape(str(recipe.get(SEED)))}(?!\d)", "#", value) if isinstance(value, str) else value


def _common(group: Sequence[Run]) -> str:
    if len(group) == 1:
        return group[0].name
    first, *others = (run.name for run in group)
    length = next(
        (place for place, letter in enumerate(first) if any(name[place : place + 1] != letter for name in others)),
        len(first),
    )
    stem = re.sub(r"[\W_]*(seed)?[\W_]*$", "", first[:length]) or first
    return f"{stem} ({len(group)} seeds)"
