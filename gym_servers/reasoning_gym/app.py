"""reasoning_gym: the library's tasks by name, seed and index, scored by its own scorers in killable workers."""

import json
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator
from reasoning_gym.factory import DATASETS

from ngym import ServiceOptions, VerifyRequest, gym_server
from ngym.answers import without_reasoning
from ngym.near import did_you_mean
from ngym.workers import WorkerPool

os.environ["PYTHONHASHSEED"] = "0"  # for the workers: some tasks depend on the order of sets
pool = WorkerPool(Path(__file__).with_name("checker.py"), "check")

REFUSED = {
    "boxnet": "no answer of its tasks is known to be right, and its scorer stops at many that are not",
    "composite": "it mixes other datasets; name those in rows of their own",
    "propositional_logic": "a premise, copied, gets full marks",
    "rush_hour": "no answer of its tasks is known to be right",
}
OPENING, CLOSING = "<answer>", "</answer>"


class Options(ServiceOptions):
    reward: Literal["correct", "score"] = "correct"  # 1 or 0; or the library's score, with what it pays for trying
    deadline_s: float = Field(default=10.0, gt=0)  # CPU seconds to make a task and score an answer


class Task(VerifyRequest):
    dataset: str
    seed: int = Field(ge=0)
    index: int = Field(default=0, ge=0, le=10_000)
    config: dict[str, Any] = Field(default_factory=dict)
    fingerprint: str | None = None  # of the question; a library that makes another one of this row scores nothing

    @field_validator("dataset")
    @classmethod
    def _is_trusted(cls, name: str) -> str:
        if name in REFUSED:
            raise ValueError(f"{name} is not used: {REFUSED[name]}")
        if name not in DATASETS:
            raise ValueError(f"the library has no dataset {name!r}{did_you_mean(name, DATASETS)}")
        return name


async def verify(task: Task, options: Options) -> dict[str, Any]:
    answer = answer_in(task.text)
    verdict: dict[str, Any] = {"outcome": "wrong", "score": 0.0, "reason": "no answer was found"}
    if answer is not None:
        config = json.dumps(task.config, sort_keys=True)
        checked = await pool.run(
            task.dataset, task.seed, task.index, config, task.fingerprint, answer, deadline_s=options.deadline_s
        )
        failed = {
            "outcome": "infra_error" if checked.kind == "crash" else "unverifiable",
            "score": None,
            "reason": f"{checked.kind}: {checked.detail}",
        }
        verdict = checked.value or failed
    scored = verdict["outcome"] in ("correct", "wrong")
    correct = verdict["outcome"] == "correct"
    reward = (verdict["score"] if options.reward == "score" else float(correct)) if scored else None
    return {"reward": reward, "is_correct": correct if scored else None, "extracted_answer": answer, **verdict}


def answer_in(text: str) -> str | None:
    """What the last <answer> holds; the whole text where there is no such tag. None: nothing, or a tag left open."""
    text = without_reasoning(text)
    if OPENING in text:
        inside, closed, _ = text.rpartition(OPENING)[2].partition(CLOSING)
        text = inside if closed else ""
    return text.strip() or None


app = gym_server(verify=verify, options=Options, lifespan=pool.lifespan)
