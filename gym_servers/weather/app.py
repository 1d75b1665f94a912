"""weather: one tool. Reward 1 if the model looked up the right city and named its weather and no other."""

from __future__ import annotations

import json
from typing import Any
from zlib import crc32

from pydantic import AliasChoices, AliasPath, BaseModel, Field

from ngym import VerifyRequest, gym_server
from ngym.rollout import calls_in
from ngym.services.gym.server import ReferenceText

SKIES = ("sunny", "rainy", "cloudy", "windy", "foggy", "snowy", "stormy", "cold", "warm", "hazy")


def place(city: str) -> str:
    """A normalised city: `Paris, France` and `paris` are the same place."""
    return city.partition(",")[0].strip().casefold()


def reported_conditions(response: dict[str, Any], city: str) -> str | None:
    """The last word of the last weather description that `get_weather` returned for this city, or None."""
    items = response.get("output") or []
    outputs = {
        str(item.get("call_id")): item.get("output") for item in items if item.get("type") == "function_call_output"
    }
    word = None
    for item in items:
        is_call = item.get("type") == "function_call" and item.get("name") == "get_weather"
        if not is_call or place(_field(item.get("arguments"), "city")) != place(city):
            continue
        output = outputs.get(str(item.get("call_id")))
        if description := _field(output, "weather_description"):
            word = description.rstrip(" .").rpartition(" ")[2].casefold()
        elif isinstance(output, str):  # a tool of NeMo Gym answers in a sentence
            word = next((sky for sky in SKIES if sky in output.casefold()), word)
    return word


def _field(text: Any, name: str) -> str:
    """A string member of a JSON object in a string, or ""."""
    try:
        value = json.loads(text)[name]
    except (TypeError, ValueError, KeyError, IndexError, RecursionError):
        return ""
    return value if isinstance(value, str) else ""


class GetWeather(BaseModel):
    city: str


class WeatherTask(VerifyRequest):
    expected_city: ReferenceText | None = Field(
        default=None, validation_alias=AliasChoices("expected_city", AliasPath("verifier_metadata", "expected_city"))
    )


async def get_weather(body: GetWeather) -> dict[str, str]:
    """Get the current weather of a city."""
    sky = SKIES[crc32(place(body.city).encode()) % len(SKIES)]
    return {"city": body.city, "weather_description": f"The weather in {body.city} is {sky}."}


async def verify(task: WeatherTask) -> dict[str, Any]:
    if task.expected_city is None:  # a row of NeMo Gym, whose example rewards the call
        return {"reward": float(any(call.name == "get_weather" for call in calls_in(task.response)))}
    sky = reported_conditions(task.response, task.expected_city)
    text = task.text.casefold()
    mentioned = {word for word in (*SKIES, sky) if word and word in text}
    return {"reward": float(sky is not None and mentioned == {sky}), "reported_weather": sky}


app = gym_server(tools=[get_weather], verify=verify)
