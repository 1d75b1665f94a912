"""calculator: word problems with a calculator. Reward 1 when the last number of the final text is the expected one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

from pydantic import BaseModel

from ngym import ToolError, VerifyRequest, gym_server
from ngym.convert import last_user_text
from ngym.grading.answers import asks_percent, number, same_number

MAX_CHARS = 200
MAX_DIGITS = 30
MAX_DEPTH = 20
MAX_RESULT = 10**18
TOKEN = re.compile(r"\s*(?:(?P<number>\d+(?:\.\d+)?|\.\d+)|(?P<sign>[-+*/()]))")
SAME = str.maketrans(
    {"\N{MULTIPLICATION SIGN}": "*", "\N{MIDDLE DOT}": "*", "\N{DIVISION SIGN}": "/", "\N{MINUS SIGN}": "-"}
)


def evaluate(expression: str) -> int | float:
    """The value: an int if it is whole, else the nearest float. The text of a ValueError is for the model."""
    if len(expression) > MAX_CHARS:
        raise ValueError(f"the expression has {len(expression)} characters; at most {MAX_CHARS} are allowed")
    try:
        value = _Parser(expression.translate(SAME)).value()
    except ZeroDivisionError:
        raise ValueError(f"division by zero in {expression!r}") from None
    if abs(value) >= MAX_RESULT:
        raise ValueError(f"the result of {expression!r} has more than {len(str(MAX_RESULT)) - 1} digits")
    return int(value) if value.denominator == 1 else float(value)


class _Parser:
    """sum = product {(+|-) product};  product = factor {(*|/) factor};  factor = [+|-] factor | number | ( sum )."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._split()
        self._next = next(self._tokens)

    def value(self) -> Fraction:
        result = self._sum(0)
        if self._next:
            raise ValueError(f"unexpected {self._next!r} in {self._text!r}")
        return result

    def _split(self) -> Iterator[str]:
        """The tokens, then "" for the end."""
        text, position = self._text.rstrip(), 0
        while position < len(text):
            match = TOKEN.match(text, position)
            if match is None:
                wrong = text[position:].lstrip()[0]
                raise ValueError(f"{wrong!r} in {self._text!r} is neither a number nor one of + - * / ( )")
            token = match["number"] or match["sign"]
            if len(token) > MAX_DIGITS:
                raise ValueError(f"a number has {len(token)} digits; at most {MAX_DIGITS} are allowed")
            yield token
            position = match.end()
        yield ""

    def _take(self) -> str:
        token = self._next
        if not token:
            raise ValueError(f"{self._text!r} ends where a number or '(' is missing")
        self._next = next(self._tokens)
        return token

    def _sum(self, depth: int) -> Fraction:
        total = self._product(depth)
        while self._next in ("+", "-"):
            total += self._product(depth) if self._take() == "+" else -self._product(depth)
        return total

    def _product(self, depth: int) -> Fraction:
        total = self._factor(depth)
        while self._next in ("*", "/"):
            total = total * self._factor(depth) if self._take() == "*" else total / self._factor(depth)
        return total

    def _factor(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise ValueError(f"{self._text!r} is nested more than {MAX_DEPTH} levels deep")
        token = self._take()
        if token == "-":
            return -self._factor(depth + 1)
        if token == "+":
            return self._factor(depth + 1)
        if token == "(":
            inside = self._sum(depth + 1)
            if self._next != ")":
                raise ValueError(f"a ')' is missing in {self._text!r}")
            self._take()
            return inside
        if token in "*/)":
            raise ValueError(f"unexpected {token!r} in {self._text!r}")
        return Fraction(token)


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
    question = last_user_text(task.responses_create_params.get("input") or "")
    answer = number(task.text, percent=asks_percent(question))
    reward = float(answer is not None and same_number(answer, task.expected_answer))
    return {"reward": reward, "extracted_answer": None if answer is None else str(answer)}


app = gym_server(tools=[calculator], verify=verify, reward_range=(0, 1))
