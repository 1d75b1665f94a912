"""How many tests does this code pass? It runs in the sandbox, and what it should have answered never goes there."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ngym.sandbox import Limits, Result, Sandbox

from .comparing import same, same_output
from .task import CodeTask

HARNESS = Path(__file__).with_name("harness.py").read_text()


@dataclass(frozen=True)
class Score:
    """passed: tests. reason: what the first that failed did instead. infra: the sandbox failed, and nothing is known."""

    passed: int
    reason: str | None
    tier: str
    infra: bool = False


async def of_function(sandbox: Sandbox, code: str, task: CodeTask, limits: Limits, partial: bool) -> Score:
    """All calls in one run. Each answer comes with its call's number; a call without one has failed."""
    calls = [{"args": case.args, "kwargs": case.kwargs} for case in task.cases]
    given = json.dumps({"source": code, "function": task.function, "calls": calls, "all": partial})
    result = await sandbox.run(HARNESS, stdin=given, limits=limits)
    if result.verdict == "infra_error":
        return Score(0, result.detail, result.tier, infra=True)
    answers = _answers(result.answer)
    wrong = [
        number
        for number, case in enumerate(task.cases)
        if not _returned(answers.get(number), case.expected, task.tolerance)
    ]
    reason = None if not wrong else _why(wrong[0], answers.get(wrong[0]), result)
    return Score(len(task.cases) - len(wrong), reason, result.tier)


async def of_program(sandbox: Sandbox, code: str, task: CodeTask, limits: Limits, partial: bool) -> Score:
    """A run for each test, one after another."""
    passed, reason, tier = 0, None, ""
    for number, case in enumerate(task.cases):
        result = await sandbox.run(code, stdin=case.stdin, limits=limits)
        tier = result.tier
        if result.verdict == "infra_error":
            return Score(0, result.detail, tier, infra=True)
        if result.verdict == "ok" and same_output(case.stdout, result.stdout, task.tolerance):
            passed += 1
            continue
        reason = reason or _why(number, None, result)
        if not partial:
            break
    return Score(passed, reason, tier)


def _returned(answer: dict[str, Any] | None, expected: Any, tolerance: float) -> bool:
    """Whether the call returned the value. An exception returned nothing, which is not null."""
    return answer is not None and "value" in answer and same(expected, answer["value"], tolerance)


def _answers(text: str) -> dict[int, dict[str, Any]]:
    """Call number -> what it answered: `value` or `error`. What cannot be read is no answer; the first one counts."""
    answers: dict[int, dict[str, Any]] = {}
    for line in text.splitlines():
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(answer, dict) and type(answer.get("call")) is int and ("value" in answer) != ("error" in answer):
            answers.setdefault(answer["call"], answer)
    return answers


def _why(number: int, answer: dict[str, Any] | None, result: Result) -> str:
    if answer is not None:
        return f"test {number}: {str(answer.get('error', 'another value'))[:300]}"
    if result.verdict == "ok":
        return f"test {number}: another output, or no answer"
    last = result.stderr.strip().rpartition("\n")[2][:300]
    return f"test {number}: {result.verdict}: {result.detail}" + (f": {last}" if last else "")
