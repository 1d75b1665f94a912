"""code_exec: a Python function or program. Reward 1 if every hidden test passes; null if the sandbox failed."""

from __future__ import annotations

import gzip
import json
import re
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Self, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ngym import ConfigError, ServiceContext, ServiceOptions, VerifyRequest, gym_server
from ngym.grading.answers import fenced
from ngym.grading.number_match import close
from ngym.sandbox import Limits, Result, Sandbox, SandboxOptions, choose_sandbox
from ngym.sandbox.providers import LocalOptions
from ngym.services.base.options import InputFile

NUMBER = re.compile(r"[-+]?(?:[0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})(?:[eE][-+]?[0-9]{1,3})?")


def same(expected: Any, got: Any, tolerance: float) -> bool:
    """Equality of value and type: `True` is not 1, "1" is not 1.

    An expected float matches a float or int within the tolerance. An expected int matches a float only if `==` holds.
    """
    if type(expected) is int and isinstance(got, float):
        return expected == got
    if isinstance(expected, float):
        return not isinstance(got, bool) and isinstance(got, int | float) and close(expected, got, tolerance)
    if type(expected) is not type(got):
        return False
    if isinstance(expected, list):
        return len(expected) == len(got) and all(map(same, expected, got, [tolerance] * len(got)))
    if isinstance(expected, dict):
        return expected.keys() == got.keys() and all(
            same(value, got[key], tolerance) for key, value in expected.items()
        )
    return bool(expected == got)


def same_output(expected: str, got: str, tolerance: float) -> bool:
    """The same words on the same lines, ignoring spaces at line ends and empty lines before and after the text.

    An expected number with a decimal point matches within the tolerance; one without only an equal number (`5`, `5.0`).
    """
    expected_lines, lines = _lines(expected), _lines(got)
    if len(expected_lines) != len(lines):
        return False
    words = [(a.split(), b.split()) for a, b in zip(expected_lines, lines, strict=True)]
    return all(len(a) == len(b) and all(map(_same_word, a, b, [tolerance] * len(b))) for a, b in words)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().split("\n")]


def _same_word(expected: str, got: str, tolerance: float) -> bool:
    if expected == got:
        return True
    if not (NUMBER.fullmatch(expected) and NUMBER.fullmatch(got)):
        return False
    if "." not in expected:
        return Decimal(expected) == Decimal(got)
    return close(float(expected), float(got), tolerance)


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


class Tests(BaseModel):
    """Tests as code, in the namespace of the answer: `check(candidate)`, or classes of unittest."""

    test: str = Field(min_length=1)
    entry_point: str = Field(min_length=1)  # the function's name
    setup_code: str = ""  # runs before the answer
    code_prompt: str = ""  # the head of the function; the answer may rely on its imports
    prompt: str = ""  # as code_prompt; with a suffix, the text around the answer
    suffix: str | None = None  # fill-in-the-middle: the answer is between prompt and suffix

    def units(self, code: str) -> list[list[str]]:
        """The programs to run one after another, before the tests. Of several forms, the first that compiles is run."""
        if self.suffix is not None:
            middle = _strip_repeated_context(self.prompt, code, self.suffix)
            return [[self.prompt + part + self.suffix for part in (middle, middle.rstrip("\n"))]]
        head = self.code_prompt or self.prompt
        forms = [code, self.prompt + code] if self.prompt else [code]  # a whole function, or its body
        return [[self.setup_code], [f"{head.rstrip()}\n    pass\n" if head else ""], forms]


def _strip_repeated_context(prompt: str, code: str, suffix: str) -> str:
    """The missing part, without the lines of its surroundings that an answer repeats."""
    same = max((n for n in range(1, min(len(code), len(prompt)) + 1) if prompt.endswith(code[:n])), default=0)
    code = code[same:]
    same = max((n for n in range(1, min(len(code), len(suffix)) + 1) if suffix.startswith(code[-n:])), default=0)
    return code[: len(code) - same]


class CodeTask(VerifyRequest):
    """function: the name to call; without it the answer is a program. tolerance: relative, for numbers with a point.

    Also accepts `verifier_metadata: {unit_tests: {inputs, outputs, fn_name}}`, as in LiveCodeBench and NeMo Gym, and
    `verifier_metadata: {test, entry_point, ...}` (`Tests`) or `{task_id}`, whose tests are in the option `tests`.
    """

    function: str | None = None
    cases: list[Call] | list[Execution] = Field(default_factory=list)
    test_code: Tests | None = None
    task_id: str | None = None
    tolerance: float = 1e-6

    @model_validator(mode="before")
    @classmethod
    def _unit_tests(cls, row: Any) -> Any:
        if not isinstance(row, dict) or "cases" in row or not isinstance(row.get("verifier_metadata"), dict):
            return row
        own = row["verifier_metadata"]
        if "test" in own or "unit_tests" not in own:
            return {**row, "test_code": own if "test" in own else None, "task_id": own.get("task_id")}
        tests = own["unit_tests"]
        tests = json.loads(tests) if isinstance(tests, str) else tests
        if not isinstance(tests, dict) or not {"inputs", "outputs"} <= tests.keys():
            return row  # validation then reports that the field `cases` is missing
        pairs = zip(tests["inputs"], tests["outputs"], strict=True)
        if not tests.get("fn_name"):
            return {**row, "cases": [{"stdin": test_input, "stdout": test_output} for test_input, test_output in pairs]}
        calls = [{"args": _arguments(test_input), "expected": _value(test_output)} for test_input, test_output in pairs]
        return {**row, "function": tests["fn_name"], "cases": calls}

    @model_validator(mode="after")
    def _kinds(self) -> Self:
        if not self.cases and self.test_code is None and self.task_id is None:
            raise ValueError("a row needs cases, or verifier_metadata with unit_tests, test or task_id")
        case_type = Call if self.function else Execution
        if not all(isinstance(case, case_type) for case in self.cases):
            raise ValueError("cases must be {args, expected} with a function, and {stdin, stdout} without one")
        return self

    @property
    def calls(self) -> list[Call]:
        """The cases of a function."""
        return [case for case in self.cases if isinstance(case, Call)]

    @property
    def executions(self) -> list[Execution]:
        """The cases of a program."""
        return [case for case in self.cases if isinstance(case, Execution)]


def _arguments(test_input: Any) -> list[Any]:
    """LiveCodeBench writes one argument a line, as JSON."""
    return (
        [json.loads(line) for line in test_input.splitlines() if line.strip()]
        if isinstance(test_input, str)
        else list(test_input)
    )


def _value(test_output: Any) -> Any:
    return json.loads(test_output) if isinstance(test_output, str) else test_output


HARNESS = Path(__file__).with_name("function_harness.py").read_text()
TEST_HARNESS = Path(__file__).with_name("unittest_harness.py").read_text()


@dataclass(frozen=True)
class Score:
    """passed: number of tests. reason: of the first failure. infra: the sandbox failed, so there is no verdict."""

    passed: int
    reason: str | None
    tier: str
    infra: bool = False


async def score_function(sandbox: Sandbox, code: str, task: CodeTask, limits: Limits, partial: bool) -> Score:
    """Make all calls in one run. Each answer carries its call's number; a call without an answer has failed."""
    calls = [{"args": case.args, "kwargs": case.kwargs} for case in task.calls]
    stdin = json.dumps({"source": code, "function": task.function, "calls": calls, "all": partial})
    result = await sandbox.run(HARNESS, stdin=stdin, limits=limits)
    if result.verdict == "infra_error":
        return Score(0, result.detail, result.tier, infra=True)
    answers = _answers(result.answer)
    wrong = [
        number
        for number, case in enumerate(task.calls)
        if not _returns_expected(answers.get(number), case.expected, task.tolerance)
    ]
    reason = None if not wrong else _failure_text(wrong[0], answers.get(wrong[0]), result)
    return Score(len(task.cases) - len(wrong), reason, result.tier)


async def score_program(sandbox: Sandbox, code: str, task: CodeTask, limits: Limits, partial: bool) -> Score:
    """Run the program once for each test, one after another."""
    passed, reason, tier = 0, None, ""
    for number, case in enumerate(task.executions):
        result = await sandbox.run(code, stdin=case.stdin, limits=limits)
        tier = result.tier
        if result.verdict == "infra_error":
            return Score(0, result.detail, tier, infra=True)
        if result.verdict == "ok" and same_output(case.stdout, result.stdout, task.tolerance):
            passed += 1
            continue
        reason = reason or _failure_text(number, None, result)
        if not partial:
            break
    return Score(passed, reason, tier)


async def score_tests(sandbox: Sandbox, code: str, tests: Tests, limits: Limits) -> Score:
    """Run the answer and then its tests in one process. The answer that counts carries a nonce."""
    nonce = secrets.token_hex(16)
    request = {"units": tests.units(code), "test": tests.test, "entry_point": tests.entry_point, "nonce": nonce}
    result = await sandbox.run(TEST_HARNESS, stdin=json.dumps(request), limits=limits)
    if result.verdict == "infra_error":
        return Score(0, result.detail, result.tier, infra=True)
    reports = [line.partition(" ")[2] for line in result.answer.splitlines() if line.startswith(f"{nonce} ")]
    passed = reports == ["passed"]
    return Score(
        int(passed), None if passed else reports[0] if reports else _failure_text(0, None, result), result.tier
    )


def _returns_expected(answer: dict[str, Any] | None, expected: Any, tolerance: float) -> bool:
    """Whether the call returned the expected value. An exception is not the value null."""
    return answer is not None and "value" in answer and same(expected, answer["value"], tolerance)


def _answers(text: str) -> dict[int, dict[str, Any]]:
    """Call number -> its answer (`value` or `error`). Skips unreadable lines; the first answer of a call counts."""
    answers: dict[int, dict[str, Any]] = {}
    for line in text.splitlines():
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(answer, dict) and type(answer.get("call")) is int and ("value" in answer) != ("error" in answer):
            answers.setdefault(answer["call"], answer)
    return answers


def _failure_text(number: int, answer: dict[str, Any] | None, result: Result) -> str:
    if answer is not None:
        return f"test {number}: {str(answer.get('error', 'another value'))[:300]}"
    if result.verdict == "ok":
        return f"test {number}: another output, or no answer"
    last = result.stderr.strip().rpartition("\n")[2][:300]
    return f"test {number}: {result.verdict}: {result.detail}" + (f": {last}" if last else "")


class CodeOptions(ServiceOptions):
    sandbox: SandboxOptions = Field(default=LocalOptions(), description="Where programs run.")
    limits: Limits = Field(
        default=Limits(cpu_s=5), description="Of one run: one test of a program, or all calls of a function."
    )
    tests: InputFile | None = Field(
        default=None,
        description="A file of JSON lines with `task_id`, `test`, `entry_point`, for rows with a task_id; relative to the "
        "config's folder.",
    )
    partial: bool = Field(
        default=False,
        description="Reward the share of tests that pass; otherwise the first failed test ends the check.",
    )


@asynccontextmanager
async def lifespan(context: ServiceContext) -> AsyncIterator[None]:
    sandbox: Sandbox = choose_sandbox(context.options.sandbox)
    async with sandbox.lifespan():
        app.state.sandbox = sandbox
        tests: Path | None = context.options.tests
        app.state.tests = {} if tests is None else tests_of(tests)
        yield


def tests_of(file: Path) -> dict[str, Tests]:
    """Task id -> its tests. A `.gz` file is unpacked.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        text = gzip.decompress(file.read_bytes()).decode() if file.suffix == ".gz" else file.read_text("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"tests: {file}: {getattr(error, 'strerror', None) or error}") from None
    lines = enumerate(text.splitlines(), 1)
    return dict(_row_of_tests(line, f"tests: {file}:{number}") for number, line in lines if line.strip())


def _row_of_tests(line: str, where: str) -> tuple[str, Tests]:
    try:
        row = json.loads(line)
        return row["task_id"], Tests.model_validate(row)
    except ValidationError as error:
        wrong = error.errors()[0]
        raise ConfigError(f"{where}: {'.'.join(map(str, wrong['loc']))}: {wrong['msg']}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{where}: not a row with a task_id: {error}") from None


async def verify(task: CodeTask, options: CodeOptions) -> dict[str, Any]:
    code = fenced(task.text)
    tests = task.test_code or app.state.tests.get(task.task_id)
    if not task.cases and tests is None:
        reason = f"the option `tests` names no file with the task {task.task_id!r}"
        return {"reward": None, "outcome": "unverifiable", "reason": reason}
    total = len(task.cases) or 1
    if code is None:
        return {
            "reward": 0.0,
            "outcome": "no_code",
            "extracted_answer": None,
            "passed": 0,
            "tests": total,
            "tier": None,
        }
    run = score_function if task.function else score_program
    score = (
        await run(app.state.sandbox, code, task, options.limits, options.partial)
        if task.cases
        else await score_tests(app.state.sandbox, code, cast(Tests, tests), options.limits)
    )
    reward = None if score.infra else score.passed / total
    if reward is not None and not options.partial:
        reward = float(reward == 1)
    outcome = "infra_error" if score.infra else "passed" if score.passed == total else "failed"
    return {
        "reward": reward,
        "outcome": outcome,
        "reason": score.reason,
        "passed": score.passed,
        "tests": total,
        "tier": score.tier,
        "extracted_answer": code,
    }


app = gym_server(verify=verify, options=CodeOptions, lifespan=lifespan)
