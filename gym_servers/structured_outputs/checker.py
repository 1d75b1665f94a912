"""Checks a document against its schema. Runs in a worker process; JSON, YAML, TOML, XML and CSV.

Stricter than the parsers: no duplicate keys, no NaN, no YAML anchors and tags, no XML entities and document types, no
text over MAX_CHARS, no nesting deeper than MAX_DEPTH. YAML scalars are those of YAML 1.2: `no` and `2024-05-01` are
strings. XML and CSV have no types: a text becomes the number, boolean or null that the schema requires.

    XML   <root><name>x</name><tag>a</tag><tag>b</tag></root>   -> {"name": "x", "tag": ["a", "b"]}; attributes: "@name"
    CSV   a header line, then one record per line               -> an array of objects

`invalid` and `wrong` are verdicts on the text. `unverifiable` is a fault of the row: its schema cannot be used.
Patterns use a linear-time regex engine; only those that it does not support (look-around, back-references) use a
backtracking one, with a limit. Nothing is fetched: a remote $ref is a fault of the row.
"""

from __future__ import annotations

import csv
import json
import re
import tomllib
from collections.abc import Callable, Sequence
from datetime import date, datetime, time
from io import StringIO
from math import isnan
from typing import Any, Literal
from xml.etree.ElementTree import Element, ParseError

import jsonschema_rs
import orjson
import yaml
from defusedxml import DefusedXmlException
from defusedxml.ElementTree import fromstring

MAX_CHARS = 100_000
MAX_DEPTH = 60
ALTERNATIVES = ("anyOf", "oneOf", "allOf")
LONG_KEY = re.compile(r"(?<![\w-])(?:(?:[\w-]+|\"[^\"\n]*\"|'[^'\n]*')[ \t]*\.[ \t]*){60}")
Schema = Any
Format = Literal["json", "yaml", "xml", "csv", "toml"]
BACKTRACK_LIMIT = 100_000
MAX_REASON = 300
MISSING = object()


class Malformed(Exception):
    """The text is not a document of its format."""


def parse(text: str, form: str, schema: Schema) -> Any:
    if len(text) > MAX_CHARS:
        raise Malformed(f"the text is longer than {MAX_CHARS:,} characters")
    if not text.strip():
        raise Malformed("the text is empty")
    document = PARSERS[form](text.strip("\ufeff \t\r\n"), schema)
    refuse_depth(document)
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Malformed("half a surrogate pair is not a character") from None
    except ValueError:  # json cannot write a long hexadecimal integer of TOML
        raise Malformed("a whole number has too many digits") from None
    return document


def parse_json(text: str, schema: Schema) -> Any:
    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=no_constant, parse_float=decimal)
    except ValueError as error:
        raise Malformed(str(error)) from None


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise Malformed("an object has a key twice")
    return result


def decimal(digits: str) -> float:
    return finite(float(digits))


def no_constant(name: str) -> Any:
    raise Malformed(f"{name} is not a JSON number")


class Loader(yaml.CSafeLoader):
    """YAML 1.2's core scalars; no dates, no merge keys."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (PyYAML's own attribute)


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), list("tTfF")
)
Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(?:~|null|Null|NULL|)\Z"), ["~", "n", "N", ""])
Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?(?:0|[1-9]\d{0,300})\Z"), list("-+0123456789"))
Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\.\d{1,300}|\d{1,300}(?:\.\d{0,300})?)(?:[eE][-+]?\d{1,3})?\Z"),
    list("-+.0123456789"),
)


def mapping(loader: Loader, node: yaml.MappingNode) -> dict[str, Any]:
    keys = [loader.construct_object(key) for key, _ in node.value]
    if any(isinstance(key, dict | list) for key in keys):
        raise Malformed("a key is not a scalar")
    return unique(
        [
            (key if isinstance(key, str) else json.dumps(key), loader.construct_object(value, deep=True))
            for key, (_, value) in zip(keys, node.value, strict=True)
        ]
    )


Loader.add_constructor("tag:yaml.org,2002:map", mapping)
Loader.add_constructor("tag:yaml.org,2002:float", lambda loader, node: finite(float(node.value)))


def finite(value: float) -> float:
    if value in (float("inf"), float("-inf")):
        raise Malformed("a number is too large")
    return value


def parse_yaml(text: str, schema: Schema) -> Any:
    depth = 0
    try:
        for event in yaml.parse(text, Loader=Loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise Malformed(f"it is nested deeper than {MAX_DEPTH} levels")
            if getattr(event, "anchor", None) or (isinstance(event, yaml.NodeEvent) and getattr(event, "tag", None)):
                raise Malformed("anchors, aliases and tags are not allowed")
        return yaml.load(text, Loader=Loader)  # noqa: S506  (a safe loader)
    except (yaml.YAMLError, ValueError) as error:
        raise Malformed(" ".join(str(error).split())) from None


def parse_toml(text: str, schema: Schema) -> Any:
    if LONG_KEY.search(text):  # a.a.a...: tomllib would need quadratic memory
        raise Malformed(f"it is nested deeper than {MAX_DEPTH} levels")
    try:
        return plain(tomllib.loads(text, parse_float=decimal))
    except ValueError as error:
        raise Malformed(str(error)) from None


def plain(value: Any) -> Any:
    """The value with dates as strings. TOML's `nan` is not valid JSON."""
    if isinstance(value, dict):
        return {key: plain(member) for key, member in value.items()}
    if isinstance(value, list):
        return [plain(member) for member in value]
    if isinstance(value, float) and isnan(value):
        raise Malformed("nan is not a JSON number")
    return value.isoformat() if isinstance(value, datetime | date | time) else value


def parse_xml(text: str, schema: Schema) -> Any:
    try:
        root = fromstring(text, forbid_dtd=True)
    except (ParseError, DefusedXmlException, ValueError) as error:
        raise Malformed(f"{type(error).__name__} {error}") from None
    return of_element(root, schema, schema, 0)


def of_element(element: Element, schema: Schema, whole: Schema, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise Malformed(f"it is nested deeper than {MAX_DEPTH} levels")
    schema = resolve_reference(schema, whole)
    text = (element.text or "").strip()
    if not len(element) and not element.attrib and "object" not in types(schema):
        return scalar(text, schema)
    if text or any((child.tail or "").strip() for child in element):
        raise Malformed(f"<{element.tag}> has text next to its elements")
    children: dict[str, Any] = {
        f"@{name}": scalar(value, member(schema, f"@{name}", whole)) for name, value in element.attrib.items()
    }
    for child in element:
        subschema = member(schema, child.tag, whole)
        if "array" in types(subschema):
            items = subschema.get("items", {})
            children.setdefault(child.tag, []).append(of_element(child, items, whole, depth + 1))
        elif child.tag in children and whole == {}:  # no schema says which elements are lists
            values = children[child.tag] if isinstance(children[child.tag], list) else [children[child.tag]]
            children[child.tag] = [*values, of_element(child, {}, whole, depth + 1)]
        elif child.tag in children:
            raise Malformed(f"<{child.tag}> occurs twice")
        else:
            children[child.tag] = of_element(child, subschema, whole, depth + 1)
    return children


def parse_csv(text: str, schema: Schema) -> Any:
    try:
        lines = list(csv.reader(StringIO(text), strict=True))
    except csv.Error as error:
        raise Malformed(str(error)) from None
    header, records = lines[0], [line for line in lines[1:] if line]
    if len(set(header)) != len(header):
        raise Malformed("the header has a column twice")
    items = resolve_reference(resolve_reference(schema, schema).get("items", {}), schema)
    for number, record in enumerate(records, start=1):
        if len(record) != len(header):
            raise Malformed(f"record {number} has {len(record)} fields, the header {len(header)}")
    return [
        {name: scalar(value, member(items, name, schema)) for name, value in zip(header, record, strict=True)}
        for record in records
    ]


def resolve_reference(schema: Schema, whole: Schema) -> dict[str, Any]:
    """The schema that a local `$ref` names; {} if it is not an object or does not exist."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, dict):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = whole
        for step in reference.split("/")[1:]:
            schema = schema.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(schema, dict) else None
    return {}


def member(schema: Schema, name: str, whole: Schema) -> dict[str, Any]:
    properties = schema.get("properties")
    return resolve_reference(properties.get(name) if isinstance(properties, dict) else None, whole)


def types(schema: Schema) -> list[str]:
    """The allowed types of a value: those of `type` and of the alternatives."""
    if not isinstance(schema, dict):
        return []
    kinds = schema.get("type", [])
    names = [*kinds] if isinstance(kinds, list) else [kinds]
    return names + [kind for name in ALTERNATIVES for other in schema.get(name, ()) for kind in types(other)]


def scalar(text: str, schema: dict[str, Any]) -> Any:
    """The text as the first of the schema's types that fits."""
    kinds = types(schema)
    if "null" in kinds and text == "":
        return None
    if ("integer" in kinds or "number" in kinds) and re.fullmatch(r"-?(?:0|[1-9]\d{0,300})", text):
        return int(text)
    if "number" in kinds and re.fullmatch(r"-?\d{1,300}(?:\.\d{1,300})?(?:[eE][-+]?\d{1,3})?", text):
        return finite(float(text))
    if "boolean" in kinds and text in ("true", "false"):
        return text == "true"
    return text


def refuse_depth(document: Any) -> None:
    level = [document]
    for _ in range(MAX_DEPTH + 1):
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return
    raise Malformed(f"it is nested deeper than {MAX_DEPTH} levels")


PARSERS: dict[str, Callable[[str, Schema], Any]] = {
    "json": parse_json,
    "yaml": parse_yaml,
    "xml": parse_xml,
    "csv": parse_csv,
    "toml": parse_toml,
}


def check(
    text: str, form: Format, schema_str: str, expected: dict[str, Any], paths: Sequence[str] = ()
) -> dict[str, Any]:
    """`{"outcome": "correct" | "wrong" | "invalid" | "unverifiable", "reason", "valid", "values"}`; the last two are
    from 0 to 1.
    """
    try:
        schema = orjson.loads(schema_str)
        validator = compile_schema(schema)
    except (ValueError, jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError) as error:
        return verdict("unverifiable", f"schema_str cannot be used: {error}", None, None)
    try:
        document = parse(text, form, schema)
    except (Malformed, RecursionError) as error:
        return verdict("invalid", f"not valid {form.upper()}: {error}", 0.0, 0.0)
    try:
        fault = next(validator.iter_errors(document), None)
    except ValueError as error:
        return verdict("invalid", f"the document cannot be validated: {error}", 0.0, 0.0)
    if fault is not None:
        return verdict("invalid", f"{pointer(fault.instance_path)}: {fault.message}", 0.0, 0.0)
    wrong = [path for path, value in expected.items() if not same(value_at(document, path), value)]
    wrong += [path for path in paths if not has_path(document, path, text, form)]
    total = len(expected) + len(paths)
    share = 1.0 - len(wrong) / total if total else 1.0
    return verdict("wrong" if wrong else "correct", f"wrong: {', '.join(wrong)}" if wrong else None, 1.0, share)


def verdict(outcome: str, reason: str | None, valid: float | None, values: float | None) -> dict[str, Any]:
    cut = None if reason is None else reason[:MAX_REASON].encode("utf-8", "backslashreplace").decode()
    return {"outcome": outcome, "reason": cut, "valid": valid, "values": values}


def compile_schema(schema: Any) -> Any:
    """A validator that also asserts `format`."""
    settings: dict[str, Any] = {"validate_formats": True, "offline": True}
    try:
        return jsonschema_rs.validator_for(schema, pattern_options=jsonschema_rs.RegexOptions(), **settings)
    except jsonschema_rs.ValidationError:
        careful = jsonschema_rs.FancyRegexOptions(backtrack_limit=BACKTRACK_LIMIT)
        return jsonschema_rs.validator_for(schema, pattern_options=careful, **settings)


def value_at(document: Any, path: str) -> Any:
    """The value at a JSON pointer (RFC 6901), or MISSING."""
    for step in path.split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(document, list) and key.isdecimal() and int(key) < len(document):
            document = document[int(key)]
        elif isinstance(document, dict) and key in document:
            document = document[key]
        else:
            return MISSING
    return document


def has_path(document: Any, path: str, text: str, form: Format) -> bool:
    """Whether a value is at StructEval's `a.b[0].*.c`, or a column at `csv::name`. XML's paths begin with its root."""
    if path.startswith("csv::"):
        return path.removeprefix("csv::") in next(csv.reader(text.strip().splitlines()[:1]), [])
    steps = [next(filter(None, step)) for step in PATH_STEP.findall(path)]
    return _reaches(document, steps[1:] if form == "xml" else steps)


PATH_STEP = re.compile(r"`([^`]+)`|(\[\d+\])|([^.\[\]`]+)")


def _reaches(node: Any, steps: list[str]) -> bool:
    if not steps:
        return True
    step, *rest = steps
    if isinstance(node, list):
        if step == "*":
            return any(_reaches(item, rest) for item in node)
        return step[0] == "[" and int(step[1:-1]) < len(node) and _reaches(node[int(step[1:-1])], rest)
    return isinstance(node, dict) and step in node and _reaches(node[step], rest)


def same(value: Any, expected: Any) -> bool:
    """JSON equality: 1 is 1.0 and is not true; the order of an object's members does not matter."""
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, int | float) and isinstance(expected, int | float):
        return value == expected
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(same, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(same(value[key], expected[key]) for key in expected)
    return type(value) is type(expected) and bool(value == expected)


def pointer(path: list[str | int]) -> str:
    return "".join(f"/{step}" for step in path) or "the document"
