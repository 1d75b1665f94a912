"""letters: the smallest task to learn. The reward is the share of one letter in the final text."""

from pydantic import Field

from ngym import VerifyRequest, gym_server


class LettersTask(VerifyRequest):
    letter: str = Field(min_length=1, max_length=1)


async def verify(task: LettersTask) -> float:
    return task.text.count(task.letter) / len(task.text) if task.text else 0.0


app = gym_server(verify=verify)
