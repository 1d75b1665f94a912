"""Where do the answers of a group stand among one another? The mean of their places in two orders, 1 the best and 0 the last."""

import asyncio
import random
from collections.abc import Awaitable, Callable

from ngym.grading.llm_judge import NO_VERDICT, PLAIN_TEXT, Verdict

MOST = 16
TIE = 0.5


async def places(
    answers: set[str], rank: Callable[[list[str]], Awaitable[Verdict[list[int]]]]
) -> dict[str, dict[str, float]] | str:
    """The halves of each answer's place, by order; or the reason why there are none.

    rank: texts as the judge is shown them -> their numbers, best first.
    """
    if len(answers) > MOST:
        return f"{len(answers)} different answers; a judge ranks {MOST} at most"
    if len(answers) == 1:  # nobody is better
        return {text: {"order": TIE / 2, "reversed": TIE / 2} for text in answers}
    order = random.sample(sorted(answers), len(answers))  # an order that followed from the texts could be learned
    found: dict[str, dict[str, float]] = {text: {} for text in order}
    shown = {"order": order, "reversed": order[::-1]}
    verdicts = await asyncio.gather(*map(rank, shown.values()))
    for (name, texts), verdict in zip(shown.items(), verdicts, strict=True):
        if verdict.value is None:
            return verdict.reason or verdict.outcome
        for number, text in enumerate(texts, start=1):
            found[text][name] = place(verdict.value, number) / 2
    return found


async def unrankable(
    answers: set[str], rank: Callable[[list[str], int], Awaitable[Verdict[list[int]]]]
) -> dict[str, str]:
    """The answers that the judge does not even rank beside a plain text, although it ranks another there; with the reason.

    rank: texts, and the number of the one that is judged -> their numbers, best first.
    """
    texts = sorted(answers)
    verdicts = await asyncio.gather(*(rank([PLAIN_TEXT, text], 2) for text in texts))
    return {
        text: verdict.reason or NO_VERDICT
        for text, verdict in zip(texts, verdicts, strict=True)
        if verdict.outcome == NO_VERDICT
    }


def place(order: list[int], ours: int) -> float:
    """1 for the best place, 0 for the last; order names the texts, best first, counted from 1."""
    return 1.0 - order.index(ours) / (len(order) - 1)
