"""Is this text a document of the format, does it fit the schema, does it say the values? Runs in the worker processes.

`invalid` and `wrong` are verdicts on the text. `unverifiable` is a fault of the row: its schema cannot be used.
Schemas are compiled with a linear-time regex engine; only patterns that it lacks (look-around, back-references) go to a
backtracking one, with a limit. Nothing is fetched: a remote $ref is a fault of the row.
"""

from typing import Any, Literal

import jsonschema_rs
import orjson

from .formats import Malformed, parse

Format = Literal["json", "yaml", "xml", "csv", "toml"]
BACKTRACK_LIMIT = 100_000
MAX_REASON = 300


def check(text: str, form: Format, schema_str: str, expected: dict[str, Any]) -> dict[str, Any]:
    """`{"outcome": "correct" | "wrong" | "invalid" | "unverifiable", "reason", "valid", "values"}`, the last two 0 to 1."""
    try:
        schema = orjson.loads(schema_str)
        validator = compiled(schema)
    except (ValueError, jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError) as error:
        return verdict("unverifiable", f"schema_str cannot be used: {error}", None, None)
    try:
        document = parse(text, form, schema)
    except (Malformed, RecursionError) as error:
        return verdict("invalid", f"no {form.upper()}: {error}", 0.0, 0.0)
    try:
        fault = next(validator.iter_errors(document), None)
    except ValueError as error:
        return verdict("invalid", f"the document cannot be validated: {error}", 0.0, 0.0)
    if fault is not None:
        return verdict("invalid", f"{pointer(fault.instance_path)}: {fault.message}", 0.0, 0.0)
    wrong = [path for path, value in expected.items() if not same(at(document, path), value)]
    share = 1.0 - len(wrong) / len(expected) if expected else 1.0
    return verdict("wrong" if wrong else "correct", f"wrong: {', '.join(wrong)}" if wrong else None, 1.0, share)


def verdict(outcome: str, reason: str | None, valid: float | None, values: float | None) -> dict[str, Any]:
    cut = None if reason is None else reason[:MAX_REASON].encode("utf-8", "backslashreplace").decode()
    return {"outcome": outcome, "reason": cut, "valid": valid, "values": values}


def compiled(schema: Any) -> Any:
    """A validator that asserts `format`, too."""
    settings: dict[str, Any] = {"validate_formats": True, "offline": True}
    try:
        return jsonschema_rs.validator_for(schema, pattern_options=jsonschema_rs.RegexOptions(), **settings)
    except jsonschema_rs.ValidationError:
        careful = jsonschema_rs.FancyRegexOptions(backtrack_limit=BACKTRACK_LIMIT)
        return jsonschema_rs.validator_for(schema, pattern_options=careful, **settings)


MISSING = object()


def at(document: Any, path: str) -> Any:
    """What stands at a JSON pointer (RFC 6901); MISSING where nothing does."""
    for step in path.split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(document, list) and key.isdecimal() and int(key) < len(document):
            document = document[int(key)]
        elif isinstance(document, dict) and key in document:
            document = document[key]
        else:
            return MISSING
    return document


def same(found: Any, wanted: Any) -> bool:
    """JSON equality: 1 is 1.0 and is not true; the order of an object's members does not matter."""
    if isinstance(found, bool) or isinstance(wanted, bool):
        return found is wanted
    if isinstance(found, int | float) and isinstance(wanted, int | float):
        return found == wanted
    if isinstance(found, list) and isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    if isinstance(found, dict) and isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[key], wanted[key]) for key in wanted)
    return type(found) is type(wanted) and bool(found == wanted)


def pointer(path: list[str | int]) -> str:
    return "".join(f"/{step}" for step in path) or "the document"
