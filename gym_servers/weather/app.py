"""weather: one tool. Reward 1 when the model looked up the right city and named its weather and no other."""

from typing import Any
from zlib import crc32

from pydantic import BaseModel

from ngym import VerifyRequest, gym_server

from .trajectory import place, reported

SKIES = ("sunny", "rainy", "cloudy", "windy", "foggy", "snowy", "stormy", "cold", "warm", "hazy")


class GetWeather(BaseModel):
    city: str


class WeatherTask(VerifyRequest):
    expected_city: str | None = None


async def get_weather(body: GetWeather) -> dict[str, str]:
    """Get the current weather of a city."""
    sky = SKIES[crc32(place(body.city).encode()) % len(SKIES)]
    return {"city": body.city, "weather_description": f"The weather in {body.city} is {sky}."}


async def verify(task: WeatherTask) -> dict[str, Any]:
    if task.expected_city is None:  # NeMo Gym's rows have no such field, and its example gives 1 to every rollout
        return {"reward": 1.0}
    sky = reported(task.response, task.expected_city)
    said = task.text.casefold()
    named = {word for word in (*SKIES, sky) if word and word in said}
    return {"reward": float(sky is not None and named == {sky}), "reported_weather": sky}


app = gym_server(tools=[get_weather], verify=verify)
