"""A programming task: calls with the values they must return, or inputs with the output they must print."""

import json
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ngym import VerifyRequest


class Call(BaseModel):
    """A call of the function, and what it must return."""

    model_config = ConfigDict(extra="forbid")
    args: list[Any] = Field(default_factory=list)
    kwargs: dict[str, Any] = Field(default_factory=dict)
    expected: Any


class Execution(BaseModel):
    """A run of the program, and what it must print."""

    model_config = ConfigDict(extra="forbid")
    stdin: str = ""
    stdout: str


class CodeTask(VerifyRequest):
    """function: its name, for calls; without it the answer is a program. tolerance: relative, of numbers with a point.

    `verifier_metadata: {unit_tests: {inputs, outputs, fn_name}}`, as LiveCodeBench and NeMo Gym have it, is read too.
    """

    function: str | None = None
    cases: list[Call] | list[Execution] = Field(min_length=1)
    tolerance: float = 1e-6

    @model_validator(mode="before")
    @classmethod
    def _unit_tests(cls, row: Any) -> Any:
        if not isinstance(row, dict) or "cases" in row or not isinstance(row.get("verifier_metadata"), dict):
            return row
        tests = row["verifier_metadata"].get("unit_tests")
        tests = json.loads(tests) if isinstance(tests, str) else tests
        if not isinstance(tests, dict) or not {"inputs", "outputs"} <= tests.keys():
            return row  # the field `cases` is then told to be missing
        pairs = zip(tests["inputs"], tests["outputs"], strict=True)
        if not tests.get("fn_name"):
            return {**row, "cases": [{"stdin": given, "stdout": wanted} for given, wanted in pairs]}
        calls = [{"args": _arguments(given), "expected": _value(wanted)} for given, wanted in pairs]
        return {**row, "function": tests["fn_name"], "cases": calls}

    @model_validator(mode="after")
    def _kinds(self) -> Self:
        wanted = Call if self.function else Execution
        if not all(isinstance(case, wanted) for case in self.cases):
            raise ValueError("cases are {args, expected} beside a function, and {stdin, stdout} without one")
        return self


def _arguments(given: Any) -> list[Any]:
    """LiveCodeBench writes one argument a line, as JSON."""
    return [json.loads(line) for line in given.splitlines() if line.strip()] if isinstance(given, str) else list(given)


def _value(wanted: Any) -> Any:
    return json.loads(wanted) if isinstance(wanted, str) else wanted
