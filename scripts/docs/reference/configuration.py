"""`global_config.yaml`: the keys of a run, of a stanza, and the options of every service that ships."""

from __future__ import annotations

from pydantic import BaseModel

from ngym.config.service_config import SETTINGS_KEY, Settings, Stanza
from ngym.schema import Kind
from ngym.services import AgentOptions, ServiceOptions
from ngym.services.models.server import ModelOptions

from .fields import Key, default_of, docstring_summary, keys, keys_table
from .markup import words
from .services import FOLDERS, Shipped, shipped
from .specimen import Specimen

COMMON: dict[Kind, type[ServiceOptions]] = {
    "gym_server": ServiceOptions,
    "agent": AgentOptions,
    "model": ModelOptions,
}
NAMES: dict[Kind, str] = {"gym_server": "Gym servers", "agent": "Agents", "model": "Models"}
NOT_WRITTEN = {"name", "options", "where", "key_where"}  # of a stanza: what the house itself puts there
INTRO = f"""\
# Configuration

Every key of `global_config.yaml`, read from the models that check it. A key that is not here is refused, with its line and the
nearest name. How files are merged, and what `${{...}}` means: [configuration](../configuration.md).

## The run: `{SETTINGS_KEY}` {{#run}}
"""


def text(specimen: Specimen) -> str:
    stanza = [key for key in keys(Stanza) if key.name not in NOT_WRITTEN]
    parts = [
        INTRO,
        words(docstring_summary(Settings)) + "\n",
        keys_table(list(keys(Settings, f"{SETTINGS_KEY}."))),
        "## A stanza {#stanza}\n",
        "The options of every service. The service's own options follow.\n",
        keys_table(stanza),
    ]
    for kind in FOLDERS:
        parts += _of_kind(kind)
    return "\n".join(parts)


def _of_kind(kind: Kind) -> list[str]:
    base = COMMON[kind]
    common = list(keys(base))
    found = shipped(kind)
    parts = [f"## {NAMES[kind]} {{#{kind}}}\n"]
    if common:
        parts += ["Each has these.\n", keys_table(common)]
    without = [f"`{each.app}`" for each in found if not _own(each, base)]
    for each in found:
        if own := _own(each, base):
            parts += [
                f"### {each.app} {{#{each.app.replace('/', '-')}}}\n",
                words(each.description) + "\n",
                keys_table(own),
            ]
    if without:
        parts.append(f"No options of their own: {', '.join(without)}.\n")
    return parts


def _own(service: Shipped, base: type[BaseModel]) -> list[Key]:
    """The options of a service that those of its kind do not have, or that have another default."""
    return list(keys(service.options, without={name: default_of(field) for name, field in base.model_fields.items()}))
