"""A verifiers environment: loading and checks, tasks, prompts as items, and responses as traces.

The environment's id comes from the stanza, never from a row. A row has the data of its task, which the environment's
own record validates.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import verifiers.v1 as vf
from pydantic import BaseModel, ValidationError
from verifiers.v1.configs.agent import WireAgentConfig, agent_config_fields
from verifiers.v1.graph import MessageNode
from verifiers.v1.state import State, state_cls
from verifiers.v1.trace import ModelCall
from verifiers.v1.types import (
    ImageUrlContentPart,
    ImageUrlSource,
    MessageContent,
    TextContentPart,
    ToolCall,
    Usage,
)
from verifiers.v1.utils.decorators import discover_decorated, invoke
from verifiers.v1.utils.loaders import environment_class

from ngym.errors import BadRequest, ConfigError
from ngym.schema import Json

HOOKS = ("setup", "finalize", "stage_verifier")


def record_prompt(trace: vf.Trace[Any, Any, Any], messages: Iterable[vf.Message]) -> None:
    """Add messages that the model did not generate."""
    for message in messages:
        _append(trace, message, sampled=False)


def record_turn(trace: vf.Trace[Any, Any, Any], response: Json) -> list[vf.Message]:
    """Add the messages of the model and its tools. The last call gets the usage and whether the answer was cut off."""
    messages = messages_of(response.get("output") or [])
    for message in messages:
        sampled = isinstance(message, vf.AssistantMessage)
        _append(trace, message, sampled=sampled)
        if sampled:
            finish = "tool_calls" if message.tool_calls else "stop"
            trace.calls.append(ModelCall(node=len(trace.nodes) - 1, finish_reason=finish))
    if trace.calls:
        if response.get("status") == "incomplete":
            trace.calls[-1].finish_reason = "length"
        trace.calls[-1].usage = _usage(response.get("usage"))
    return messages


def messages_of(items: Sequence[Json]) -> list[vf.Message]:
    """Output items as messages. Reasoning, text and calls up to the next tool or user message form one message."""
    messages: list[vf.Message] = []
    names = {item.get("call_id"): item.get("name") for item in items if item.get("type") == "function_call"}
    for item in items:
        kind = item.get("type") or "message"
        if kind == "function_call_output":
            call_id = item["call_id"]
            messages.append(
                vf.ToolMessage(tool_call_id=call_id, content=_parts(item.get("output")), name=names.get(call_id))
            )
        elif kind == "message" and item.get("role") != "assistant":
            messages.append(vf.UserMessage(content=_parts(item.get("content"))))
        else:
            _say(messages, kind, item)
    return messages


def prompt_of(data: vf.TaskData) -> list[vf.Message]:
    """A task's prompt as messages."""
    system = [] if data.system_prompt is None else [vf.SystemMessage(content=data.system_prompt)]
    prompt = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt or [])
    return [*system, *prompt]


def items_of(messages: Iterable[vf.Message]) -> list[Json]:
    """A prompt's messages as input items. Raises ValueError for a message with tool calls."""
    return [{"role": message.role, "content": _content(message)} for message in messages]


def _say(messages: list[vf.Message], kind: str, item: Json) -> None:
    if not messages or not isinstance(messages[-1], vf.AssistantMessage):
        messages.append(vf.AssistantMessage())
    message = messages[-1]
    if kind == "message":
        message.content = (message.content or "") + _text(item.get("content"))
    elif kind == "reasoning":
        message.reasoning_content = (message.reasoning_content or "") + _text(
            item.get("content") or item.get("summary")
        )
    elif kind == "function_call":
        call = ToolCall(id=item["call_id"], name=item["name"], arguments=item.get("arguments") or "{}")
        message.tool_calls = [*(message.tool_calls or []), call]


def _append(trace: vf.Trace[Any, Any, Any], message: vf.Message, *, sampled: bool) -> None:
    parent = len(trace.nodes) - 1 if trace.nodes else None
    trace.nodes.append(MessageNode(parent=parent, message=message, sampled=sampled, timestamp=time.time()))


def _usage(usage: Json | None) -> Usage | None:
    if not usage:
        return None
    return Usage(prompt_tokens=usage.get("input_tokens") or 0, completion_tokens=usage.get("output_tokens") or 0)


def _text(content: Any) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(part.get("text") or "" for part in content)


def _parts(content: Any) -> MessageContent:
    """An item's content as verifiers has it: a text, or texts and images."""
    if not isinstance(content, list) or all(part.get("type") != "input_image" for part in content):
        return _text(content)
    return [
        ImageUrlContentPart(image_url=ImageUrlSource(url=part["image_url"]))
        if part.get("type") == "input_image"
        else TextContentPart(text=_text([part]))
        for part in content
    ]


def _content(message: vf.Message) -> Any:
    if isinstance(message, vf.ToolMessage) or getattr(message, "tool_calls", None):
        raise ValueError("the prompt has tool calls; such a task cannot be exported")
    content = message.content
    if content is None or isinstance(content, str):
        return content or ""
    return [
        {"type": "input_image", "image_url": part.image_url.url, "detail": "auto"}
        if isinstance(part, ImageUrlContentPart)
        else {"type": "input_text", "text": part.text}
        for part in content
    ]


class Source(BaseModel):
    """From the stanza: the environment, its folder if it is not installed, and the options of its taskset."""

    environment: str
    path: str | None = None
    taskset: dict[str, Any] = {}


@dataclass(frozen=True)
class Environment:
    """A loaded environment. by_turns: its package has its own `Env`, whose `run` plays against the model."""

    env: vf.Env[Any]
    task_type: type[vf.Task[Any, Any, Any]]
    by_turns: bool

    @property
    def state_type(self) -> type[State]:
        state: type[State] = state_cls(self.task_type)
        return state

    @property
    def tasks(self) -> vf.Taskset[Any, Any]:
        return self.env.taskset

    def task(self, data: Json) -> vf.Task[Any, Any, Any]:
        """The task of a row. Raises BadRequest if the data does not fit this environment."""
        try:
            record = self.task_type.data_type().model_validate(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(map(str, first["loc"]))
            raise BadRequest(
                f"field 'task_data': {self.task_type.__name__} cannot read this task: {field}: {first['msg']}"
            ) from None
        return self.task_type(record, self.tasks.config.task)

    async def begin(self, task: vf.Task[Any, Any, Any]) -> vf.Trace[Any, Any, Any]:
        """The trace of a new rollout, with its prompt, after the task's setup()."""
        described = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        trace = vf.Trace(task=described, agent=vf.AgentInfo(config=vf.AgentConfig()), state=self.state_type())
        await self.hook(task, "setup", trace)
        record_prompt(trace, prompt_of(task.data))
        return trace

    async def hook(self, task: vf.Task[Any, Any, Any], name: str, trace: vf.Trace[Any, Any, Any]) -> None:
        """Call the task's own setup or finalize, if it has one."""
        if _own(task, name):
            await invoke(getattr(task, name), {"trace": trace})

    def trace_from(self, record: Json, state: Json) -> vf.Trace[Any, Any, Any]:
        """The trace of a rollout from its JSON record and its state, which are sent to the worker separately."""
        kind = vf.Trace[self.task_type.data_type(), self.state_type, WireAgentConfig]
        trace: vf.Trace[Any, Any, Any] = kind.model_validate(record)
        trace.state = self.state_type.model_validate(state)
        return trace


@functools.cache
def _load(source: str) -> Environment:
    requested = Source.model_validate_json(source)
    if requested.path and requested.path not in sys.path:
        sys.path.append(requested.path)  # last, so that a folder of environments does not hide installed packages
    config = vf.resolve_env_config({"taskset": {**requested.taskset, "id": requested.environment}})
    env = environment_class(requested.environment)(config)
    return Environment(env, type(env.taskset).task_type(), not isinstance(env, vf.SingleAgentEnv))


def load(source: Source) -> Environment:
    """The environment, once per process.

    Raises:
        ConfigError: it is not installed, its options are wrong, or it needs what a gym server does not have.
    """
    try:
        environment = _load(source.model_dump_json())
        first = next(iter(environment.tasks.take(1)), None)
        problem = "it has no tasks" if first is None else next(_problems(environment, first), None)
    except Exception as error:  # code of the environment's author runs here: report any exception in one line
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"environment {source.environment!r} cannot be loaded: {type(error).__name__}: {reason}"
        ) from error
    if problem is not None:
        raise ConfigError(f"environment {source.environment!r} cannot be served: {problem}")
    return environment


def _problems(environment: Environment, task: vf.Task[Any, Any, Any]) -> Iterator[str]:
    """Features of verifiers that a gym server does not have: containers, several models, hooks on model calls."""
    roles = agent_config_fields(environment.env.config)
    if len(roles) != 1:
        yield f"its roles are {', '.join(roles)}; only one role is supported"
    if type(task).NEEDS_CONTAINER or task.data.image is not None or task.data.agent_user is not None:
        yield "its tasks need a container"
    hooks = [*task.hooks("reward"), *task.hooks("metric"), *(getattr(task, name) for name in HOOKS if _own(task, name))]
    for hook in hooks:
        parameter = inspect.signature(hook).parameters.get("runtime")
        if parameter is not None and parameter.default is inspect.Parameter.empty:
            yield f"{hook.__name__}() needs the runtime of the agent; there is none"
    for hook in (*task.hooks("stop"), *discover_decorated(task, "intercept")):
        yield f"{hook.__name__}() watches model calls (@stop or @intercept), which do not pass through a gym server"
    for toolset in (*type(task).toolsets(task.config), *type(environment.tasks).toolsets(environment.tasks.config)):
        if toolset.config.url:
            yield f"its tools are served at {toolset.config.url}; use gym_servers/mcp for those"
        if not issubclass(environment.state_type, state_cls(type(toolset))):
            yield f"the state of {type(toolset).__name__} is not that of {type(task).__name__}"


def _own(task: vf.Task[Any, Any, Any], name: str) -> bool:
    return getattr(type(task), name) is not getattr(vf.Task, name)
