"""calculator: word problems with a calculator. Reward 1 when the last number of the final text is the expected one."""

from decimal import Decimal
from typing import Any

from pydantic import BaseModel

from ngym import ToolError, VerifyRequest, gym_server
from ngym.grading.answers import number, same_number

from .expression import evaluate


class Calculator(BaseModel):
    expression: str


class CalculatorTask(VerifyRequest):
    expected_answer: Decimal


async def calculator(body: Calculator) -> int | float:
    """Evaluate an arithmetic expression."""
    try:
        return evaluate(body.expression)
    except ValueError as error:
        raise ToolError(f"calculator: {error}") from None


async def verify(task: CalculatorTask) -> dict[str, Any]:
    found = number(task.text)
    reward = float(found is not None and same_number(found, task.expected_answer))
    return {"reward": reward, "extracted_answer": None if found is None else str(found)}


app = gym_server(tools=[calculator], verify=verify)
