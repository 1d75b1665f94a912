"""Functions as tools: the schema comes from type hints, descriptions from the docstring; errors are one line."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from fastapi import Depends
from local_services import local_services
from pydantic import BaseModel, Field

from ngym import ConfigError, Session, ToolError, VerifyRequest, gym_server

PARAMS = {"responses_create_params": {"input": "a question"}}


class Place(BaseModel):
    city: str


async def look(word: str, limit: int = 5, *, session: Session) -> str:
    """Look a word up.

    The dictionary is small.

    Args:
        word: The word to look up,
            in lower case.
        limit (int): How many entries at most.

    Returns:
        The entries.
    """
    session["seen"] = word
    return f"{word}:{limit}"


def travel(
    to: Place, by: Literal["train", "car"], stops: list[str] | None = None, hours: Annotated[int, Field(ge=1)] = 1
) -> dict[str, Any]:
    """Travel."""
    return {"city": to.city, "by": by, "stops": stops, "hours": hours}


async def where(session: Session) -> str:
    """Tell the word that was seen."""
    return str(session.get("seen"))


async def copy(json: str) -> str:
    return json


async def verify(task: VerifyRequest, session: Session) -> float:
    return float(session.get("seen") == "stone")


async def test_type_hints_and_a_docstring_are_the_schema_of_a_tool():
    async with local_services(gym=gym_server(tools=[look, travel, where, copy], verify=verify)) as peers:
        tools = {tool["name"]: tool for tool in await peers["gym"].get("/tools")}
    described = tools["look"]
    assert described["description"] == "Look a word up.\n\nThe dictionary is small."
    assert described["parameters"] == {
        "type": "object",
        "properties": {
            "word": {"type": "string", "description": "The word to look up, in lower case."},
            "limit": {"type": "integer", "default": 5, "description": "How many entries at most."},
        },
        "required": ["word"],
        "additionalProperties": False,
    }
    assert tools["where"]["parameters"] == {"type": "object", "properties": {}, "additionalProperties": False}
    assert tools["travel"]["parameters"]["properties"]["by"] == {"enum": ["train", "car"], "type": "string"}
    assert tools["travel"]["parameters"]["required"] == ["to", "by"]


async def test_functions_get_their_arguments_and_the_session_and_wrong_ones_are_for_the_model():
    async with local_services(gym=gym_server(tools=[look, travel, where, copy], verify=verify)) as peers:
        session = peers["gym"].session()
        await session.post("/seed_session", PARAMS)
        assert await session.post("/look", {"word": "stone"}) == "stone:5"
        assert await session.post("/where", {}) == "stone"
        assert await session.post("/copy", {"json": "{}"}) == "{}"
        there = {"to": {"city": "Rome"}, "by": "train", "hours": 2}
        assert await session.post("/travel", there) == {"city": "Rome", "by": "train", "stops": None, "hours": 2}
        for wrong in ({"word": "stone", "limit": "many"}, {}):
            with pytest.raises(Exception, match=r"field .(limit|word).") as caught:
                await session.post("/look", wrong)
            assert getattr(caught.value, "is_for_the_model", False) or isinstance(caught.value, ToolError)
        scored = await session.post("/verify", {**PARAMS, "response": {"output": []}})
        assert scored["reward"] == 1.0


async def untyped(word) -> str:
    return word


async def spread(*words: str) -> str:
    return ""


async def with_dict(body: dict[str, str]) -> str:
    return ""


async def misdescribed(word: str) -> str:
    """Look.

    Args:
        wrod: The word.
    """
    return word


async def depends(word: str, place: Annotated[str, Depends(lambda: "here")]) -> str:
    return word


async def unusual(word: type(sys)) -> str:  # type: ignore[valid-type]
    return ""


@pytest.mark.parametrize(
    ("tool", "says"),
    [
        (untyped, r"untyped: parameter 'word' needs a type such as `str`, or a pydantic model"),
        (spread, r"spread: parameter 'words' cannot be filled by name"),
        (with_dict, r"with_dict: a dict has no schema that a model could follow: write a parameter for each argument"),
        (misdescribed, r"misdescribed: its docstring describes 'wrod', which is not a parameter"),
        (depends, r"depends: parameter 'place': Depends\(\) works in routes that you add to `app` yourself"),
        (unusual, r"unusual: its parameters cannot be arguments of a tool: "),
    ],
)
def test_a_signature_that_cannot_work_is_one_line_with_its_place(tool: Any, says: str):
    with pytest.raises(ConfigError, match=rf"test_functions_as_tools\.py:\d+: {says}") as caught:
        gym_server(tools=[tool], verify=verify)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("signature", "says"),
    [
        ("task", "verify: parameter 'task' needs a type: VerifyRequest, or a record derived from it"),
        ("task: dict", "verify: parameter 'task' is of type dict; take one parameter of type VerifyRequest, or"),
        ("", "verify: no parameter is a VerifyRequest, or a record derived from it"),
    ],
)
def test_a_service_whose_verify_has_no_usable_type_says_so_in_one_line(tmp_path: Path, signature: str, says: str):
    app = tmp_path / "app.py"
    app.write_text(
        f"from ngym import gym_server\n\nasync def verify({signature}) -> float:\n    return 1.0\n\n"
        "app = gym_server(verify=verify)\n"
    )
    (tmp_path / "global_config.yaml").write_text(f"mine: {{kind: gym_server, app: {app}}}\n")
    ended = subprocess.run(
        [sys.executable, "-m", "ngym", "validate"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    assert ended.returncode == 2
    assert len(lines) == 1, ended.stderr
    assert f"{app}:3: {says}" in lines[0]
