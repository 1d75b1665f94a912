"""The routes of each kind of service, as real applications tell them in /openapi.json, and the headers that go along."""

from __future__ import annotations

import io
import tokenize
from pathlib import Path
from typing import Any

from ngym import schema
from ngym.net import request_context
from ngym.net.json_limits import BULK_WEIGHT, BYTES_OF_WEIGHT, CALL_BYTES, NODE_WEIGHT, ROW_BYTES
from ngym.services.base.request_bodies import CALL_WEIGHT, ROW_WEIGHT

from .markup import code, fence, json_text, shortened, table, words
from .specimen import Answer, Json, Specimen

# kind of service -> the service of the specimen that shows its routes, and the words around them
SHOWN = {
    "Gym server": (
        "counter",
        "`/{tool}` is one route for each of its tools; here the tool is `add`. `/mcp` offers the same tools by MCP (streamable HTTP). With `verify_group` there is\n`POST /verify_group`.",
    ),
    "Step-wise gym server": ("games", "Beside what every gym server has: an episode is played turn by turn."),
    "Agent": ("counter_agent", ""),
    "Model server": (
        "policy",
        "The three calls of a model are also available under `/rollouts/{rollout_id}`, where they are captured. A policy's server (`models/vllm`) has the routes of the\nweight push beside these, under `/weights`; each wants the admin token.",
    ),
}
COMMON = ("/", "/health", "/ready", "/metrics")
INTRO = """\
# Endpoints

The routes of a running gym server, agent and model server, from their own `/openapi.json`. Everything is JSON in UTF-8. An answer
other than a success is a [problem document](failures.md#problem). [Rows and files](rows.md) describes the rows.
"""


def text(specimen: Specimen) -> str:
    parts = [INTRO, "## Every service {#every}\n", _routes(_paths(specimen.openapi["counter"], only=COMMON))]
    shown: set[str] = set(COMMON)
    for title, (name, remark) in SHOWN.items():
        paths = _paths(specimen.openapi[name], without=shown if title.startswith("Step") else set(COMMON))
        shown |= {path for path, _, _ in paths} if title == "Gym server" else set()
        anchor = title.lower().replace(" ", "-")
        parts += [f"## {title} {{#{anchor}}}\n", remark + "\n" if remark else "", _routes(_merged(paths))]
        if title == "Gym server":
            parts += [_seeding(specimen)]
    parts += [_head(specimen), _headers(), _bounds()]
    return "\n".join(part for part in parts if part)


def _paths(
    openapi: Json, only: tuple[str, ...] | None = None, without: set[str] | None = None
) -> list[tuple[str, str, Json]]:
    """(path, method, operation) of a document."""
    found = [
        (path, method.upper(), operation)
        for path, item in openapi["paths"].items()
        for method, operation in item.items()
    ]
    return [each for each in found if (only is None or each[0] in only) and each[0] not in (without or ())]


def _merged(paths: list[tuple[str, str, Json]]) -> list[tuple[str, str, Json]]:
    """Without those that are another one under /rollouts/{rollout_id}."""
    plain = {(path, method) for path, method, _ in paths}
    prefix = "/rollouts/{rollout_id}"
    return [
        each for each in paths if not (each[0].startswith(prefix) and (each[0].removeprefix(prefix), each[1]) in plain)
    ]


def _routes(paths: list[tuple[str, str, Json]]) -> str:
    rows = [
        (code(f"{method} {path}"), words(operation.get("summary", "")), _asked(operation), _answers(operation))
        for path, method, operation in paths
    ]
    return table(("Route", "", "Body", "Answers"), rows)


def _asked(operation: Json) -> str:
    content = operation.get("requestBody", {}).get("content", {})
    body = content.get("application/json", {}).get("schema", {})
    names = [code(name if name in body.get("required", ()) else f"{name}?") for name in body.get("properties", {})]
    return ", ".join(names) if names else "any object" if content else ""


def _answers(operation: Json) -> str:
    found = [
        f"{status} {code(kind)}"
        for status, answer in operation.get("responses", {}).items()
        if status != "default"
        for kind in answer.get("content", {}) or [""]
    ]
    return ", ".join(each.replace(" ``", "") for each in found)


def _seeding(specimen: Specimen) -> str:
    answer = specimen.seeded
    return f"What `/seed_session` answered to a row of `counter`:\n\n{_shown(answer)}"


def _shown(answer: Answer) -> str:
    return fence("json", json_text(shortened(answer.body)))


def _head(specimen: Specimen) -> str:
    rows = [
        (code(f"GET {route}"), f"{answer.status} {code(answer.media_type)}")
        for route, answer in specimen.head_routes.items()
    ]
    server = next(each for each in specimen.servers if each["name"] == "counter")
    return "\n".join(
        [
            "## The head {#head}\n",
            "The one address of a run. `/config` has no secrets in it; `/global_config_dict_yaml` and `/server_instances` are NeMo Gym's.\n",
            table(("Route", "Answers"), rows),
            "One record of `/servers`:\n",
            fence("json", json_text(server)),
        ]
    )


def _headers() -> str:
    rows = [
        (code(getattr(schema, name)), words(what))
        for name, what in remarks(Path(schema.__file__)).items()
        if name.endswith(("_HEADER", "_COOKIE"))
    ]
    rows.append((code(request_context.TRACEPARENT), "W3C Trace Context, through every hop."))
    return "## Headers {#headers}\n\n" + table(("Header", ""), rows)


def _bounds() -> str:
    rows: list[tuple[str, str, str]] = [
        ("a tool's arguments", _mebibytes(CALL_BYTES), f"{CALL_WEIGHT:,}"),
        ("a row, a conversation", _mebibytes(ROW_BYTES), f"{ROW_WEIGHT:,}"),
        ("many rows: `/aggregate_metrics`, `/verify_group`", _mebibytes(ROW_BYTES), f"{BULK_WEIGHT:,}"),
        ("all else", _mebibytes(CALL_BYTES), f"{ROW_WEIGHT:,}"),
    ]
    bounds = (
        f"The weight of JSON: {NODE_WEIGHT} for each object, list and member of an object, 1 for any other value and for "
        f"{BYTES_OF_WEIGHT} bytes outside of strings. A stanza's `max_body_mib` and `max_json_weight` take the place of both.\n"
    )
    columns = ("Body", "At most", "JSON's weight at most")
    return "## How large a body may be {#bounds}\n\n" + table(columns, rows) + "\n" + bounds


def _mebibytes(number: int) -> str:
    return f"{number >> 20} MiB"


def remarks(file: Path) -> dict[str, str]:
    """The comments beside the constants of a module: NAME = value # the comment."""
    found: dict[str, str] = {}
    name: str | None = None
    tokens: Any = tokenize.generate_tokens(io.StringIO(file.read_text()).readline)
    for token in tokens:
        if token.type == tokenize.NAME and token.start[1] == 0:
            name = token.string
        elif token.type == tokenize.COMMENT and token.start[1] > 0 and name:
            found[name] = token.string.lstrip("# ")
        elif token.type == tokenize.NEWLINE:
            if name and name.isupper():
                found.setdefault(name, "")
            name = None
    return found
