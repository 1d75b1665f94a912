"""A turn-based environment: guess a number. The environment answers each guess and rewards few guesses."""

import random
import re
from collections.abc import Iterator

import verifiers.v1 as vf

GUESSES = 7


class GuessData(vf.TaskData):
    seed: int


class GuessTask(vf.Task[GuessData]):
    @vf.reward(weight=0.1)
    async def spoke_in_numbers(self, trace: vf.Trace) -> float:
        replies = trace.assistant_messages
        return float(bool(replies) and all((reply.content or "").strip().isdigit() for reply in replies))


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        secret, reward = random.Random(task.data.seed).randint(1, 100), 0.0
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for remaining in reversed(range(GUESSES)):
                numbers = re.findall(r"\d+", segment.last_reply)
                if segment.terminated or not numbers:
                    break
                guess = int(numbers[-1])
                if guess == secret:
                    reward = 1.0 + remaining / GUESSES
                if guess == secret or not remaining:
                    break
                segment = await interaction.turn("higher" if guess < secret else "lower")
        interaction.trace.record_reward("found", reward, 0.5)


class GuessTaskset(vf.Taskset[GuessTask]):
    INFINITE = True

    def load(self) -> Iterator[GuessTask]:
        seed = 0
        while True:
            yield GuessTask(
                GuessData(prompt="I think of a number from 1 to 100. Guess it.", seed=seed), self.config.task
            )
            seed += 1


__all__ = ["GuessEnv", "GuessTaskset"]
