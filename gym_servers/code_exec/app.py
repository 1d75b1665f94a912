"""code_exec: a Python function or program. Reward 1 if every hidden test passes; null if the sandbox failed."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from pydantic import Field

from ngym import ServiceContext, ServiceOptions, gym_server
from ngym.grading.answers import fenced
from ngym.sandbox import Limits, Sandbox, SandboxOptions, sandbox_of
from ngym.sandbox.options import Local

from .grading import CodeTask, Score, of_function, of_program


class CodeOptions(ServiceOptions):
    sandbox: SandboxOptions = Field(default=Local(), description="Where programs run.")
    limits: Limits = Field(
        default=Limits(cpu_s=5), description="Of one run: one test of a program, or all calls of a function."
    )
    partial: bool = Field(
        default=False,
        description="Reward the share of tests that pass; otherwise the first failed test ends the check.",
    )


@asynccontextmanager
async def lifespan(context: ServiceContext) -> AsyncIterator[None]:
    sandbox: Sandbox = sandbox_of(context.options.sandbox)
    async with sandbox.lifespan():
        app.state.sandbox = sandbox
        yield


async def verify(task: CodeTask, options: CodeOptions) -> dict[str, Any]:
    code = fenced(task.text)
    if code is None:
        return {
            "reward": 0.0,
            "outcome": "no_code",
            "extracted_answer": None,
            "passed": 0,
            "tests": len(task.cases),
            "tier": None,
        }
    score: Score = await (of_function if task.function else of_program)(
        app.state.sandbox, code, task, options.limits, options.partial
    )
    reward = None if score.infra else score.passed / len(task.cases)
    if reward is not None and not options.partial:
        reward = float(reward == 1)
    outcome = "infra_error" if score.infra else "passed" if score.passed == len(task.cases) else "failed"
    return {
        "reward": reward,
        "outcome": outcome,
        "reason": score.reason,
        "passed": score.passed,
        "tests": len(task.cases),
        "tier": score.tier,
        "extracted_answer": code,
    }


app = gym_server(verify=verify, options=CodeOptions, lifespan=lifespan)
