"""A gym server under TRL: rows, tools as methods with their schemas, rewards, and failures that are not a reward of
0."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from inspect import Signature
from pathlib import Path
from typing import Any, Literal

import pytest
from anyio.from_thread import start_blocking_portal
from fastapi import FastAPI
from local_services import local_services
from paths import SUPPORT
from pydantic import BaseModel, Field
from shipped_gym import module
from transformers.utils import get_json_schema

from ngym import Image, Session, Step, VerifyRequest, gym_server, step_server
from ngym.errors import ServiceError, Unreachable, UsageError
from ngym.peers import ToolErrors
from ngym.trl import TrlGym, docstring_of, parameters_of

Serve = Callable[[FastAPI], AbstractContextManager[TrlGym]]


class Add(BaseModel):
    amount: int = Field(description="How much to add; may be negative.")


class Task(VerifyRequest):
    target: int
    scored: bool = True


async def add(body: Add, session: Session) -> dict[str, int]:
    """Add to this rollout's counter."""
    session["total"] = session.get("total", 0) + body.amount
    return {"total": session["total"]}


async def crash(body: Add) -> str:
    """Do what cannot be done."""
    raise Unreachable("the database is gone")


async def verify(task: Task, session: Session) -> float | None:
    return float(session.get("total", 0) == task.target) if task.scored else None


class Place(BaseModel):
    street: str


class Order(BaseModel):
    size: Literal["s", "m"]
    to: Place = Field(description="Where it\ngoes (choices: any)")
    notes: dict[str, int] | None = None
    when: Any = None


async def order(body: Order) -> str:
    """Order it.

    Args: none that matter.
    """
    return ""


async def lose(body: Add) -> str:
    """A bug."""
    raise RuntimeError("the database is gone")


def counter() -> FastAPI:
    return gym_server(tools=[add, crash, lose], verify=verify)


@contextmanager
def serve_gym(app: FastAPI, tool_errors: ToolErrors = "fail") -> Iterator[TrlGym]:
    """A gym server in a thread of its own, as TRL has it on another machine."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(local_services({}, gym=app)) as peers:
        yield TrlGym(peers.urls["gym"][0], tool_errors=tool_errors)


def row(target: int = 5, **fields: Any) -> dict[str, Any]:
    return {"responses_create_params": {"input": f"Bring it to {target}."}, "target": target, **fields}


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


def completion_messages(text: str, *calls: tuple[str, dict[str, Any], str]) -> list[dict[str, Any]]:
    """As TRL hands completions over: calls without ids, arguments as objects."""
    turns: list[dict[str, Any]] = []
    for name, arguments, result in calls:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        turns += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": name, "content": result},
        ]
    return [*turns, {"role": "assistant", "content": text}]


def begin_episode(gym: TrlGym, **fields: Any) -> Any:
    episode = gym.environment()
    episode.reset(row=json.dumps(row(**fields)), prompt=[], environment="gym")
    return episode


def test_each_episode_has_a_session_of_its_own_and_is_scored_by_verify() -> None:
    with serve_gym(counter()) as gym:
        right, wrong, null = begin_episode(gym), begin_episode(gym), begin_episode(gym, scored=False)
        assert right.add(amount=5) == '{"total":5}' and wrong.add(amount=4) == '{"total":4}'
        logged: list[tuple[str, float]] = []
        rewards = gym.verify(
            [completion_messages("done")] * 3, [right, wrong, null], log_metric=lambda *metric: logged.append(metric)
        )
    assert rewards == [1.0, 0.0, None]
    assert logged == [("unscored", 0.0), ("unscored", 0.0), ("unscored", 1.0)]  # TRL logs the mean: 1/3


def test_an_episode_can_be_used_again() -> None:
    with serve_gym(counter()) as gym:
        episode = begin_episode(gym)
        episode.add(amount=5)
        episode.reset(row=json.dumps(row(target=2)))
        episode.add(amount=2)
        assert gym.verify([completion_messages("done")], [episode]) == [1.0]


def test_wrong_arguments_are_shown_to_the_model_and_cost_no_reward() -> None:
    with serve_gym(counter()) as gym:
        episode = begin_episode(gym)
        assert "amount" in episode.add(amount="many") and episode.add(quantity=1).startswith("Error: ")
        episode.add(amount=5)
        assert gym.verify([completion_messages("done")], [episode]) == [1.0]


def test_an_environment_that_breaks_is_not_a_reward_of_0() -> None:
    with serve_gym(counter()) as gym:
        broken, right = begin_episode(gym), begin_episode(gym)
        right.add(amount=5)
        with pytest.raises(ServiceError, match="the database is gone"):
            broken.crash(amount=1)
        lost = begin_episode(gym, target=0)
        with pytest.raises(ServiceError, match="RuntimeError: the database is gone"):
            lost.lose(amount=1)
        assert gym.verify([completion_messages("done")] * 3, [broken, right, lost]) == [None, 1.0, None]


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


CALLED = completion_messages("done", ("add", {"amount": 5}, "5"))
ODD: dict[str, list[dict[str, Any]] | str] = {
    "two results of one call": [*CALLED[:2], *CALLED[1:]],
    "a result without a call": CALLED[1:],
    "a call without a name": [{"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]}],
    "a call that is a text": [{"role": "assistant", "tool_calls": [{"function": "add"}]}],
    "a lone surrogate": "\ud800",
    "deep arguments": completion_messages("done", ("add", {"amount": nested(100_000)}, "5")),
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_a_completion_that_cannot_be_written_costs_only_its_own_reward(odd: list[dict[str, Any]] | str) -> None:
    with serve_gym(counter()) as gym:
        episodes = [begin_episode(gym), begin_episode(gym)]
        for episode in episodes:
            episode.add(amount=5)
        assert gym.verify([odd, CALLED], episodes) == [None, 1.0]
        assert gym.verify([odd], [begin_episode(gym)]) == [None]


@pytest.mark.parametrize("amount", ["\ud800", float("nan"), nested(100_000)], ids=["surrogate", "nan", "deep"])
def test_arguments_that_are_not_strict_json_are_an_error_that_the_model_reads(amount: Any) -> None:
    with serve_gym(counter()) as gym:
        episode = begin_episode(gym)
        assert episode.add(amount=amount).startswith("Error: ")
        episode.add(amount=5)
        assert gym.verify([completion_messages("done")], [episode]) == [1.0]


def test_with_tool_errors_show_a_crash_is_shown_to_the_model_and_scored() -> None:
    with serve_gym(counter(), "show") as gym:
        episode = begin_episode(gym)
        assert episode.lose(amount=1).startswith("Error: lose failed: RuntimeError: the database is gone")
        episode.add(amount=5)
        assert gym.verify([completion_messages("done")], [episode]) == [1.0]


def test_a_batch_in_which_every_episode_broke_ends_the_training_with_the_reason() -> None:
    with serve_gym(counter()) as gym:
        episode = begin_episode(gym)
    lost = gym.environment()
    lost.reset(row=json.dumps(row()))
    with pytest.raises(ServiceError, match="is it running"):
        gym.verify([completion_messages("done")] * 2, [episode, lost])


def test_a_process_with_one_rollout_of_an_environment_survives_two_failures_in_a_row() -> None:
    with serve_gym(counter()) as gym:
        for failures in (2, 2, 3):
            scored = begin_episode(gym, target=0)
            assert gym.verify([completion_messages("done")], [scored]) == [1.0]
            assert gym.verify([completion_messages("done")], [object()]) == [
                None
            ]  # a batch with rollouts of other environments only
            for number in range(1, failures + 1):
                lost = begin_episode(gym, target=0)
                with pytest.raises(ServiceError, match="the database is gone"):
                    lost.lose(amount=1)
                if number < 3:
                    assert gym.verify([completion_messages("done")], [lost]) == [None]
                    continue
                with pytest.raises(ServiceError, match="the database is gone"):
                    gym.verify([completion_messages("done")], [lost])


def test_a_row_that_is_not_a_task_ends_the_training_before_a_model_speaks(tmp_path: Path) -> None:
    with serve_gym(counter()) as gym:
        with pytest.raises(ServiceError, match="target"):
            begin_episode(gym, target="five")
        with pytest.raises(UsageError, match=r"no column 'row'; make it with Dataset\.from_list"):
            gym.environment().reset(prompt=[])
        with pytest.raises(UsageError, match="no column 'row'"):
            gym.verify(["5"])
        foreign = {"input": "", "tools": [{"type": "function", "name": "fly"}]}
        path = write_rows(tmp_path / "rows.jsonl", row(), {"responses_create_params": foreign})
        with pytest.raises(
            UsageError, match=r"rows\.jsonl:2: TRL takes tools from the gym server only, and it has no fly"
        ):
            gym.tasks(path)


def test_rollouts_of_another_gym_server_are_left_to_it() -> None:
    with serve_gym(counter()) as gym, serve_gym(counter()) as other:
        own = begin_episode(gym)
        own.add(amount=5)
        logged: list[tuple[str, float]] = []
        rewards = gym.verify(
            [completion_messages("done")] * 2,
            [own, begin_episode(other)],
            log_metric=lambda *metric: logged.append(metric),
        )
        assert rewards == [1.0, None]
        assert gym.verify(
            [completion_messages("done")], [begin_episode(other)], log_metric=lambda *metric: logged.append(metric)
        ) == [None]
    assert logged == [("unscored", 0.0)]  # of its own rollout: a value for the others would change the mean


def test_the_reward_function_has_the_name_of_its_gym_server(tmp_path: Path) -> None:
    config = tmp_path / "global_config.yaml"
    with serve_gym(counter()) as gym, serve_gym(counter()) as other:
        urls = {"first": gym.peer.url(), "second": other.peer.url()}
        config.write_text(json.dumps({name: {"kind": "gym_server", "url": url} for name, url in urls.items()}))
        first, second = TrlGym("first", config), TrlGym("second", config)
        assert [first.verify.__name__, second.verify.__name__] == ["first", "second"]  # else TRL mixes their metrics
        episode = begin_episode(second)
        episode.add(amount=5)
        assert second.verify([completion_messages("done")], [episode]) == [1.0] and first.verify(
            [completion_messages("done")], [episode]
        ) == [None]


def test_rows_become_prompts_that_end_with_the_users_turn(tmp_path: Path) -> None:
    instructed = {"responses_create_params": {"input": [], "instructions": "Play."}, "target": 1}
    with serve_gym(counter()) as gym:
        first, second = gym.tasks(write_rows(tmp_path / "rows.jsonl", row(), instructed))
    assert first == {
        "prompt": [{"role": "user", "content": "Bring it to 5."}],
        "row": json.dumps(row()),
        "environment": "gym",
    }
    assert second["prompt"] == [{"role": "system", "content": "Play."}, {"role": "user", "content": ""}]


def test_a_completion_is_verified_as_the_trajectory_that_it_was() -> None:
    async def check_completion(task: VerifyRequest) -> dict[str, Any]:
        kinds = [item["type"] for item in task.response["output"]]
        calls = {item["call_id"] for item in task.response["output"] if "call_id" in item}
        return {"reward": float(task.text == "Sunny." and len(calls) == 2 and kinds == EXPECTED)}

    call = ("add", {"amount": 1}, "1")
    thought = [*completion_messages("", call, call)[:-1], {"role": "assistant", "content": "<think>hm</think>Sunny."}]
    with serve_gym(gym_server(verify=check_completion)) as gym:
        assert gym.verify([thought, "Rainy."], row=[json.dumps(row())] * 2) == [1.0, 0.0]


EXPECTED = [*["function_call", "function_call_output"] * 2, "reasoning", "message"]


def test_a_game_is_played_by_a_tool_and_its_observations_follow_the_prompt() -> None:
    async def reset(task: Task, session: Session) -> str:
        return "Guess my number."

    async def step(task: Task, session: Session) -> Step:
        right = task.text == str(task.target)
        return Step("Right." if right else "No.", float(right), right)

    with serve_gym(step_server(task=Task, reset=reset, step=step)) as gym:
        episode = gym.environment()
        assert episode.reset(row=json.dumps(row())) == "Guess my number."
        assert episode.move(text="4") == episode.move(text="\ud800") == "No."
        assert episode.move(text="5") == "Right.\nThe episode is over."
        assert episode.move(text="6") == "The episode is over."
        assert gym.verify([completion_messages("done")], [episode]) == [1.0]


def test_images_of_observations_and_tools_become_blocks_with_pillow_images() -> None:
    from PIL import Image as Pillow

    picture = Pillow.new("RGB", (4, 2), (9, 8, 7))

    async def reset(task: Task, session: Session) -> list[str | Image]:
        return ["Look:", Image(picture)]

    async def step(task: Task, session: Session) -> Step:
        return Step(Image(picture), 1.0, task.text == "end")

    def shown(block: dict[str, Any]) -> Any:
        return block["image"].tobytes() if block["type"] == "image" else block["text"]

    with serve_gym(step_server(task=Task, reset=reset, step=step)) as gym:
        episode = gym.environment()
        observed = episode.reset(row=json.dumps(row())), episode.move(text="go"), episode.move(text="end")
        completion = completion_messages("done", ("move", {"text": "go"}, observed[1]))
        assert gym.verify([completion], [episode]) == [2.0]
    pixels = picture.tobytes()
    assert [list(map(shown, blocks)) for blocks in observed] == [
        ["Look:", pixels],
        [pixels],
        [pixels, "The episode is over."],
    ]

    async def draw() -> Image:
        """Draw."""
        return Image(picture)

    with serve_gym(gym_server(tools=[draw], verify=verify)) as gym:
        episode = gym.environment()
        episode.reset(row=json.dumps(row()))
        assert list(map(shown, episode.draw())) == [pixels]


def test_transformers_reads_the_tools_of_every_shipped_server_as_they_are() -> None:
    with serve_gym(module("workplace").app) as gym:
        tools = gym.call(gym.peer.get, "/tools")
        episode = gym.environment()
        read = {tool["name"]: get_json_schema(getattr(episode, tool["name"]))["function"] for tool in tools}
    assert len(read) == 24
    for tool in tools:
        schema, expected = read[tool["name"]], tool["parameters"]
        assert schema["description"] == tool["description"]
        assert schema["parameters"]["properties"].keys() == expected["properties"].keys()
        assert schema["parameters"].get("required", []) == expected.get("required", [])
    attendees = read["create_event"]["parameters"]["properties"]["attendees"]
    assert attendees["items"] == {"type": "string"} and "maxItems: 50" in attendees["description"]


def test_what_type_hints_cannot_say_is_in_the_description() -> None:
    tool = gym_server(tools=[order], verify=verify).state.tools[0]

    def read() -> None: ...

    read.__doc__ = docstring_of(tool)
    read.__annotations__ = {each.name: each.annotation for each in parameters_of(tool)}
    read.__signature__ = Signature(parameters_of(tool))  # type: ignore[attr-defined]
    schema = get_json_schema(read)["function"]["parameters"]
    assert schema["required"] == ["size", "to"]
    assert schema["properties"]["size"] == {"type": "string", "enum": ["s", "m"], "description": "size"}
    assert '"street": {' in schema["properties"]["to"]["description"]
    assert schema["properties"]["notes"]["additionalProperties"] == {"type": "integer"}


@pytest.mark.parametrize("name", ["from", "e-mail"])
def test_a_parameter_that_python_cannot_name_is_reported(name: str) -> None:
    with pytest.raises(UsageError, match=f"tool send: its parameter '{name}'"):
        parameters_of({"name": "send", "parameters": {"properties": {name: {"type": "string"}}}})


def test_a_name_is_looked_up_in_the_run_of_the_folder(tmp_path: Path) -> None:
    config = tmp_path / "global_config.yaml"
    config.write_text("gym: {kind: gym_server, app: gym_servers/counter}\n")
    with pytest.raises(UsageError, match=r"'gym' does not run: start it .* `ng_run --only gym`"):
        TrlGym("gym", config)
    with serve_gym(counter()) as running:
        url = running.peer.url()
        config.write_text(f"gym: {{kind: gym_server, url: '{url}'}}\n")
        assert TrlGym("gym", config).peer.url() == url


@pytest.mark.parametrize("names", [["one"], ["one", "two"]], ids=len)
@pytest.mark.soak  # importing TRL alone takes ten seconds
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
def test_grpo_trainer_calls_the_tools_and_is_not_misled_by_what_could_not_be_scored(
    tmp_path: Path, names: list[str]
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", row(target=5), row(target=3, scored=False))
    config, program = tmp_path / "global_config.yaml", SUPPORT / "trl_run.py"
    with ExitStack() as running:
        gyms = [running.enter_context(serve_gym(gym_server(tools=[add], verify=verify))) for _ in names]
        urls = {name: gym.peer.url() for name, gym in zip(names, gyms, strict=True)}
        config.write_text(json.dumps({name: {"kind": "gym_server", "url": url} for name, url in urls.items()}))
        command = [sys.executable, "-W", "ignore", str(program), str(rows), str(config), *names]
        ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    for step in json.loads(ended.stdout.splitlines()[-1]):
        assert step["tools/call_frequency"] > 0.5 and step["tools/failure_frequency"] < 0.5
        assert 0 <= step["unscored"] <= 1
        scored = [step[f"rewards/{name}/mean"] for name in names if step[f"rewards/{name}/mean"] is not None]
        assert step["reward"] > 0.5 and min(scored) > 0.5  # the means of those that have a reward
        if len(names) == 1:
            assert step["unscored"] == 0.5  # of each two tasks one
