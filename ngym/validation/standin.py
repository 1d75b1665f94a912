"""Who stands in for a model that an environment asks, such as its judge? A scripted one, with the replies of data/NAME/model.jsonl.

It shows that questions arrive, verdicts are read and rewards computed; nothing about how well any model judges.
"""

from __future__ import annotations

from collections.abc import Sequence

from ngym.config.service_config import Config, Stanza
from ngym.validation.gold import Environment

MODEL = "model.jsonl"


def others(config: Config, name: str) -> list[str]:
    """The services that a service's options name, such as a judge."""
    given = config.services[name].options.values()
    return [value for value in given if isinstance(value, str) and value in config.services]


def can_be_alone(config: Config, environment: Environment) -> bool:
    """Whether it asks nobody, or only models that its scripted one can stand in for."""
    asked = others(config, environment.name)
    scripted = (environment.data / MODEL).is_file()
    return not asked or (scripted and all(config.services[name].kind == "model" for name in asked))


def with_stand_ins(config: Config, environments: Sequence[Environment]) -> Config:
    """Of the config: these environments, which `can_be_alone`, and a scripted model for each that asks one."""
    services: dict[str, Stanza] = {}
    for environment in environments:
        stanza = config.services[environment.name]
        asked = others(config, environment.name)
        if asked:
            scripted = f"{environment.name}_scripted_model"
            replies = {"file": str((environment.data / MODEL).resolve())}
            services[scripted] = Stanza(name=scripted, kind="model", app="models/scripted", options=replies)
            options = {key: scripted if value in asked else value for key, value in stanza.options.items()}
            stanza = stanza.model_copy(update={"options": options})
        services[environment.name] = stanza
    return config.model_copy(update={"services": services})
