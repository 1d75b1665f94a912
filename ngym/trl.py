"""A gym server for TRL: its rows as a dataset, its tools as methods of an environment, its /verify as the reward.

    gym = TrlGym("calculator")  # of the run in this folder; or a URL
    GRPOTrainer(
        ...,
        train_dataset=Dataset.from_list(gym.tasks("data/calculator/train.jsonl")),
        environment_factory=gym.environment,
        reward_funcs=gym.verify,
    )

Nothing of TRL is imported: GRPOTrainer takes functions and a class. TRL (1.16) resets one environment for each
generation, makes tools of the class's public methods, shows their exceptions to the model as a
result, and leaves a rollout without a reward (None) out of its group's mean and out of the gradient.

`transformers.utils.get_json_schema` turns these back into almost the same schema. What type hints cannot express
(bounds, patterns, fields of nested objects) goes into the parameter's description.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from inspect import Parameter, Signature
from pathlib import Path
from threading import Thread
from types import GenericAlias
from typing import Any, ClassVar, Literal, Union

from ngym.client import Reply
from ngym.collect.collection_session import discover
from ngym.config.service_config import load_config
from ngym.convert import items_from_messages, messages_from_items
from ngym.errors import BadRequest, ServiceError, UsageError
from ngym.files.jsonl import check_lines
from ngym.net.auth import RUN_TOKEN, token_from
from ngym.net.json_limits import serialize
from ngym.peers import Peer, Peers, PeerSession, ToolErrors
from ngym.schema import PARTS, TOOL_OUTPUT_HEADER, Json
from ngym.services.agents.rollout_context import MAX_TOOL_ERROR_CHARS
from ngym.supervise.head_file import find_running

WRONG_ROW = frozenset({400, 404, 422})
IMAGE_FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
EPISODE_OVER = "The episode is over."
FAILED_BATCHES = 3  # in a row, each of one rollout, end the training
MOVE: Json = {
    "name": "move",
    "description": "Make your move. The answer shows what came of it.",
    "parameters": {
        "properties": {"text": {"type": "string", "description": "The move, as the environment asks for it."}},
        "required": ["text"],
    },
}


class Episode:
    """One rollout at a time. Subclasses have a method for each tool; every other method is private, because TRL makes
    tools of public ones.
    """

    _gym: ClassVar[TrlGym]

    def __init__(self) -> None:
        self._row: Json = {}
        self._session: PeerSession | None = None
        self._is_over = False  # of a step-wise environment
        self._failure: ServiceError | None = None  # of the environment; the rollout then has no reward

    def reset(self, row: str | None = None, **columns: Any) -> str | list[Json] | None:
        """Begin the task of a row of the dataset; returns what the model sees of it after the prompt."""
        if row is None:
            raise UsageError("the dataset has no column 'row'; make it with Dataset.from_list(gym.tasks(FILE))")
        self._row, self._failure, self._is_over = json.loads(row), None, False
        self._session = self._gym.peer.session(tool_errors=self._gym.tool_errors)
        try:
            answer = self._post("/reset" if self._gym.has_steps else "/seed_session", self._row)
        except ServiceError as error:
            if not error.retryable and error.status in WRONG_ROW:
                raise  # the model has not acted yet, so the row is wrong
            self._failure = error
            return None
        return _shown(answer["observation"]) if self._gym.has_steps else None

    def _call_tool(self, tool: str, arguments: Json) -> str | list[Json]:
        """A tool's answer, as the model sees it."""
        if self._failure is not None:
            raise self._failure
        try:
            if self._gym.has_steps:
                return self._step(arguments)
            raw = json.dumps(arguments).encode()  # what is not strict JSON is for the server to refuse
            reply = self._request(f"/{tool}", raw)
            has_parts = reply.headers.get(TOOL_OUTPUT_HEADER) == PARTS
            return _shown(reply.json()) if has_parts else reply.body.decode("utf-8", "replace")
        except RecursionError:
            return "Error: the arguments are nested too deeply"
        except ServiceError as error:
            if error.is_for_the_model:
                return f"Error: {error.detail}"[:MAX_TOOL_ERROR_CHARS]
            self._failure = error
            raise

    def _step(self, arguments: Json) -> str | list[Json]:
        if self._is_over:
            return EPISODE_OVER
        text = str(arguments.get("text", "")).encode("utf-8", "replace").decode()  # JSON has no lone surrogates
        move = items_from_messages([{"role": "assistant", "content": text}])
        step_result = self._post("/step", {**self._row, "response": {"output": move}})
        self._is_over = step_result["terminated"] or step_result["truncated"]
        observation = _shown(step_result["observation"])
        if isinstance(observation, list):
            return [*observation, {"type": "text", "text": EPISODE_OVER}] if self._is_over else observation
        return f"{observation}\n{EPISODE_OVER}" if self._is_over else observation

    async def _verify(self, completion: list[Json] | str) -> float | None:
        """The reward; None if the completion could not be scored."""
        if self._failure is None and self._session is not None:
            try:
                raw = _verify_body(self._row, completion)
            except BadRequest:
                return None  # the environment has not failed
            try:
                reward: float | None = (await self._session.post("/verify", raw))["reward"]
                return reward
            except ServiceError as error:
                self._failure = error
        return None

    def _post(self, path: str, body: Json) -> Any:
        return self._request(path, body).json()

    def _request(self, path: str, body: Json | bytes) -> Reply:
        assert self._session is not None
        reply: Reply = self._gym.call(self._session.request, path, body)
        return reply


class TrlGym:
    """A running gym server.

    Args:
        service: its URL, or its name in the config whose services `ng_run` has started (or whose stanza has a `url`).
        config: that config's file; the run is searched in its folder.
        tool_errors: "show": the model reads the error of a tool's crash; else the rollout has no reward.

    Attributes:
        environment: the class for `environment_factory`; with several environments, the value under `name`.
        name: of the service; `tasks` puts it into the column `environment`, by which TRL selects one of several.

    Raises:
        UsageError: the service is unknown or not running, or a tool cannot be a Python function.
        ServiceError: it cannot be reached.
    """

    def __init__(
        self, service: str, config: str | Path = "global_config.yaml", tool_errors: ToolErrors = "fail"
    ) -> None:
        self.tool_errors: ToolErrors = tool_errors
        self._loop = asyncio.new_event_loop()  # of the connections; its thread ends with the process
        Thread(target=self._loop.run_forever, name="gym", daemon=True).start()
        is_url = service.startswith(("http://", "https://"))
        self.name = "gym" if is_url else service
        run_token = token_from(RUN_TOKEN)
        urls, token = ([service.rstrip("/")], run_token) if is_url else self._find(service, Path(config), run_token)
        self.peer: Peer = Peers({self.name: urls}, token=token, owner="TRL")[self.name]
        self.has_steps = "/reset" in self.call(self.peer.get, "/openapi.json")["paths"]
        self._tools: list[Json] = [MOVE] if self.has_steps else self.call(self.peer.get, "/tools")
        methods: dict[str, Any] = {tool["name"]: _method(tool) for tool in self._tools}
        if hidden := {
            name for name in methods if name.startswith("_") or hasattr(Episode, name) or name == "get_reward"
        }:
            raise UsageError(f"{self.name}: TRL cannot call a tool {min(hidden)!r}; give it another name")
        self.environment: type[Episode] = type(self.name, (Episode,), {**methods, "_gym": self})
        self.verify = _named(self.name, self.verify)  # type: ignore[method-assign]
        self._failed_batches = 0  # in a row

    def tasks(self, path: str | Path) -> list[dict[str, Any]]:
        """The rows of a JSONL file for `Dataset.from_list`: `prompt` (chat messages), `row` (JSON), `environment`.

        Rows are JSON because each column of a dataset has one type, and rows vary.

        Raises:
            UsageError: a line is not a row, or declares tools that the gym server does not offer.
        """
        lines = check_lines(Path(path), self._problem)
        return [{"prompt": _prompt(line.row), "row": json.dumps(line.row), "environment": self.name} for line in lines]

    def verify(
        self,
        completions: Sequence[list[Json] | str],
        environments: Sequence[Any] | None = None,
        row: Sequence[str] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """The reward function: /verify's reward of each completion, None for one that could not be scored.

        Rollouts of other environments get None. Without `environment_factory`, for a gym server without tools, each
        completion is verified with its `row`. `unscored` is logged as 0 or 1 for each rollout: TRL's mean over all
        functions and processes is then the share without a reward. TRL logs the rewards as `rewards/NAME/mean`, by the
        `name` of the gym server.

        Raises:
            ServiceError: no rollout of a batch could be scored, because the gym server failed for each. With several
                environments, a process may have only one rollout of this one; three such batches in a row are needed.
        """
        if environments is None:
            environments = list(self._reset_episodes(row or [None] * len(completions)))
        episodes = [episode if isinstance(episode, self.environment) else None for episode in environments]
        rewards: list[float | None] = self.call(_verify_all, episodes, completions)
        own = [episode for episode in episodes if episode is not None]
        failures = [episode._failure for episode in own if episode._failure is not None]
        if own:
            self._failed_batches = self._failed_batches + 1 if len(failures) == len(own) else 0
        if self._failed_batches and (len(own) > 1 or self._failed_batches >= FAILED_BATCHES):
            raise failures[0]  # without a reward there is nothing to train on
        if log_metric is not None:
            for episode, reward in zip(episodes, rewards, strict=True):
                if episode is not None:
                    log_metric("unscored", float(reward is None))
        return rewards

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run an async function in the thread that has the connections, and return its result."""
        return asyncio.run_coroutine_threadsafe(function(*arguments), self._loop).result()

    def _find(self, name: str, config: Path, token: str | None) -> tuple[list[str], str | None]:
        """The service's addresses, and its token."""
        read = load_config([config])
        stanza = read.stanza(name)
        if stanza.kind != "gym_server":
            raise UsageError(f"{stanza.where}: {name!r} is a {stanza.kind}, not a gym_server")
        if stanza.external:
            return stanza.external_urls, read.others.get(name, token)
        running = find_running(config.resolve().parent)
        token = running.run_token if running else token
        urls: dict[str, list[str]] = self.call(discover, running.url, token).urls if running else {}
        if name not in urls:
            raise UsageError(
                f"{name!r} does not run: start it next to {config} with `ng_run --only {name}`, or give a URL"
            )
        return urls[name], token

    def _problem(self, row: Json) -> str | None:
        params = row.get("responses_create_params")
        if not isinstance(params, dict):
            return "no responses_create_params"
        known_names = {tool["name"] for tool in self._tools}
        others = sorted({str(tool.get("name")) for tool in params.get("tools") or ()} - known_names)
        return f"TRL takes tools from the gym server only, and it has no {', '.join(others)}" if others else None

    def _reset_episodes(self, rows: Sequence[str | None]) -> Iterator[Episode]:
        for row in rows:
            episode = self.environment()
            episode.reset(row)
            yield episode


def _named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under this name: TRL mixes the metrics of reward functions that have the same one."""

    @wraps(function)
    def named(*arguments: Any, **keywords: Any) -> Any:
        return function(*arguments, **keywords)

    named.__name__ = name
    return named


async def _verify_all(
    episodes: Sequence[Episode | None], completions: Sequence[list[Json] | str]
) -> list[float | None]:
    async def verified(episode: Episode | None, completion: list[Json] | str) -> float | None:
        return None if episode is None else await episode._verify(completion)

    return list(await asyncio.gather(*map(verified, episodes, completions)))


def _shown(content: str | list[Json]) -> str | list[Json]:
    """The content of an observation or a tool's result with TRL's blocks as parts: its images are Pillow's."""
    return content if isinstance(content, str) else [_block(part) for part in content]


def _block(part: Json) -> Json:
    if part["type"] != "input_image":
        return {"type": "text", "text": part["text"]}
    from PIL import Image

    file = io.BytesIO(base64.b64decode(part["image_url"].partition(";base64,")[2]))
    return {"type": "image", "image": Image.open(file, formats=IMAGE_FORMATS).convert("RGB")}


def _method(tool: Json) -> Callable[..., str | list[Json]]:
    """A tool as a method. It accepts any arguments: the gym server reports invalid ones to the model."""
    name, parameters = tool["name"], parameters_of(tool)

    def call(self: Episode, **arguments: Any) -> str | list[Json]:
        return self._call_tool(name, arguments)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = docstring_of(tool)
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    call.__signature__ = Signature([Parameter("self", Parameter.POSITIONAL_ONLY), *parameters])  # type: ignore[attr-defined]
    return call


def _prompt(row: Json) -> list[Json]:
    """The row's input as chat messages that end with a user message, to which TRL adds the result of `reset`."""
    params = row["responses_create_params"]
    messages = messages_from_items(params.get("input") or [], params.get("instructions"))
    if not messages or messages[-1]["role"] != "user":
        messages.append({"role": "user", "content": ""})
    return messages


def _verify_body(row: Json, completion: list[Json] | str) -> bytes:
    """The body of /verify. Raises BadRequest if the completion cannot be written as the items of a response."""
    try:
        return serialize({**row, "response": {"output": _items(completion)}})
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise BadRequest(f"the completion cannot be scored: {type(error).__name__}: {error}") from error


def _items(completion: list[Json] | str) -> list[Json]:
    """TRL's completion as the items of a response. Its calls have no ids; results follow in the order of the calls."""
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    messages: list[Json] = []
    open_ids: list[str] = []
    for number, message in enumerate(completion):
        if message["role"] == "tool":
            if not open_ids:
                raise ValueError(f"message {number} is a tool's result without a call")
            content = _without_images(message["content"])
            messages.append({**message, "content": content, "tool_call_id": open_ids.pop(0)})
            continue
        calls = [_with_id(call, f"call_{number}_{index}") for index, call in enumerate(message.get("tool_calls") or ())]
        open_ids = [call["id"] for call in calls]
        reasoning = message.get("reasoning_content") or message.get("thinking")
        messages.append({**message, "tool_calls": calls, "reasoning_content": reasoning})
    return items_from_messages(messages, style="tags")


def _without_images(content: str | list[Json]) -> str | list[Json]:
    """A tool's result for /verify, which has the session: an image is only named."""
    if isinstance(content, str):
        return content
    return [part if part["type"] == "text" else {"type": "text", "text": "[image]"} for part in content]


def _with_id(call: Json, call_id: str) -> Json:
    function = call["function"]
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {**call, "id": call_id, "function": {**function, "arguments": text}}


BASIC: dict[str, Any] = {"string": str, "integer": int, "number": float, "boolean": bool, "null": None}
HINTED_KEYWORDS = frozenset({"type", "description", "title", "enum", "items", "anyOf", "additionalProperties"})


def parameters_of(tool: Json) -> list[Parameter]:
    """One keyword parameter for each property; those that are not required have a default.

    Raises:
        UsageError: a property's name is not a Python identifier.
    """
    schema = _schema(tool)
    return [_parameter(name, field, name in schema["required"], tool) for name, field in schema["properties"].items()]


def docstring_of(tool: Json) -> str:
    """The description, and an `Args:` section with a line for each property."""
    lines = [_one_line(tool.get("description") or tool["name"])]
    described = [f"    {name}: {_describe(name, field)}" for name, field in _schema(tool)["properties"].items()]
    return "\n".join([*lines, "", "Args:", *described] if described else lines)


def _schema(tool: Json) -> Json:
    schema = tool.get("parameters") or {}
    properties = {
        name: _inline(field, schema.get("$defs") or {}) for name, field in schema.get("properties", {}).items()
    }
    return {"properties": properties, "required": schema.get("required") or ()}


def _parameter(name: str, field: Json, required: bool, tool: Json) -> Parameter:
    default = Parameter.empty if required else field.get("default")
    try:
        return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=_hint(field))
    except ValueError:
        raise UsageError(f"tool {tool['name']}: its parameter {name!r} cannot be one of a Python function") from None


def _hint(schema: Json) -> Any:
    match schema:
        case {"enum": [*values]}:
            return Literal[tuple(values)]
        case {"anyOf": [*choices]}:
            return Union[tuple(map(_hint, choices))]  # noqa: UP007 - the choices are known only now
        case {"type": [*kinds]}:
            return Union[tuple(_hint({**schema, "type": kind}) for kind in kinds)]  # noqa: UP007
        case {"type": "array", "items": dict(items)}:
            return GenericAlias(list, (_hint(items),))
        case {"type": "array"}:
            return list
        case {"type": "object", "additionalProperties": dict(values)}:
            return GenericAlias(dict, (str, _hint(values)))
        case {"type": "object"}:
            return dict
        case {"type": str(kind)}:
            return BASIC.get(kind, Any)
    return Any


def _describe(name: str, field: Json) -> str:
    """The description with what type hints cannot express: plain limits as text, nested schemas as JSON Schema."""
    parts = [part for part in (field, field.get("items"), *field.get("anyOf", ())) if isinstance(part, dict)]
    text = _one_line(next((part["description"] for part in parts if part.get("description")), name.replace("_", " ")))
    if not all(map(_is_expressible, _inside(field))) or "properties" in field:
        return f"{text} JSON Schema: {json.dumps({key: value for key, value in field.items() if key != 'description'})}"
    limits = {key: value for key, value in field.items() if key not in HINTED_KEYWORDS and value not in (None, "")}
    # The full stop matters: transformers reads "(choices: ...)" at the end as an enum.
    return f"{text} ({', '.join(f'{key}: {value}' for key, value in limits.items())})." if limits else text


def _is_expressible(schema: Json) -> bool:
    """Whether type hints express the whole schema."""
    return schema.keys() <= HINTED_KEYWORDS and all(map(_is_expressible, _inside(schema)))


def _inside(schema: Json) -> list[Json]:
    """The schemas of its items, values and choices."""
    inside = [schema.get("items"), schema.get("additionalProperties"), *schema.get("anyOf", ())]
    return [part for part in inside if isinstance(part, dict)]


def _inline(schema: Any, definitions: Json, expanded: tuple[str, ...] = ()) -> Any:
    """The schema without `$ref`; a recursive one stays, because it cannot be expanded."""
    if isinstance(schema, list):
        return [_inline(part, definitions, expanded) for part in schema]
    if not isinstance(schema, dict):
        return schema
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    if name in definitions and name not in expanded:
        siblings = {key: value for key, value in schema.items() if key != "$ref"}
        return {**_inline(definitions[name], definitions, (*expanded, name)), **siblings}
    return {key: _inline(value, definitions, expanded) for key, value in schema.items()}


def _one_line(text: str) -> str:
    """The text without line breaks, which would begin a section or another argument."""
    return " ".join(text.split())
