"""mcqa: multiple choice. Reward 1 when the chosen option's letter is the expected one."""

from contextlib import aclosing
from pathlib import Path
from typing import Any

from ngym import gym_server
from ngym.workers import WorkerPool

from .extraction import MAX_CHARS, chosen
from .task import McqaTask

pool = WorkerPool(Path(__file__).with_name("extraction.py"), "search", workers=1, deadline_s=1.0)


async def verify(task: McqaTask) -> dict[str, Any]:
    letter = None
    if task.patterns:  # the row's own patterns come first, in a worker: a pattern may run wild on what a model writes
        found = await pool.run(task.patterns, task.text[-MAX_CHARS:])
        if found.kind != "ok":
            failure = found.failure()
            return {**failure, "extracted_answer": None, "reason": f"output_regex: {failure['reason']}"}
        letter = (found.value or "").strip().upper()
    if letter not in task.choices:
        letter = chosen(task.text, task.choices, task.grading_mode)
    return {"reward": float(letter == task.expected_answer), "extracted_answer": letter}


app = gym_server(verify=verify, lifespan=lambda context: aclosing(pool))
