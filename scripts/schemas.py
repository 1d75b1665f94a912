"""Writes ngym/schemas/*.json: JSON Schemas of global_config.yaml, of recipes and of rows, read from the code.

python scripts/schemas.py [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NotRequired, Required, get_args, get_origin, get_type_hints, is_typeddict

import orjson
from pydantic import TypeAdapter

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts" / "docs"))

from reference.services import shipped

from ngym.config.service_config import SETTINGS_KEY, Settings, Stanza
from ngym.files.atomic import write_whole
from ngym.schema import Kind, Trace
from ngym.trainer.recipe.recipe import Recipe

Json = dict[str, Any]
DIALECT = "http://json-schema.org/draft-07/schema#"  # the newest that editors know for YAML
INTERPOLATION: Json = {"type": "string", "pattern": r"\$\{.+\}"}  # OmegaConf's, in place of any value
OF_THE_READER = {"name", "options", "where", "key_where"}  # fields of Stanza that no file has


def schemas() -> dict[str, Json]:
    """File name -> schema."""
    return {"global_config": global_config(), "recipe": recipe(), "row": row()}


def global_config() -> Json:
    """A stanza is checked by its `kind` and `app`; the options of an app of one's own are not known here."""
    stanza = _interpolated(Stanza.model_json_schema())
    keys = {name: key for name, key in stanza["properties"].items() if name not in OF_THE_READER}
    definitions: Json = {"stanza": keys, **stanza.get("$defs", {})}
    shared = {name: {"$ref": f"#/$defs/stanza/{name}"} for name in keys}
    choices = []
    for kind in get_args(Kind):
        for each in shipped(kind):
            place = each.app.replace("/", ".")
            options = _interpolated(each.options.model_json_schema(ref_template=f"#/$defs/{place}/$defs/{{model}}"))
            definitions[place] = {"$defs": options.pop("$defs", {})}
            own = {**shared, **options.get("properties", {})}
            choices.append(
                {
                    "if": {"properties": {"app": {"const": each.app}}, "required": ["app"]},
                    "then": {"description": each.description, "properties": own, "additionalProperties": False},
                }
            )
    apps = [choice["if"]["properties"]["app"]["const"] for choice in choices]
    keys["app"] = {"description": keys["app"]["description"], "anyOf": [{"enum": apps}, {"type": "string"}]}
    settings = _interpolated(Settings.model_json_schema(ref_template="#/$defs/ngym/$defs/{model}"))
    definitions[SETTINGS_KEY] = {"$defs": settings.pop("$defs", {})}
    return {
        "$schema": DIALECT,
        "title": "global_config.yaml of ngym",
        "type": "object",
        "properties": {SETTINGS_KEY: settings},
        "additionalProperties": {"type": "object", "required": ["kind"], "properties": shared, "allOf": choices},
        "$defs": definitions,
    }


def recipe() -> Json:
    """A recipe may name a base (`defaults`) and leave out what that sets, so nothing is required."""
    schema = _interpolated(Recipe.model_json_schema())
    schema.pop("required", None)
    return {"$schema": DIALECT, **schema, "title": "Recipe of ng_train"}


def row() -> Json:
    """A task row, or a row of rollouts: the environment's own fields are free."""
    params = {"type": "object", "properties": {"input": {"type": ["string", "array"]}}, "required": ["input"]}
    agent = {"type": "object", "properties": {"name": {"type": "string"}, "type": {"type": "string"}}}
    return {
        "$schema": DIALECT,
        "title": "Row of ngym: a task, or a rollout",
        "type": "object",
        "required": ["responses_create_params"],
        "properties": {
            "responses_create_params": params,
            "agent_ref": agent,
            "reward": {"type": ["number", "null"]},
            "response": {"type": "object", "properties": {"output": {"type": "array"}}},
            "ng": _typed(Trace),
        },
    }


def _typed(kind: Any) -> Json:
    """The schema of a type; pydantic reads a TypedDict of `typing` only from Python 3.12 on."""
    if get_origin(kind) in (Required, NotRequired):
        return _typed(get_args(kind)[0])
    if get_origin(kind) is list:
        return {"type": "array", "items": _typed(get_args(kind)[0])}
    if is_typeddict(kind):
        return {"type": "object", "properties": {name: _typed(each) for name, each in get_type_hints(kind).items()}}
    return TypeAdapter(kind).json_schema()


def _interpolated(schema: Any) -> Any:
    """The schema with `${...}` allowed as the value of every key."""
    if isinstance(schema, list):
        return [_interpolated(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {key: _interpolated(value) for key, value in schema.items()}
    if changed.get("items") == {"type": "string"}:
        changed["items"] = {"type": ["string", "number", "boolean"]}  # YAML reads `[--count, 9600]` so
    if isinstance(schema.get("properties"), dict):
        changed["properties"] = {name: _or_interpolation(key) for name, key in changed["properties"].items()}
    return changed


def _or_interpolation(key: Json) -> Json:
    if key.get("type") == "string" and not {"enum", "pattern", "minLength", "format"} & key.keys():
        return key
    beside = {name: key[name] for name in ("title", "description", "default") if name in key}
    return {**beside, "anyOf": [{name: value for name, value in key.items() if name not in beside}, INTERPOLATION]}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, schema in schemas().items():
        write_whole(
            folder / f"{name}.json", orjson.dumps(schema, option=orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE)
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "ngym" / "schemas")
