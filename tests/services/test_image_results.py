"""Images in results of tools and in observations: what the model sees, through every shipped agent and over MCP."""

from __future__ import annotations

import base64
import io
from typing import Any

import chat_policy
import pytest
from fastapi import Request, Response
from local_services import local_services
from paths import ROOT

from ngym import Image, ModelCall, ServiceError, Session, Step, VerifyRequest, gym_server, model_server, step_server
from ngym.schema import SESSION_HEADER, TOOL_OUTPUT_HEADER
from ngym.services.base.app import JsonResponse, add_route, load

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGP4z8DwHwAFAAH/iZk9HQAAAABJRU5ErkJggg=="
)
URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
SHOWN = {"type": "input_image", "image_url": URL, "detail": "auto"}
TASK = {"responses_create_params": {"input": "Look."}}
LOOK = [{"turn": 1, "tool_calls": [{"name": "look", "arguments": "{}"}]}, {"turn": 2, "text": "Red."}]
NEEDS = {"simple": (), "openai_sdk": ("openai",), "openai_agents": ("agents",), "langgraph": ("langchain_openai",)}


async def look() -> list[str | Image]:
    """Look at the screen."""
    return ["The screen:", Image(PNG)]


async def verify(task: VerifyRequest) -> float:
    return float(task.text == "Red.")


def recording(seen: list[list[dict[str, Any]]]) -> Any:
    """models/scripted, which adds the items of each request to `seen`."""
    scripted = chat_policy.SCRIPTED

    async def respond(request: dict[str, Any], call: ModelCall) -> dict[str, Any]:
        seen.append(request["input"] if isinstance(request["input"], list) else [])
        answer: dict[str, Any] = await scripted.respond(request, call)
        return answer

    return model_server(respond=respond, options=scripted.Options, lifespan=scripted.replies)


def without_detail(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """SDKs may leave out `detail`, whose default is `auto`."""
    return [{name: value for name, value in part.items() if name != "detail"} for part in parts]


@pytest.mark.parametrize("name", list(NEEDS))
async def test_the_model_sees_the_image_that_a_tool_returned(name: str) -> None:
    for module in NEEDS[name]:
        pytest.importorskip(module)
    seen: list[list[dict[str, Any]]] = []
    env, actor = gym_server(tools=[look], verify=verify), load(ROOT / "agents" / name / "app.py").app
    options = {"policy": {"replies": LOOK}, "actor": {"gym": "env", "model": "policy"}}
    async with local_services(options, policy=recording(seen), env=env, actor=actor) as peers:
        row = await peers["actor"].post("/run", TASK)
    assert row["reward"] == 1.0
    expected = [{"type": "input_text", "text": "The screen:"}, SHOWN]
    [in_row] = [item["output"] for item in row["response"]["output"] if item["type"] == "function_call_output"]
    assert in_row == expected
    [at_model] = [item["output"] for item in seen[-1] if item.get("type") == "function_call_output"]
    assert without_detail(at_model) == without_detail(expected)


async def test_mcp_clients_get_images_and_pillow_images_become_png_files() -> None:
    pillow = pytest.importorskip("PIL.Image")
    mcp = pytest.importorskip("mcp")
    from mcp.client.streamable_http import streamable_http_client

    async def draw() -> Image:
        """Draw."""
        return Image(pillow.new("RGB", (3, 2), (255, 0, 0)))

    async with local_services(env=gym_server(tools=[draw], verify=verify)) as peers:
        async with mcp.Client(streamable_http_client(f"{peers.urls['env'][0]}/mcp")) as client:
            [part] = (await client.call_tool("draw", {})).content
        reply = await peers["env"].session().request("/draw", {})
    assert (part.type, part.mime_type) == ("image", "image/png")
    drawn = pillow.open(io.BytesIO(base64.b64decode(part.data)))
    assert (drawn.size, drawn.getpixel((0, 0))) == ((3, 2), (255, 0, 0))
    assert reply.headers[TOOL_OUTPUT_HEADER] == "parts"


async def reset(task: VerifyRequest, session: Session) -> Image:
    return Image(PNG)


async def step(task: VerifyRequest, session: Session) -> Step:
    return Step(["Seen.", Image(PNG)], reward=1.0, terminated=task.text == "Done.")


async def test_observations_with_images_become_user_messages_and_the_stored_rollout_is_scored_again() -> None:
    seen: list[list[dict[str, Any]]] = []
    env, actor = step_server(task=VerifyRequest, reset=reset, step=step), load(ROOT / "agents/gymnasium/app.py").app
    replies = [{"turn": 1, "text": "Go on."}, {"turn": 2, "text": "Done."}]
    options = {"policy": {"replies": replies}, "actor": {"gym": "env", "model": "policy"}}
    empty = {"responses_create_params": {"input": []}}
    async with local_services(options, policy=recording(seen), env=env, actor=actor) as peers:
        row = await peers["actor"].post("/run", empty)
        again = await peers["env"].post("/verify", {**empty, "response": row["response"]})
    assert (row["reward"], again["reward"]) == (2.0, 2.0)
    observed = [item["content"] for item in row["response"]["output"] if item.get("role") == "user"]
    assert observed == [[SHOWN], [{"type": "input_text", "text": "Seen."}, SHOWN]]
    assert [item["content"] for item in seen[-1] if item.get("role") == "user"] == observed


async def test_observations_of_other_types_are_text_as_before() -> None:
    async def nothing(task: VerifyRequest, session: Session) -> Any:
        return None

    async def various(task: VerifyRequest, session: Session) -> Any:
        seen: dict[str, Any] = {"one": [1, 2], "two": ["two", "texts"], "three": ""}
        return Step(seen[task.text], terminated=task.text == "three")

    env, actor = (
        step_server(task=VerifyRequest, reset=nothing, step=various),
        load(ROOT / "agents/gymnasium/app.py").app,
    )
    policy = load(ROOT / "models/scripted/app.py").app
    replies = [{"turn": turn, "text": text} for turn, text in enumerate(("one", "two", "three"), 1)]
    options = {"policy": {"replies": replies}, "actor": {"gym": "env", "model": "policy"}}
    async with local_services(options, policy=policy, env=env, actor=actor) as peers:
        row = await peers["actor"].post("/run", TASK)
    observed = [item["content"] for item in row["response"]["output"] if item.get("role") == "user"]
    assert observed == ["[1,2]", [{"type": "input_text", "text": "two"}, {"type": "input_text", "text": "texts"}]]


async def test_a_step_over_mcp_shows_its_image() -> None:
    mcp = pytest.importorskip("mcp")
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared._httpx_utils import create_mcp_http_client

    async with local_services(env=step_server(task=VerifyRequest, reset=reset, step=step)) as peers:
        session = peers["env"].session()
        await session.post("/reset", TASK)
        http = create_mcp_http_client(headers={SESSION_HEADER: session.id})
        url = f"{peers.urls['env'][0]}/mcp"
        async with http, mcp.Client(streamable_http_client(url, http_client=http)) as client:
            parts = (await client.call_tool("say", {"text": "Done."})).content
    assert [part.type for part in parts] == ["text", "image", "text"]
    assert parts[-1].text == '{"over":true}'


async def test_another_file_is_an_error_of_the_environment() -> None:
    async def text_file() -> Image:
        """Look."""
        return Image(b"not an image")

    async with local_services(env=gym_server(tools=[text_file], verify=verify)) as peers:
        with pytest.raises(ServiceError, match=r"12 bytes are not a PNG, JPEG, GIF or WebP file") as caught:
            await peers["env"].session().post("/text_file", {})
    assert caught.value.failure == "tool_error"
    with pytest.raises(TypeError, match="not int"):
        Image(7)


@pytest.mark.parametrize("body", [{}, [], "text", [{"type": "input_file"}], [{"type": "input_image"}]])
async def test_a_server_that_announces_parts_and_sends_something_else_fails_the_rollout(body: Any) -> None:
    async def other(request: Request) -> Response:
        return JsonResponse(body, headers={TOOL_OUTPUT_HEADER: "parts"})

    env = gym_server(verify=verify)
    add_route(env, "POST", "/look", other, summary="Look")
    tool = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
    task = {"responses_create_params": {"input": "Look.", "tools": [tool]}}
    actor, policy = load(ROOT / "agents/simple/app.py").app, load(ROOT / "models/scripted/app.py").app
    options = {"policy": {"replies": LOOK}, "actor": {"gym": "env", "model": "policy"}}
    async with local_services(options, policy=policy, env=env, actor=actor) as peers:
        with pytest.raises(ServiceError, match="look answered with x-ng-tool-output: parts, but not") as caught:
            await peers["actor"].post("/run", task)
    assert caught.value.failure == "tool_error"
