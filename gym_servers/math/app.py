"""math: a final formula or number. Reward 1 or 0 by math-verify; null, with a reason, if row or machine fails."""

from pathlib import Path
from typing import Any

from pydantic import Field, StrictFloat, StrictInt

from ngym import ServiceOptions, VerifyRequest, gym_server
from ngym.extras import require
from ngym.grading.answers import formula
from ngym.services.gym.server import ReferenceText
from ngym.workers import WorkerOutcome, WorkerPool

require("math", "gym_servers/math", "math-verify")  # workers import it, which is later
pool = WorkerPool(Path(__file__).with_name("checker.py"), "check", warm="warm")
REWARD = {"correct": 1.0, "wrong": 0.0, "too_heavy": 0.0, "unverifiable": None}
PLAIN_ANSWER = "0"


class MathOptions(ServiceOptions):
    deadline_s: float = Field(default=5.0, description="CPU seconds for one comparison.")


class MathTask(VerifyRequest):
    expected_answer: ReferenceText | StrictInt | StrictFloat
    simplified: bool = False  # an answer with more operations left than expected_answer is wrong


async def verify(task: MathTask, options: MathOptions) -> dict[str, Any]:
    answer = formula(task.text)
    if answer is None:
        return {"reward": 0.0, "outcome": "wrong", "reason": "no answer was found", "extracted_answer": None}
    expected = str(task.expected_answer)
    checked = await pool.run(expected, answer, task.simplified, deadline_s=options.deadline_s)
    if checked.kind == "ok":
        verdict = {"reward": REWARD[checked.value["outcome"]], **checked.value}
    else:
        verdict = await failure(checked, expected, options.deadline_s)
    return {**verdict, "extracted_answer": answer}


async def failure(checked: WorkerOutcome, expected: str, deadline_s: float) -> dict[str, Any]:
    """0 for an answer that was not compared in time; null if a plain answer cannot be compared either."""
    if not checked.infra:
        plain = await pool.run(expected, PLAIN_ANSWER, False, deadline_s=deadline_s)
        if plain.kind != "ok" and not plain.infra:
            reason = f"expected_answer cannot be compared with anything: {plain.kind}: {plain.detail}"
            return {"reward": None, "outcome": "unverifiable", "reason": reason}
    return checked.failure()


app = gym_server(verify=verify, options=MathOptions, lifespan=pool.lifespan)
