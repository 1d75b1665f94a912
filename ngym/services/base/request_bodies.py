"""The JSON of a request: bounded before it is parsed, validated, and handled in a thread if it is large.

A parser, a validator and a serializer each hold the interpreter until they return. The bounds keep each such call
short, so that the event loop answers other requests in between.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from itertools import islice
from typing import Any, cast

import orjson
from anyio.to_thread import run_sync
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, SchemaValidator
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive

from ngym.did_you_mean import nearest
from ngym.errors import MAX_NAME, MAX_PROBLEMS, BadRequest, NotReady, Problem, bad_request, shorten
from ngym.net.json_limits import (
    LOOP_BYTES,
    MAX_DEPTH,
    NODE_WEIGHT,
    Result,
    by_size,
    is_deep,
    is_room_for,
    json_weight,
    parsed_bytes,
)
from ngym.schema import Json
from ngym.services.base.options import ServiceOptions

CALL_WEIGHT = 200_000  # limit for the arguments of a tool
ROW_WEIGHT = 2_000_000  # limit for a row or a conversation: 28,000 messages of one part each, or as many token ids

WINDOW = 1 << 20
MAX_QUOTES = 256
BACKSLASH = ord("\\")
BODY_BYTES = "ngym.body_bytes"  # in the scope of a request whose body has been read
MAX_LISTED_PROBLEMS = 20_000  # limit of listed problems: pydantic creates all of them at once, a million a second
MAX_UNKNOWN_FIELDS = 100  # limit of unknown fields searched for a misspelling

PART_BYTES = 1 << 20  # bytes; a larger body is received in parts of this size, each only if there is memory for it


class RequestBody:
    """`receive` of a request whose body may have `most` bytes, announced or not.

    Raises BadRequest (413) for a larger body and NotReady when memory is short.

    Attributes:
        read: whether the body has been read to its end; the next message is then the caller's disconnect.
    """

    __slots__ = ("_declared", "_most", "_next_check", "_receive", "_size", "read")

    def __init__(self, receive: Receive, headers: Mapping[bytes, bytes], most: int) -> None:
        declared = headers.get(b"content-length", b"")
        self._declared = int(declared) if declared.isdigit() else 0
        self._receive = receive
        self._most = most
        self._size = 0
        self._next_check = min(PART_BYTES, most + 1) if self._declared <= min(PART_BYTES, most) else 0
        self.read = False

    def _check_memory(self) -> None:
        """Check that there is memory for the body and for what is parsed from it."""
        largest = max(self._size, self._declared)
        if largest > self._most:
            limit = f"{self._most >> 20} MiB (max_body_mib of this service raises the limit)"
            raise BadRequest(f"the body is larger than {limit}", status=413)
        if largest > PART_BYTES and not is_room_for(2 * largest - self._size):
            raise NotReady("there is not enough memory for this request now")
        self._next_check = min(self._size + PART_BYTES, self._most + 1)

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._size += len(message.get("body", b""))
            if self._size >= self._next_check:
                self._check_memory()
            self.read = not message.get("more_body", False)
        return message


async def whole_body(request: Request) -> bytes:
    """As `Request.body`, without the asynchronous generators that starlette reads it through."""
    if not hasattr(request, "_body"):
        receive, parts, more = request.receive, [], True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        request._body = parts[0] if len(parts) == 1 else b"".join(parts)  # where `Request.body` keeps it
    return request._body


async def off_loop(request: Request, function: Callable[..., Result], *args: Any) -> Result:
    """Call the function, in a thread if the request's body is large, and return its result."""
    size = request.scope.get(BODY_BYTES) or len(await whole_body(request))
    return function(*args) if size <= LOOP_BYTES else await by_size(size, function, *args)


async def in_thread(function: Callable[..., Result], *args: Any) -> Result:
    """Call a function that may block in a thread (40 at once), and return its result.

    AnyIO's own frame keeps the future whose error it raises: a circle that would keep the request's body alive. So the
    error is raised here.
    """
    result, error = await run_sync(_outcome, function, args)
    if error is None:
        return cast(Result, result)
    try:
        raise error
    finally:
        del error


def _outcome(function: Callable[..., Result], args: tuple[Any, ...]) -> tuple[Result | None, BaseException | None]:
    try:
        return function(*args), None
    except BaseException as error:  # noqa: BLE001  (in_thread raises it)
        return None, error


async def json_body(request: Request, most_weight: int = ROW_WEIGHT) -> Json:
    """The request's JSON object. Raises BadRequest with the reason if it is invalid.

    Args:
        most_weight: limit of its weight (`is_light`); the service's `max_json_weight` overrides it.
    """
    raw = await whole_body(request)
    request.scope[BODY_BYTES] = len(raw)
    context = getattr(request.app.state, "context", None)
    own = context.options.max_json_weight if context and isinstance(context.options, ServiceOptions) else None
    args = raw, request.scope["path"], own or most_weight
    try:
        return parse_body(*args) if len(raw) <= LOOP_BYTES else await by_size(len(raw), parse_body, *args)
    except BadRequest as error:
        encoding = request.headers.get("content-encoding", "identity")
        if error.status == 400 and encoding != "identity":
            detail = f"the body has the content-encoding {shorten(encoding, MAX_NAME)}, which is not supported"
            raise BadRequest(f"{detail}; send plain JSON", status=415) from None
        raise


async def valid_body(request: Request, model: type[BaseModel], value: Json, what: str) -> Any:
    """As `validate`, for a value from the request's body. In a large body, each list is checked up to its first
    problem.
    """
    size = request.scope.get(BODY_BYTES) or len(await whole_body(request))
    if size <= LOOP_BYTES:
        return _validate(model, value, what, False)
    return await by_size(size, _validate, model, value, what, True)


def validate(model: type[BaseModel], value: Json, what: str) -> Any:
    """The value as a record. Raises BadRequest with one line that names the first wrong fields."""
    return _validate(model, value, what, False)


def parse_body(raw: bytes, path: str, most_weight: int) -> Json:
    """A body's JSON object. path: of the request.

    Raises:
        BadRequest: it is not a JSON object, too large or too deep.
        MemoryError: there is no memory for it; orjson would crash.
    """
    if not is_light(raw, most_weight):
        raise BadRequest(
            f"the JSON of {shorten(path, MAX_NAME)} has too many values: its weight is more than {most_weight:,} ({NODE_WEIGHT} for each "
            "object, list and member of an object, 1 for any other value and for 32 bytes outside of strings); "
            "send less, or raise the service's max_json_weight",
            status=413,
        )
    if len(raw) > PART_BYTES and not is_room_for(parsed_bytes(raw)):
        raise MemoryError
    try:
        value = _loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body of {shorten(path, MAX_NAME)} is not JSON: {error}", status=400) from None
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise BadRequest(f"the body of {shorten(path, MAX_NAME)} must be a JSON object, not {kind}")
    if is_deep(raw, value):
        raise BadRequest(f"the body of {shorten(path, MAX_NAME)} is nested deeper than {MAX_DEPTH} levels")
    return value


def is_light(raw: bytes, most: int) -> bool:
    """Whether the weight of this JSON is at most `most`. Bytes within strings do not count."""
    if len(raw) * (NODE_WEIGHT + 1) <= most:
        return True
    outside = _without_strings(raw)
    if outside is not None:
        return json_weight(outside) <= most
    if json_weight(raw) <= most:
        return True
    weight, inside, start = 0, False, 0
    while start < len(raw) and weight <= most:
        part = raw[start : start + WINDOW]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:  # do not split an escape sequence
            part = raw[start : start + WINDOW + 1]
        start += len(part)
        texts = part.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        weight += json_weight(b"".join(texts[inside::2]))
        inside ^= len(texts) % 2 == 0
    return weight <= most


def _without_strings(raw: bytes) -> bytes | None:
    """JSON without its strings; None if they have more than MAX_QUOTES quotes. A search for quotes in long texts is 50
    times as fast as counting what they contain.
    """
    outside: list[bytes] = []
    start, inside = 0, False
    for _ in range(MAX_QUOTES):
        quote = raw.find(b'"', start)
        if quote < 0:
            outside.append(b"" if inside else raw[start:])
            return b"".join(outside)
        if not inside:
            outside.append(raw[start:quote])
            inside = True
        elif raw[quote - 1] != BACKSLASH or (quote - len(raw[start:quote].rstrip(b"\\")) - start) % 2 == 0:
            inside = False
        start = quote + 1
    return None


def _loads(raw: bytes) -> Any:
    """orjson.loads without the garbage collections that its many new objects would trigger: all of them are alive."""
    if len(raw) <= LOOP_BYTES:
        return orjson.loads(raw)
    collects = gc.isenabled()
    gc.disable()
    try:
        return orjson.loads(raw)
    finally:
        if collects:
            gc.enable()


def _validate(model: type[BaseModel], value: Json, what: str, stops_early: bool) -> Any:
    try:
        return _stopping(model).validate_python(value) if stops_early else model.model_validate(value)
    except ValidationError as error:
        problems = _problems(model, value, error)
        raise bad_request(
            (Problem(_location(one), one["msg"] + _similar_name_hint(model, value, one)) for one in problems), what
        ) from None


def _problems(model: type[BaseModel], value: Json, error: ValidationError) -> list[ErrorDetails]:
    """The first problems; if there are too many to list, those of a smaller value."""
    if error.error_count() > MAX_LISTED_PROBLEMS:
        known = {name: value[name] for name in _names(model) if name in value}
        strangers = dict(islice(((name, one) for name, one in value.items() if name not in known), MAX_PROBLEMS))
        try:
            _stopping(model).validate_python(known | strangers)
        except ValidationError as fewer:
            error = fewer
    if error.error_count() > MAX_LISTED_PROBLEMS:
        return [{"type": "", "loc": (), "msg": f"{error.error_count():,} problems, too many to name", "input": None}]
    return error.errors(include_url=False, include_input=False, include_context=False)[: MAX_PROBLEMS + 1]


def _location(problem: ErrorDetails) -> str:
    return ".".join(str(part) for part in problem["loc"])


def _names(model: type[BaseModel]) -> Iterable[str]:
    for name, field in model.model_fields.items():
        yield name
        if field.alias:
            yield field.alias


def _similar_name_hint(model: type[BaseModel], value: Json, problem: ErrorDetails) -> str:
    """A hint for a missing field if the value has a field with a similar name: ` (is 'traget' meant to be it?)`."""
    if problem["type"] != "missing" or len(problem["loc"]) != 1:
        return ""
    strangers = islice((name for name in value if name not in model.model_fields), MAX_UNKNOWN_FIELDS)
    near = nearest(str(problem["loc"][0]), strangers)
    return f" (is {near!r} meant to be it?)" if near else ""


@cache
def _stopping(model: type[BaseModel]) -> SchemaValidator:
    """The model's validator, changed so that each list stops at its first problem."""
    # By default pydantic reuses the models' existing validators, which check whole lists.
    return SchemaValidator(_stops(model.__pydantic_core_schema__), _use_prebuilt=False)


def _stops(schema: Any) -> Any:
    if isinstance(schema, list | tuple):
        return type(schema)(_stops(part) for part in schema)
    if not isinstance(schema, dict):
        return schema
    literal_keys = ("metadata", "serialization", "default", "expected", "config")  # values, not schemas
    stops = {key: part if key in literal_keys else _stops(part) for key, part in schema.items()}
    if schema.get("type") in ("list", "set", "frozenset", "tuple"):
        stops["fail_fast"] = True
    return stops
