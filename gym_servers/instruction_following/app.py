"""instruction_following: instructions that code can check (IFEval, IFBench, RLVR). Rewards those that are followed."""

from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from ngym import ServiceOptions, VerifyRequest, gym_server
from ngym.grading.answers import without_reasoning
from ngym.grading.reward_parts import Shaping, shaped, weighted
from ngym.schema import Json
from ngym.workers import WorkerPool

from .checker import CHECKS

pool = WorkerPool(Path(__file__).with_name("checker.py"), "check_instructions", deadline_s=5.0, memory_mib=512)

READINGS = ("strict", "loose")


class FollowingOptions(ServiceOptions):
    reading: Literal["strict", "loose"] = Field(
        default="strict", description="Loose: also without asterisks, first line, last line."
    )
    shaping: Shaping = Shaping()


class FollowingTask(VerifyRequest):
    instruction_id_list: list[str]  # as in IFEval's rows: ids, and the arguments of each
    kwargs: list[dict[str, Any] | None]
    grading_mode: Literal["binary", "fraction"] = (
        "binary"  # binary: 1 if all are followed, else 0; fraction: the share that is followed
    )

    @model_validator(mode="before")
    @classmethod
    def _one_verifier(cls, row: Any) -> Any:
        """NeMo Gym's `verifier: {type: ..., arguments}` (format_verification, citation_if) is one instruction."""
        if not isinstance(row, dict) or "instruction_id_list" in row or not isinstance(row.get("verifier"), dict):
            return row
        name = f"verifier:{row['verifier'].get('type')}"
        arguments = {key: value for key, value in row["verifier"].items() if key != "type"}
        return {**row, "instruction_id_list": [name], "kwargs": [arguments]}

    @property
    def instructions(self) -> list[tuple[str, dict[str, Any]]]:
        """Each id with its arguments. Drops null arguments, which IFEval's rows have for other instructions."""
        pairs = zip(self.instruction_id_list, self.kwargs, strict=True)
        return [
            (name, {key: value for key, value in (arguments or {}).items() if value is not None})
            for name, arguments in pairs
        ]

    @model_validator(mode="after")
    def _known(self) -> "FollowingTask":
        if not self.instruction_id_list or len(self.instruction_id_list) != len(self.kwargs):
            raise ValueError("instruction_id_list and kwargs need one entry for each instruction, at least one")
        for name, arguments in self.instructions:
            if name not in CHECKS:
                raise ValueError(f"unknown instruction {name!r}; known: {', '.join(CHECKS)}")
            try:
                CHECKS[name]("", **arguments)
            except ValidationError as error:
                problem = error.errors()[0]
                raise ValueError(f"{name}: {'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None
            except Exception as error:  # noqa: BLE001  (the row is the cause, as with a pattern of too large a repeat)
                raise ValueError(f"{name} cannot be checked: {type(error).__name__}: {error}") from None
        return self


async def verify(task: FollowingTask, options: FollowingOptions) -> dict[str, Any]:
    checked = await pool.run(without_reasoning(task.text), task.instructions)
    if checked.kind != "ok":
        failure = checked.failure()
        if failure["reward"] is not None:
            failure |= {f"followed_{reading}": [False] * len(task.instructions) for reading in READINGS}
        return shaped(failure, task.response, options.shaping)
    results = {reading: checked.value[reading] for reading in READINGS}
    scores = {reading: score(results[reading], task.grading_mode) for reading in READINGS}
    paid = weighted(scores, {reading: float(reading == options.reading) for reading in READINGS})
    fields: dict[str, Any] = {f"followed_{reading}": results[reading] for reading in READINGS}
    if checked.value["errors"]:
        crashes = "; ".join(f"{name}: {error}" for name, error in checked.value["errors"].items())
        fields |= {"outcome": "unverifiable", "reason": f"a check crashed: {crashes}"}
    else:
        fields["outcome"] = "followed" if scores[options.reading] == 1.0 else "not_followed"
    return shaped({**paid, **fields}, task.response, options.shaping)


def score(results: list[bool | None], mode: str) -> float | None:
    """None if a check crashed: that is not a wrong answer."""
    known = [each for each in results if each is not None]
    if len(known) < len(results):
        return None
    return float(all(known)) if mode == "binary" else sum(known) / len(known)


def compute_metrics(rows: list[Json]) -> dict[str, float]:
    """IFEval's four accuracies (arXiv 2311.07911): prompt level and instruction level, strict and loose.

    Rows that were not checked, because the machine failed or a check crashed, do not count.
    """
    numbers = {}
    for reading in READINGS:
        results = [each for row in rows if None not in (each := row.get(f"followed_{reading}", [None]))]
        if results:
            numbers[f"prompt_level/{reading}"] = fmean(map(all, results))
            numbers[f"instruction_level/{reading}"] = fmean(chain.from_iterable(results))
    return numbers


app = gym_server(verify=verify, options=FollowingOptions, lifespan=pool.lifespan, compute_metrics=compute_metrics)
