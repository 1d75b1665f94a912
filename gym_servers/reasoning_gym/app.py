"""reasoning_gym: the library's tasks by name, seed and index, scored by its own scorers in worker processes."""

import json
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator
from reasoning_gym.factory import DATASETS

from ngym import ServiceOptions, VerifyRequest, gym_server
from ngym.did_you_mean import did_you_mean
from ngym.grading.answers import without_reasoning
from ngym.workers import WorkerOutcome, WorkerPool

os.environ["PYTHONHASHSEED"] = "0"  # for the workers: some tasks depend on the order of sets
pool = WorkerPool(Path(__file__).with_name("checker.py"), "check")

REFUSED = {
    "boxnet": "no answer of its tasks is known to be right, and its scorer raises on many wrong ones",
    "composite": "it mixes other datasets; use rows of those datasets instead",
    "propositional_logic": "a copied premise gets the full score",
    "rush_hour": "no answer of its tasks is known to be right",
}
PLAIN_ANSWER = "0"
OPENING, CLOSING = "<answer>", "</answer>"


class Options(ServiceOptions):
    reward: Literal["correct", "score"] = Field(
        default="correct",
        description="correct: 1 or 0; score: the library's own score, which includes points for any attempt.",
    )
    deadline_s: float = Field(
        default=10.0, gt=0, description="CPU seconds to generate a task and to score an answer, each."
    )


class Task(VerifyRequest):
    dataset: str
    seed: int = Field(ge=0)
    index: int = Field(default=0, ge=0, le=10_000)
    config: dict[str, Any] = Field(default_factory=dict)
    fingerprint: str | None = None  # of the question; null reward if the library generates another one

    entry: dict[str, Any] | None = None  # the library's own entry, if the row has no seed to generate it from

    @model_validator(mode="before")
    @classmethod
    def _an_entry(cls, row: Any) -> Any:
        """NeMo Gym's rows are entries of the library: question, answer and metadata, which names the dataset."""
        if not isinstance(row, dict) or "dataset" in row or not isinstance(row.get("metadata"), dict):
            return row
        entry = {name: row.get(name) for name in ("question", "answer", "metadata")}
        return {**row, "dataset": row["metadata"].get("source_dataset"), "seed": 0, "entry": entry}

    @field_validator("dataset")
    @classmethod
    def _is_trusted(cls, name: str) -> str:
        if name in REFUSED:
            raise ValueError(f"dataset {name} is not supported: {REFUSED[name]}")
        if name not in DATASETS:
            raise ValueError(f"the library has no dataset {name!r}{did_you_mean(name, DATASETS)}")
        return name


async def verify(task: Task, options: Options) -> dict[str, Any]:
    answer = answer_in(task.text)
    if answer is None:
        return {**outcome_fields("wrong", 0.0, "no answer was found", options), "extracted_answer": None}
    checked = await score_answer(task, answer, options)
    if checked.kind == "ok":
        return {**outcome_fields(**checked.value, options=options), "extracted_answer": answer}
    failure = checked.failure()
    if not checked.infra:  # the answer's fault, unless the task cannot be generated in time
        plain = await score_answer(task, PLAIN_ANSWER, options)
        if plain.kind != "ok" and not plain.infra:
            failure = {"reward": None, "outcome": "unverifiable", "reason": f"the task: {plain.kind}: {plain.detail}"}
    correct = None if failure["reward"] is None else False
    return {**failure, "score": failure["reward"], "is_correct": correct, "extracted_answer": answer}


async def score_answer(task: Task, answer: str, options: Options) -> WorkerOutcome:
    config = json.dumps(task.config, sort_keys=True)
    row = (task.dataset, task.seed, task.index, config, task.fingerprint)
    return await pool.run(*row, answer, task.entry, deadline_s=options.deadline_s)


def outcome_fields(outcome: str, score: float | None, reason: str | None, options: Options) -> dict[str, Any]:
    """The response for a verdict of the checker. An `infra_error` is a fault of the row or the library."""
    correct = outcome == "correct" if outcome in ("correct", "wrong") else None
    reward = None if correct is None else score if options.reward == "score" else float(correct)
    return {"reward": reward, "is_correct": correct, "outcome": outcome, "score": score, "reason": reason}


def answer_in(text: str) -> str | None:
    """The content of the last <answer>, or the whole text without such a tag. None if empty or the tag is open."""
    text = without_reasoning(text)
    if OPENING in text:
        inside, closed, _ = text.rpartition(OPENING)[2].partition(CLOSING)
        text = inside if closed else ""
    return text.strip() or None


app = gym_server(verify=verify, options=Options, lifespan=pool.lifespan)
