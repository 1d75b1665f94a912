"""Every option of a config or recipe has a `Field(description=...)`, from which the reference is made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from paths import ROOT
from pydantic import BaseModel

from ngym.config.service_config import Settings, Stanza
from ngym.errors import ConfigError
from ngym.services import AgentOptions, ServiceOptions
from ngym.services.base.app import load
from ngym.services.models.server import ModelOptions
from ngym.trainer.recipe.algorithms import ALGORITHMS
from ngym.trainer.recipe.recipe import Recipe

NOT_WRITTEN = {"Stanza": {"name", "options", "where", "key_where"}}  # filled in by ngym
RECORDS = [Settings, Stanza, ServiceOptions, AgentOptions, ModelOptions, Recipe, *ALGORITHMS.values()]
SERVICES = sorted(
    file.relative_to(ROOT) for kind in ("gym_servers", "agents", "models") for file in ROOT.glob(f"{kind}/*/app.py")
)


def models_in(kind: Any) -> list[type[BaseModel]]:
    """The records in a type, also inside unions, lists and annotations."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [model for part in get_args(kind) for model in models_in(part)]


def undescribed(model: type[BaseModel]) -> Iterator[str]:
    """The options without a description, also of the records inside.

    A subclass that only changes a default keeps the description of its base class. A group of keys, such as
    `optimizer`, is described by the docstring of its record.
    """
    for name, field in model.model_fields.items():
        inside = models_in(field.annotation)
        bases = [base for base in model.__mro__ if isinstance(base, type) and issubclass(base, BaseModel)]
        described = any(base.model_fields[name].description for base in bases if name in base.model_fields)
        group = len(inside) == 1 and (inside[0].__doc__ or "").strip()
        if not described and not group and name not in NOT_WRITTEN.get(model.__name__, ()):
            yield f"{model.__name__}.{name}"
        for each in inside:
            yield from undescribed(each)


@pytest.mark.parametrize("model", RECORDS, ids=lambda model: model.__name__)
def test_every_option_of_a_config_or_recipe_has_a_description(model: type[BaseModel]) -> None:
    assert sorted(set(undescribed(model))) == []


@pytest.mark.parametrize("file", SERVICES, ids=lambda file: file.parent.name)
def test_every_option_of_a_shipped_service_has_a_description(file: Any) -> None:
    try:
        module = load(ROOT / file)
    except ConfigError as error:  # a package of the service's own is missing
        pytest.skip(str(error))
    model = module.Options if hasattr(module, "serve") else module.app.state.options_model
    assert sorted(set(undescribed(model))) == []


def test_an_option_that_a_comment_explains_is_found() -> None:
    class Inner(BaseModel):
        depth: int = 1  # how deep

    class Options(ServiceOptions):
        width: int = 1  # how wide
        inner: tuple[Inner, ...] = ()

    assert sorted(undescribed(Options)) == ["Inner.depth", "Options.inner", "Options.width"]
