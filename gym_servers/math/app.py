"""math: a final formula or number. Reward 1 or 0 by math-verify; null, with a reason, where no verdict is reached."""

from pathlib import Path
from typing import Any

from ngym import ServiceOptions, VerifyRequest, gym_server
from ngym.answers import formula
from ngym.workers import WorkerPool

pool = WorkerPool(Path(__file__).with_name("checker.py"), "check", warm="warm")
REWARD = {"correct": 1.0, "wrong": 0.0, "unverifiable": None, "infra_error": None}


class MathOptions(ServiceOptions):
    deadline_s: float = 5.0  # CPU seconds for one comparison


class MathTask(VerifyRequest):
    expected_answer: str | int | float
    simplified: bool = False  # whether an answer with more left to compute than in expected_answer is wrong


async def verify(task: MathTask, options: MathOptions) -> dict[str, Any]:
    answer = formula(task.text)
    verdict: dict[str, Any] = {"outcome": "wrong", "reason": "no answer was found"}
    if answer is not None:
        checked = await pool.run(str(task.expected_answer), answer, task.simplified, deadline_s=options.deadline_s)
        failed = "infra_error" if checked.kind == "crash" else "unverifiable"
        verdict = checked.value or {"outcome": failed, "reason": f"{checked.kind}: {checked.detail}"}
    return {"reward": REWARD[verdict["outcome"]], "extracted_answer": answer, **verdict}


app = gym_server(verify=verify, options=MathOptions, lifespan=pool.lifespan)
