"""The training recipe: every key that `ng_train` takes, and the recipes that ship."""

from __future__ import annotations

from typing import get_args

import yaml
from pydantic import BaseModel

from ngym.trainer.recipe import algorithms
from ngym.trainer.recipe import recipe as config

from .fields import Key, docstring_summary, keys, keys_table
from .markup import fence, words
from .specimen import ROOT, Specimen

INTRO = """\
# Recipes

Every key of a training recipe, read from the models that check it. A key that is not here is refused, with its line and the
nearest name. How training works: [training](../training.md); what the algorithms compute: [algorithms](../algorithms.md).
"""


def text(specimen: Specimen) -> str:
    recipe: type[BaseModel] = config.Recipe
    plain, sections = [], []
    for name, field in recipe.model_fields.items():
        model = _model(field.annotation)
        if name == "algorithm":
            base = algorithms.GrpoOptions
            sections += [_algorithm(key, options, base) for key, options in algorithms.ALGORITHMS.items()]
        elif model is None:
            plain.append(next(key for key in keys(recipe) if key.name == name))
        else:
            sections.append(_section(name, model, field.description or ""))
    return "\n".join([INTRO, "## The run {#run}\n", keys_table(plain), *sections, _shipped()])


def _model(kind: object) -> type[BaseModel] | None:
    inside = [each for each in (kind, *get_args(kind)) if isinstance(each, type) and issubclass(each, BaseModel)]
    return inside[0] if len(inside) == 1 else None


def _algorithm(name: str, options: type[BaseModel], base: type[BaseModel]) -> str:
    """base: the options whose keys others have, too, with defaults of their own."""
    if options is not base and issubclass(options, base.__bases__[0]):
        further = options.model_fields.keys() - base.model_fields.keys()
        own = [key for key in keys(options, "algorithm.") if key.name.split(".")[1] in further]
        shown = f"Its own keys:\n\n{keys_table(own)}" if own else _setting(options, base)
        return f"## algorithm: {name} {{#{name}}}\n\n{words(docstring_summary(options))}\n\n{shown}"
    found = [key if key.name != "algorithm.name" else _named(key, name) for key in keys(options, "algorithm.")]
    return f"## algorithm: {name} {{#{name}}}\n\n{words(docstring_summary(options))}\n\n{keys_table(found)}"


def _setting(options: type[BaseModel], base: type[BaseModel]) -> str:
    own = {
        name: field.default.model_dump(exclude_unset=True)
        for name, field in options.model_fields.items()
        if name != "name" and field.default != base.model_fields[name].default
    }
    shown = fence("yaml", yaml.safe_dump({"algorithm": own}, sort_keys=False))
    return f"The keys are those of [grpo](#grpo). Its own defaults:\n\n{shown}"


def _named(key: Key, name: str) -> Key:
    return Key(key.name, f"`{name}`", key.default, "Which algorithm.")


def _section(name: str, model: type[BaseModel], what: str) -> str:
    return f"## {name} {{#{name}}}\n\n{words(' '.join([what, docstring_summary(model)]))}\n\n{keys_table(list(keys(model, f'{name}.')))}"


def _shipped() -> str:
    files = sorted((ROOT / "trainer" / "recipes").glob("*.yaml"))
    parts = ["## The recipes that ship {#shipped}\n", "`ng_train NAME.yaml` finds them from any folder.\n"]
    for file in files:
        parts += [f"### {file.name} {{#{file.stem}-yaml}}\n", fence("yaml", file.read_text(encoding="utf-8"))]
    return "\n".join(parts)
