"""gym_server(): an environment from its author's functions: `verify`, and optional tools and metrics."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from statistics import fmean, median, stdev
from typing import Annotated, Any

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator
from starlette.responses import Response
from starlette.routing import Route

from ngym.errors import BadRequest, Boundary, ConfigError, ServiceError
from ngym.grading.answers import TEXT_LIMIT, last_text, response_problem
from ngym.grading.group_rewards import ROUTE
from ngym.net.json_limits import BULK_WEIGHT, ROW_BYTES
from ngym.net.request_context import header
from ngym.schema import APPLIED_HEADER, LARGEST_REWARD, MINIMAL, PREFER_HEADER, SESSION_HEADER, Json, is_reward
from ngym.services.base import middleware
from ngym.services.base.app import (
    OBJECT,
    JsonResponse,
    Lifespan,
    SignatureError,
    add_route,
    check_settings,
    object_of,
    service_app,
)
from ngym.services.base.options import ServiceOptions
from ngym.services.base.request_bodies import in_thread, json_body, off_loop, valid_body
from ngym.services.gym.mcp_route import McpRoute
from ngym.services.gym.results import has_nan
from ngym.services.gym.sessions import (
    RETRYABLE_STATUSES,
    TASK,
    IdempotentCalls,
    Session,
    SessionStore,
    begin_session,
    session_for,
    session_headers,
    session_id_of,
    set_task,
)
from ngym.services.gym.tools import (
    AuthorFunction,
    check_options_type,
    check_reward_type,
    inspect_function,
    missing_tools,
    register_tool,
    tool_of_function,
)
from ngym.stats import ANSWER, ROUNDING, Scores, Subsets, parts_of

NOT_METRICS = frozenset({"_ng_task_index", "_ng_rollout_index", "_ng_attempt_index"})
SCORES = frozenset({"reward", "reward_components"})
SCORED = (*SCORES, "reward_range", ANSWER)  # fields of an earlier verifier, in a row that is scored again
ROW_FIELDS = frozenset({"responses_create_params", "response"})
MAX_ROWS = 100_000
MAX_OWN = 1000  # limit of an author's metrics
MAX_GROUP = 1024  # rollouts of one task that are compared
_BOOLEAN: Json = {"type": "boolean"}
_OBJECTS: Json = {"type": "array", "items": OBJECT}
_NUMBER: Json = {"type": ["number", "null"]}
REWARDED = object_of(
    {"reward": _NUMBER, "reward_components": {"type": ["object", "null"], "additionalProperties": _NUMBER}},
    "reward_components",
    description="The row, with the reward and the verifier's own fields; a null reward was not scored.",
)
RewardRange = tuple[float, float]
ComputeMetrics = Callable[[list[Json]], Mapping[str, float | None]]
EMPTY_RESPONSE: Json = {"output": []}
NEVER_SEEDED = (
    "this rollout's state is not here: POST /seed_session begins its session, and every further call sends the "
    "X-NG-Session header or the cookie of the last answer"
)
MAX_ANSWER = 1_000  # characters of a reported answer; the response has the full program or document


def aggregate_rows(body: Json, compute_metrics: ComputeMetrics | None) -> Json:
    """The answer to a metrics request; its `by` names a field by whose values the scores are also grouped.

    Raises:
        BadRequest: verify_responses is not a list of rows, or has too many.
    """
    rows, by = body.get("verify_responses") or [], body.get("by")
    if not isinstance(rows, list) or not all(isinstance(row, dict) and _is_scored(row) for row in rows):
        raise BadRequest("verify_responses must be a list of objects whose 'reward' is a number or null")
    if len(rows) > MAX_ROWS:
        raise BadRequest(f"verify_responses has {len(rows):,} rows; send no more than {MAX_ROWS:,}, such as a sample")
    if by is not None and not isinstance(by, str):
        raise BadRequest(f"'by' must be the name of a field, not {by!r:.60}")
    answer = aggregate(rows, by)
    if compute_metrics is not None:
        own = own_metrics(compute_metrics, [row for row in rows if row.get("reward") is not None])
        answer["agent_metrics"] |= own["metrics"]
        answer["key_metrics"] |= own["metrics"]
        answer["ng"] = {"environment": own}
    return answer


def aggregate(rows: Sequence[Json], by: str | None = None) -> Json:
    """Mean, min, max, median and std of each numeric field, pass@k and majority@k; null rewards are counted separately.

    Returns:
        `{"group_level_metrics": [one per task], "agent_metrics": {...}, "key_metrics": {...}}`.
    """
    groups: dict[Any, list[Json]] = defaultdict(list)
    scores, subsets = Scores(), Subsets(by) if by else None
    places: dict[Any, int] = {}
    for row in rows:
        index = row.get("_ng_task_index")
        groups[index].append(row)
        task = places.setdefault(index, len(places))
        scores.add(task, row)
        if subsets is not None:
            subsets.add(task, row)
    key = scores.metrics() | (subsets.metrics() if subsets else {})
    return {
        "group_level_metrics": [
            {
                "_ng_task_index": index,
                "rollouts": len(group),
                "unscored": sum(row.get("reward") is None for row in group),
                **_numbers(group),
            }
            for index, group in groups.items()
        ],
        "agent_metrics": {**_numbers(rows), **key, "unscored": scores.unscored},
        "key_metrics": key,
    }


def own_metrics(compute_metrics: ComputeMetrics, rows: list[Json]) -> Json:
    """The metrics of the author's function over the scored rows, and its errors: `{"metrics": {...}, "errors": [...]}`."""
    try:
        with Boundary("verify_error", "compute_metrics failed"):
            computed = dict(compute_metrics(rows))
    except ServiceError as error:  # a bug of the author's costs only the author's metrics
        return {"metrics": {}, "errors": [error.detail]}
    errors = []
    if len(computed) > MAX_OWN:
        errors.append(f"compute_metrics returned {len(computed):,} numbers; only the first {MAX_OWN:,} are kept")
    metrics = {}
    for name, value in list(computed.items())[:MAX_OWN]:
        if isinstance(value, int | float) and math.isfinite(value):
            metrics[str(name)] = float(value)
        elif value is not None:
            errors.append(f"compute_metrics returned {value!r:.60} as {name!r}; it must be a finite number or None")
    return {"metrics": metrics, "errors": errors}


def _is_scored(row: Json) -> bool:
    return isinstance(row.get("reward"), int | float | None)


def _numbers(rows: Iterable[Json]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for key, value in (*row.items(), *parts_of(row)):
            if isinstance(value, int | float) and key not in NOT_METRICS:
                values[key].append(float(value))
    out: dict[str, float] = {}
    for key, numbers in values.items():
        out |= {
            f"mean/{key}": fmean(numbers),
            f"min/{key}": min(numbers),
            f"max/{key}": max(numbers),
            f"median/{key}": median(numbers),
        }
        if len(numbers) > 1:
            out[f"std/{key}"] = stdev(numbers)
    return out


ReferenceText = Annotated[str, StringConstraints(max_length=TEXT_LIMIT)]
"""A text of the row that `verify` compares with. Longer ones are refused, so that no row holds the event loop of the service."""


class VerifyRequest(BaseModel):
    """The input of a verifier: the row (its own fields are attributes) and the policy's response. Derive and add
    fields.
    """

    model_config = ConfigDict(extra="allow")
    responses_create_params: dict[str, Any]
    response: dict[str, Any]

    @field_validator("responses_create_params")
    @classmethod
    def _has_items(cls, params: Json) -> Json:
        """Check that the input and the tools have a form in which a verifier can look for something."""
        prompt, tools = params.get("input"), params.get("tools")
        if not isinstance(prompt, str | None) and not _is_list_of_objects(prompt):
            raise ValueError("input must be text, or a list of items, which are objects")
        if tools is not None and not _is_list_of_objects(tools):
            raise ValueError("tools must be a list of objects")
        return params

    @field_validator("response")
    @classmethod
    def _can_be_read(cls, response: Json) -> Json:
        """Check that items are objects and that messages can be read: an answer in another form would get no reward."""
        if problem := response_problem(response):
            raise ValueError(problem)
        return response

    @property
    def text(self) -> str:
        """The text of the last assistant message; of a very long one its end (`last_text`); empty if there is none."""
        return last_text(self.response)


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


class VerifyGroup(BaseModel):
    """The rollouts of one task, to be compared. Derive, and give `rollouts` your own type: `list[MyTask]`."""

    rollouts: Sequence[VerifyRequest] = Field(min_length=1, max_length=MAX_GROUP)

    @field_validator("rollouts")
    @classmethod
    def _has_size(cls, rollouts: Sequence[VerifyRequest]) -> Sequence[VerifyRequest]:
        """Check this where a derived class has replaced the field, and with it the limits."""
        if not 1 <= len(rollouts) <= MAX_GROUP:
            raise ValueError(f"a group has 1 to {MAX_GROUP:,} rollouts")
        return rollouts


def gym_server(
    *,
    verify: Callable[..., Any],
    tools: Sequence[Callable[..., Any]] = (),
    options: type[ServiceOptions] = ServiceOptions,
    lifespan: Lifespan | None = None,
    compute_metrics: ComputeMetrics | None = None,
    verify_group: Callable[..., Any] | None = None,
    replays: bool = False,
    stateless: bool | None = None,
    reward_range: RewardRange | None = None,
) -> FastAPI:
    """An environment as an application.

    Args:
        verify: `(task: <a VerifyRequest>, [session: Session], [options], [peers: Peers])` -> the reward: a float, None
            (could not be scored), or a record with `reward`, optionally `reward_components`, and fields of its own.
        tools: functions `(body: <a BaseModel>, [session], [options], [peers])` -> any JSON. The model sees the name,
        the docstring and the text of a ToolError; any other exception fails the rollout. Plain functions run in a
        thread.
        options: the record of the stanza's own keys.
        lifespan: async context manager around serving, given the ServiceContext.
        compute_metrics: `(rows)` -> further metrics by name, over the `verify` results of many rollouts; rows with a
        null reward are left out.
        verify_group: `(group: <a VerifyGroup>, [options], [peers])` -> for each of its rollouts what `verify` would
        return. It is called once all rollouts of a task are there for which `verify` returned
        `{"reward": None, "reward_pending": "group"}`.
        replays: `verify` takes the session but can score from the response alone. Otherwise a session that was never
        seeded is not verified: its state is not the rollout's.
        stateless: whether a rollout needs no session. By default neither a tool nor `verify` takes one. Our agents then
            send a row to /seed_session once, which checks it, and skip that for its further rollouts. False: a session
            for each rollout anyway.
        reward_range: the lowest and the highest reward. Another one is an error of the environment, and the rollout
        fails. The range is in the rows (`reward_range`) and in openapi.json.
    """
    functions = {"lifespan": lifespan, "compute_metrics": compute_metrics, "verify_group": verify_group}
    check_settings("gym_server", options, ServiceOptions, **functions)
    if not callable(verify):
        raise ConfigError(f"gym_server(verify={verify!r}): give a function")
    rewarded = _scored_schema(reward_range)
    if not isinstance(tools, Iterable):
        raise SignatureError(f"gym_server(tools={tools!r}): give a list of functions")
    store = SessionStore()
    over_mcp = McpRoute()
    app = service_app("gym_server", options=options, lifespan=over_mcp.wrap_lifespan(store.wrap_lifespan(lifespan)))
    app.state.serving.answer_headers = session_headers
    app.state.sessions = store
    idempotent = app.state.idempotent = IdempotentCalls()
    app.state.verifier = inspect_function(verify, VerifyRequest)
    check_reward_type(verify)
    check_options_type([verify, *([verify_group] if verify_group else []), *tools], options)
    if stateless and app.state.verifier.session:
        raise SignatureError("gym_server(stateless=True): `verify` takes the Session; leave stateless out")
    app.state.stateless = not app.state.verifier.session if stateless is None else stateless
    app.state.only_by_steps = False
    app.state.tools = []
    app.state.callable = {}
    app.router.routes.append(Route("/mcp", over_mcp))

    async def seed_session(request: Request) -> Response:
        row = await json_body(request)
        await valid_body(request, app.state.verifier.body, {**row, "response": EMPTY_RESPONSE}, _row_name(row))
        session = begin_session(store, request, header(request.scope, SESSION_HEADER))
        await set_task(store, session, row, request)
        answer: Json = {"tools": app.state.tools} if app.state.tools else {}
        answer |= {"stateless": True} if app.state.stateless else {}
        answer |= {"only_by_steps": True} if app.state.only_by_steps else {}
        missing = missing_tools(app, row)
        answer |= {"missing_tools": missing} if missing else {}
        return JsonResponse(answer | over_mcp.seed_answer(app, session))

    async def verify_route(request: Request) -> Response:
        raw = await json_body(request)
        task = await valid_body(request, app.state.verifier.body, raw, _row_name(raw))
        session_id = session_id_of(request.scope)
        unseeded = app.state.stateless and session_id not in store
        session = Session(session_id or "") if unseeded else session_for(store, request)
        if TASK not in session and app.state.verifier.session and not replays:
            raise ServiceError(NEVER_SEEDED, status=409)
        is_repeatable = False
        try:
            if session.failure is not None:
                raise copy.copy(session.failure)
            with middleware.verify() as span, Boundary("verify_error", "verify failed", places=True):
                outcome = _reward_fields(await app.state.verifier.run(task, session, request), reward_range)
                middleware.record_rewards(span, outcome)
                try:
                    if header(request.scope, PREFER_HEADER) == MINIMAL:
                        return JsonResponse(outcome, headers={APPLIED_HEADER: MINIMAL})
                    return await off_loop(request, JsonResponse, {**_without_scores(raw), **outcome})
                except TypeError as error:
                    raise _not_json(outcome, error) from None
        except ServiceError as error:
            is_repeatable = error.status in RETRYABLE_STATUSES and session.id in store
            raise
        finally:
            if not is_repeatable:
                store.end(session.id)
                idempotent.forget(session.id)
                session.over()  # also one that was never stored

    async def list_tools(request: Request) -> Response:
        return JsonResponse(app.state.tools)

    async def end_session(request: Request) -> Response:
        session_id = session_id_of(request.scope) or ""
        idempotent.stop(session_id)
        idempotent.forget(session_id)
        return JsonResponse({"ended": store.end(session_id)})

    async def aggregate_route(request: Request) -> Response:
        body = await json_body(request, BULK_WEIGHT)
        return JsonResponse(await in_thread(aggregate_rows, body, compute_metrics))

    async def has_metrics(request: Request) -> Response:
        return JsonResponse({"compute_metrics": compute_metrics is not None})

    task = app.state.verifier.body
    post = partial(add_route, app, "POST")
    post(
        "/seed_session",
        seed_session,
        summary="Start a rollout's session",
        answer=object_of(_SEEDED, *_SEEDED),
        body=_row_schema(task),
        most_bytes=ROW_BYTES,
    )
    post(
        "/verify",
        idempotent.once(verify_route),
        summary="Score a rollout",
        answer=rewarded,
        body=task.model_json_schema(),
        most_bytes=ROW_BYTES,
    )
    post(
        "/aggregate_metrics",
        aggregate_route,
        summary="Metrics over verify responses",
        body=OBJECT,
        answer=object_of({"group_level_metrics": _OBJECTS, "agent_metrics": OBJECT, "key_metrics": OBJECT}),
        most_bytes=ROW_BYTES,
    )
    add_route(app, "GET", "/tools", list_tools, summary="The tools as Responses-API function tools", answer=_OBJECTS)
    add_route(app, "DELETE", "/session", end_session, summary="End a session", answer=object_of({"ended": _BOOLEAN}))
    add_route(
        app,
        "GET",
        "/aggregate_metrics",
        has_metrics,
        summary="Whether the author defined metrics",
        answer=object_of({"compute_metrics": _BOOLEAN}),
    )
    if verify_group is not None:
        _add_group_route(app, inspect_function(verify_group, VerifyGroup), rewarded, reward_range)
    for tool in map(tool_of_function, tools):
        name = tool.definition["name"]
        if name in app.state.callable:
            raise SignatureError(f"gym_server(tools=...): two tools are called {name!r}; rename one")
        if stateless and tool.takes_session:
            raise SignatureError(
                f"gym_server(stateless=True): the tool `{name}` takes the Session; leave stateless out"
            )
        register_tool(app, tool)
    return app


_SEEDED: Json = {
    "tools": _OBJECTS,
    "mcp": OBJECT,
    "stateless": _BOOLEAN,
    "only_by_steps": _BOOLEAN,
    "missing_tools": {"type": "array", "items": {"type": "string"}},
}


def _row_schema(model: type[BaseModel]) -> Json:
    schema = model.model_json_schema()
    schema["required"] = [name for name in schema.get("required", []) if name != "response"]
    return schema


def _scored_schema(reward_range: RewardRange | None) -> Json:
    """The schema of a scored row. Raises ValueError if the range is not one."""
    if reward_range is None:
        return REWARDED
    if not isinstance(reward_range, tuple | list) or len(reward_range) != 2:
        raise ValueError(f"reward_range is {reward_range!r}; give two finite numbers, the lower one first")
    low, high = reward_range
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"reward_range is ({low}, {high}); give two finite numbers, the lower one first")
    reward = {**_NUMBER, "minimum": low, "maximum": high}
    return {**REWARDED, "properties": {**REWARDED["properties"], "reward": reward}}


def _add_group_route(app: FastAPI, author: AuthorFunction, rewarded: Json, reward_range: RewardRange | None) -> None:
    async def group_route(request: Request) -> Response:
        group = await valid_body(request, author.body, await json_body(request, BULK_WEIGHT), "the group")
        with Boundary("verify_error", "verify_group failed", places=True):
            outcomes = await author.run(group, Session(), request)
            if not isinstance(outcomes, Iterable) or isinstance(outcomes, str | Mapping):
                raise ServiceError(f"verify_group returned {outcomes!r:.60}; return a list with an outcome per rollout")
            outcomes = list(outcomes)
            if len(outcomes) != len(group.rollouts):
                raise ServiceError(f"verify_group returned {len(outcomes)} outcomes for {len(group.rollouts)} rollouts")
            return JsonResponse({"rollouts": [_reward_fields(outcome, reward_range) for outcome in outcomes]})

    schema, summary = author.body.model_json_schema(), "Score the rollouts of a task by comparing them"
    schema["properties"]["rollouts"]["minItems"] = 1
    answer = object_of({"rollouts": {"type": "array", "items": rewarded}})
    add_route(app, "POST", ROUTE, group_route, summary=summary, body=schema, answer=answer, most_bytes=ROW_BYTES)


def _reward_fields(outcome: Any, reward_range: RewardRange | None = None) -> Json:
    """The result of `verify` as the fields to add to the row."""
    outcome = plain_number(outcome)
    if outcome is None or isinstance(outcome, bool | int | float):
        outcome = {"reward": outcome}
    elif isinstance(outcome, BaseModel):
        outcome = outcome.model_dump()
    if not isinstance(outcome, Mapping) or "reward" not in outcome:
        wrong = (
            f"a record of {', '.join(map(str, outcome))}" if isinstance(outcome, Mapping) else type(outcome).__name__
        )
        raise ServiceError(
            f"verify must return a number, None, or a record with 'reward'; it returned {wrong}", failure="verify_error"
        )
    fields = {name: value for name, value in outcome.items() if not _of_the_row(name, value)}
    for name, value in fields.items():
        if name not in SCORES and has_nan(value):
            raise ServiceError(
                f"verify returned NaN or an infinity in {name!r}, which JSON does not have", failure="verify_error"
            )
    fields["reward"] = _finite(fields["reward"], "reward")
    if reward_range is not None:
        fields["reward"] = _clamp(fields["reward"], *reward_range)
        fields["reward_range"] = [*reward_range]
    components = fields.get("reward_components")
    if components is not None:
        if not isinstance(components, Mapping):
            raise ServiceError(
                f"verify returned {components!r:.60} as reward_components; it must be a record of numbers by name",
                failure="verify_error",
            )
        components = {name: _finite(value, f"reward component {name!r}") for name, value in components.items()}
        total = math.fsum(value for value in components.values() if value is not None)
        if fields["reward"] is not None and not math.isclose(total, fields["reward"], abs_tol=1e-6):
            raise ServiceError(
                f"reward_components sum to {total}, not to the reward {fields['reward']}", failure="verify_error"
            )
        fields["reward_components"] = components
    if isinstance(fields.get(ANSWER), str):
        fields[ANSWER] = _bounded(fields[ANSWER])
    return fields


def _without_scores(row: Json) -> Json:
    """The row without the scores of an earlier verifier, which the new one may not have."""
    if not any(name in row for name in SCORED):
        return row
    return {name: value for name, value in row.items() if name not in SCORED}


def _not_json(outcome: Json, error: TypeError) -> ServiceError:
    """The error of fields that cannot be written, with the name of the first such field."""
    for name, value in outcome.items():
        try:
            JsonResponse(value)
        except TypeError as problem:
            return ServiceError(f"verify returned in {name!r} what is not JSON: {problem}", failure="verify_error")
    return ServiceError(f"verify returned what is not JSON: {error}", failure="verify_error")


def _of_the_row(name: Any, value: Any) -> bool:
    """Whether it is what the row already has: a verifier may return the whole task, as NeMo Gym's do. A ServiceError for a
    value of its own under such a name.
    """
    if name not in ROW_FIELDS:
        return False
    if isinstance(value, Mapping | BaseModel):
        return True
    raise ServiceError(
        f"verify returned a field {name!r}, which every row has; give it another name", failure="verify_error"
    )


def plain_number(value: Any) -> Any:
    """A number of numpy or torch as Python's."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return value.item()
    return value


def _bounded(answer: str) -> str:
    """A long answer's beginning and a digest of the whole, so that answers with the same beginning remain distinct
    votes.
    """
    if len(answer) <= MAX_ANSWER:
        return answer
    digest = blake2b(answer.strip().encode(errors="surrogatepass"), digest_size=8).hexdigest()
    return f"{answer.strip()[:MAX_ANSWER]}... (cut, blake2b {digest})"


def _finite(value: Any, what: str) -> float | None:
    value = plain_number(value)
    if value is None:
        return None
    if not is_reward(value):
        raise ServiceError(
            f"verify returned {value!r:.60} as {what}; it must be None or a number within ±{LARGEST_REWARD:g}",
            failure="verify_error",
        )
    return float(value)


def _clamp(reward: float | None, low: float, high: float) -> float | None:
    """The reward, within the range that the gym server declares; the sum of nine ninths is above 1 by rounding."""
    if reward is None or low <= reward <= high:
        return reward
    slack = ROUNDING * (high - low)
    if not low - slack <= reward <= high + slack:
        problem = f"verify returned the reward {reward}; its gym_server declares reward_range=({low}, {high})"
        raise ServiceError(problem, failure="verify_error")
    return float(min(max(reward, low), high))


def _row_name(row: Json) -> str:
    index = row.get("_ng_task_index")
    return f"row {index}" if isinstance(index, int) else "the row"
