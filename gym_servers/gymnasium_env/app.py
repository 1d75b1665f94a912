"""gymnasium_env: any gymnasium environment whose actions can be written as text, played turn by turn."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import registry
from pydantic import Field

from ngym import ServiceError, ServiceOptions, Session, Step, VerifyRequest, step_server
from ngym.did_you_mean import did_you_mean
from ngym.grading.answers import move
from ngym.services.gym.results import Image, Observation
from ngym.services.gym.step_server import turns_of

MAX_CHARS = 10_000
MAX_NUMBERS = 256  # of an observation; a larger one is a picture
REFUSALS = 3  # invalid answers in an episode that are only reported; each further one plays at random
FIRST = threading.Lock()  # held while an environment is made for the first time
imported: set[str] = set()  # ids of environments that have been made
HOW = "Say your action alone in the last line, or in \\boxed{}."


class NoAction(Exception):
    """The answer is not an action of the space; the message says why."""


def describe_space(space: spaces.Space[Any]) -> str:
    """The form of an action, in words."""
    match space:
        case spaces.Discrete():
            return f"a whole number from {space.start} to {space.start + space.n - 1}"
        case spaces.MultiDiscrete():
            ranges = ", ".join(
                f"{low} to {low + n - 1}" for low, n in zip(space.start.flat, space.nvec.flat, strict=True)
            )
            return f"a JSON list of {space.nvec.size} whole numbers ({ranges})"
        case spaces.MultiBinary():
            return f"a JSON list of {math.prod(space.shape)} numbers, each 0 or 1"
        case spaces.Box():
            return f"a JSON list of shape {list(space.shape)} of numbers from {format_bound(space.low)} to {format_bound(space.high)}"
        case spaces.Text():
            return f"a text of {space.min_length} to {space.max_length} characters, as a JSON string"
        case spaces.Tuple():
            return f"a JSON list of: {'; '.join(describe_space(part) for part in space.spaces)}"
        case spaces.Dict():
            return "a JSON object of: " + "; ".join(
                f'"{key}": {describe_space(part)}' for key, part in space.spaces.items()
            )
    raise NotImplementedError(f"a space of kind {type(space).__name__} has no text form")


def format_bound(values: Any) -> str:
    return f"{values.flat[0]:g}" if np.all(values == values.flat[0]) else str(values.tolist())


def action_in(space: spaces.Space[Any], text: str) -> Any:
    """Parse an answer as an action. Raises NoAction."""
    try:
        value = json.loads(text[:MAX_CHARS], parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise NoAction(f"it must be {describe_space(space)}, and {text[:40]!r} is not JSON") from None
    if isinstance(space, spaces.Box) and space.shape == (1,) and not isinstance(value, list):
        value = [value]
    action = _read(space, value)
    if not space.contains(action):
        raise NoAction(f"it must be {describe_space(space)}")
    return action


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _read(space: spaces.Space[Any], value: Any) -> Any:
    match space, value:
        case spaces.Discrete(), int() if not isinstance(value, bool) and abs(value) < 2**62:
            return np.int64(value)
        case ((spaces.MultiDiscrete() | spaces.MultiBinary()), list()):
            return _array(value, int, space)
        case spaces.Box(), list():
            return _array(value, int if np.issubdtype(space.dtype, np.integer) else float, space)
        case spaces.Text(), str():
            return value
        case spaces.Tuple(), list() if len(value) == len(space.spaces):
            return tuple(_read(part, item) for part, item in zip(space.spaces, value, strict=True))
        case spaces.Dict(), dict() if value.keys() == space.spaces.keys():
            return {key: _read(part, value[key]) for key, part in space.spaces.items()}
    raise NoAction(f"it must be {describe_space(space)}")


def _array(value: list[Any], kind: type, space: spaces.Space[Any]) -> Any:
    allowed = (int,) if kind is int else (int, float)
    if not all(type(leaf) in allowed and abs(leaf) < 1e15 for leaf in _leaves(value)):
        raise NoAction(f"it must be {describe_space(space)}")
    try:
        return np.array(value, dtype=space.dtype)
    except (ValueError, OverflowError):  # lists of different lengths
        raise NoAction(f"it must be {describe_space(space)}") from None


def _leaves(value: Any) -> list[Any]:
    return [leaf for item in value for leaf in _leaves(item)] if isinstance(value, list) else [value]


def format_observation(space: spaces.Space[Any], value: Any) -> str:
    """An observation as JSON; numbers have six significant digits."""
    return json.dumps(_plain(space, value), ensure_ascii=False)


def _plain(space: spaces.Space[Any], value: Any) -> Any:
    match space:
        case spaces.Tuple():
            return [_plain(part, item) for part, item in zip(space.spaces, value, strict=True)]
        case spaces.Dict():
            return {key: _plain(part, value[key]) for key, part in space.spaces.items()}
        case spaces.Text():
            return value
    numbers = np.asarray(value)
    if numbers.size > MAX_NUMBERS:
        raise NotImplementedError(f"an observation of {numbers.size} numbers is a picture, which has no text form")
    if np.issubdtype(numbers.dtype, np.floating):
        return _rounded(numbers.tolist())
    return numbers.tolist()


def _rounded(value: Any) -> Any:
    return [_rounded(item) for item in value] if isinstance(value, list) else float(f"{value:.6g}")


def is_picture(space: spaces.Space[Any]) -> bool:
    """Whether the observations are images: [height, width, 3], 0 to 255."""
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3 and space.shape[2] == 3


def draw(pixels: Any) -> Image:
    from PIL.Image import fromarray

    return Image(fromarray(np.asarray(pixels)))


class Options(ServiceOptions):
    allowed: list[str] | None = Field(default=None, description="Ids; default: those that gymnasium itself registers.")
    max_turns: int = Field(
        default=200, ge=1, description="Actions in an episode, unless the environment's own limit is lower."
    )
    images: bool = Field(
        default=False, description="Show each observation as an image, too. Only for models that read images."
    )


class Task(VerifyRequest):
    env_id: str
    seed: int = Field(ge=0)
    kwargs: dict[str, Any] = Field(default_factory=dict)


class Episode:
    """One environment from its seed. `total`: the sum of the rewards so far."""

    def __init__(self, task: Task, options: Options) -> None:
        self.env = create_environment(task, options)
        self.images = options.images
        self.env.action_space.seed(task.seed)  # for random play
        self.remaining_turns = options.max_turns
        self.refused = 0
        self.total = 0.0
        self.is_over = False
        observation, _ = self.env.reset(seed=task.seed)
        self.look(observation)

    def look(self, observation: Any) -> None:
        """Store the observation as text and image."""
        space, self.image = self.env.observation_space, None
        if self.images:
            self.image = draw(observation if is_picture(space) else self.env.render())
            if is_picture(space):
                self.observation_text = "Observation: an image."
                return
        self.observation_text = f"Observation: {format_observation(space, observation)}"
        if self.env.render_mode == "ansi" and (rendered := self.env.render()):
            self.observation_text += f"\n\n{rendered.strip()}"

    def shown(self, text: str) -> Observation:
        """A text that has the observation's, with its image."""
        return text if self.image is None else [text, self.image]

    def play(self, action: Any, comment: str = "") -> Step:
        observation, reward, terminated, truncated, _ = self.env.step(action)
        self.remaining_turns -= 1
        self.total += float(reward)
        truncated = bool(truncated or self.remaining_turns == 0)
        self.is_over = bool(terminated or truncated)
        self.look(observation)
        text = f"{comment}Reward: {float(reward):g}\n{self.observation_text}" + (
            "\nThe episode is over." if self.is_over else ""
        )
        return Step(self.shown(text), reward=float(reward), terminated=bool(terminated), truncated=truncated)

    def say(self, text: str) -> Step:
        """Play the model's turn."""
        try:
            action = action_in(self.env.action_space, text)
        except NoAction as error:
            self.refused += 1
            if self.refused <= REFUSALS:
                unchanged = f"No action: {error}. Nothing has changed ({self.refused} of {REFUSALS})."
                return Step(self.shown(f"{unchanged}\n\n{self.observation_text}"))
            return self.play(self.env.action_space.sample(), f"No action: {error}. A random one was played.\n")
        return self.play(action)

    def play_out(self) -> float:
        """Play to the end at random. Returns what that adds to the total."""
        before = self.total
        while not self.is_over:
            self.play(self.env.action_space.sample())
        return self.total - before


def create_environment(task: Task, options: Options) -> Any:
    own = [name for name, spec in tuple(registry.items()) if str(spec.entry_point).startswith("gymnasium.envs.")]
    known = own if options.allowed is None else options.allowed
    if task.env_id not in known:
        raise ServiceError(f"env_id: {task.env_id!r} is not allowed here{did_you_mean(task.env_id, known)}", status=422)
    try:
        if task.env_id in imported:
            env = make(task, options)
        else:
            with FIRST:  # gymnasium's modules import one another, which fails in parallel threads
                env = make(task, options)
                imported.add(task.env_id)
        describe_space(env.action_space)
    except Exception as error:  # the row's kwargs, packages that are not installed, spaces without a text
        why = " ".join(str(error).split())[:300]
        raise ServiceError(f"{task.env_id} cannot be made: {type(error).__name__}: {why}", status=422) from error
    return env


def make(task: Task, options: Options) -> Any:
    spec = gymnasium.spec(task.env_id)
    mode = "rgb_array" if options.images else "ansi"
    drawing = {"render_mode": mode} if mode in modes(spec) else {}
    env = gymnasium.make(task.env_id, **task.kwargs, **drawing)
    if options.images and not drawing and not is_picture(env.observation_space):
        raise NotImplementedError(
            "it has no images (images: true): neither render mode rgb_array nor such observations"
        )
    return env


def modes(spec: Any) -> list[str]:
    entry = spec.entry_point
    env = gymnasium.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
    return list(getattr(env, "metadata", {}).get("render_modes") or [])


def begin_episode(task: Task) -> Episode:
    return Episode(task, app.state.context.options)


async def reset(task: Task, session: Session) -> Observation:
    episode: Episode = await asyncio.to_thread(begin_episode, task)
    session["episode"] = episode
    env = episode.env
    rules = f"You act in {task.env_id} of gymnasium. An action is {describe_space(env.action_space)}. {HOW}"
    return episode.shown(f"{rules}\n\n{episode.observation_text}")


async def step(task: Task, session: Session) -> Step:
    return await asyncio.to_thread(session["episode"].say, move(task.text).strip())


async def verify(task: Task, session: Session) -> dict[str, Any]:
    """The sum of the rewards. Unfinished episodes are played on at random and losses count, so giving up never pays."""
    episode = session.get("episode") or await replay(task)
    over, total = episode.is_over, episode.total
    lost = 0.0 if over else min(0.0, await asyncio.to_thread(episode.play_out))
    return {"reward": total + lost, "reward_components": {"return": total, "unfinished": lost}, "over": over}


async def replay(task: Task) -> Episode:
    """Replay a stored rollout from its seed."""
    episode = await asyncio.to_thread(begin_episode, task)
    for turn in turns_of(task.response):
        if not episode.is_over:
            text = task.model_copy(update={"response": {"output": turn}}).text
            await asyncio.to_thread(episode.say, move(text).strip())
    return episode


app = step_server(task=Task, reset=reset, step=step, verify=verify, options=Options)
