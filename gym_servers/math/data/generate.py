r"""Problems whose answers are known because the problems are built from them. The same seed gives the same bytes.

python data/math/generate.py [FOLDER]  # train, validation and example.jsonl; default: here
"""

from __future__ import annotations

import random
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from ngym.files.task_rows import draw_distinct, output_folder, task_row, write_splits

HERE = Path(__file__).resolve().parent
SEED = 2026
TRAIN, VALIDATION, EXAMPLES = 200, 50, 5
INSTRUCTION = "Put the final answer in \\boxed{}."


class Problem(NamedTuple):
    """A question and its answer in LaTeX."""

    question: str
    answer: str


def linear(rng: random.Random) -> Problem:
    x, a, b = rng.randint(-12, 12), rng.randint(2, 9), rng.randint(-20, 20)
    return Problem(f"Solve for $x$: ${polynomial(b, a)} = {a * x + b}$.", str(x))


def quadratic(rng: random.Random) -> Problem:
    first, second = rng.sample(range(-9, 10), 2)
    equation = polynomial(first * second, -(first + second), 1)
    return Problem(f"Find all solutions of ${equation} = 0$.", f"\\{{{min(first, second)}, {max(first, second)}\\}}")


def fractions(rng: random.Random) -> Problem:
    a, b = (Fraction(rng.randint(1, 12), rng.randint(2, 12)) for _ in range(2))
    sign = rng.choice("+-")
    return Problem(f"Compute ${latex(a)} {sign} {latex(b)}$.", latex(a + b if sign == "+" else a - b))


def derivative(rng: random.Random) -> Problem:
    c0, c1, c2, c3 = (rng.randint(-9, 9) for _ in range(4))
    c3 = c3 or 1
    return Problem(f"Differentiate ${polynomial(c0, c1, c2, c3)}$ with respect to $x$.", polynomial(c1, 2 * c2, 3 * c3))


def integral(rng: random.Random) -> Problem:
    c0, c1, c2, upper = rng.randint(-6, 6), rng.randint(-6, 6), rng.randint(1, 6), rng.randint(1, 5)
    value = Fraction(c0 * upper) + Fraction(c1 * upper**2, 2) + Fraction(c2 * upper**3, 3)
    return Problem(f"Compute $\\int_0^{{{upper}}} \\left({polynomial(c0, c1, c2)}\\right) dx$.", latex(value))


def system(rng: random.Random) -> Problem:
    x, y, a, b = rng.randint(-9, 9), rng.randint(-9, 9), rng.randint(2, 5), rng.randint(2, 5)
    text = f"Solve $x + {a}y = {x + a * y}$ and ${b}x - y = {b * x - y}$. Give the pair $(x, y)$."
    return Problem(text, f"({x}, {y})")


def percentage(rng: random.Random) -> Problem:
    part, whole = rng.choice((5, 10, 15, 20, 25, 30, 40, 60, 75)), rng.randint(1, 40) * 20
    return Problem(f"What is ${part}\\%$ of ${whole}$?", latex(Fraction(part * whole, 100)))


KINDS = (linear, quadratic, fractions, derivative, integral, system, percentage)


def polynomial(*coefficients: int) -> str:
    """LaTeX of c0 + c1 x + c2 x^2 + ..., highest power first."""
    terms = []
    for power in range(len(coefficients) - 1, -1, -1):
        factor = coefficients[power]
        if factor:
            variable = "" if power == 0 else "x" if power == 1 else f"x^{power}"
            size = "" if abs(factor) == 1 and variable else str(abs(factor))
            terms.append(("-" if factor < 0 else "+", size + variable))
    if not terms:
        return "0"
    head = ("-" if terms[0][0] == "-" else "") + terms[0][1]
    return " ".join([head, *(f"{sign} {term}" for sign, term in terms[1:])])


def latex(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    sign = "-" if value < 0 else ""
    return f"{sign}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def task(problem: Problem) -> dict[str, Any]:
    return task_row(
        "math_agent",
        {"input": f"{problem.question} {INSTRUCTION}"},
        question=problem.question,
        expected_answer=problem.answer,
        simplified=True,  # else the question itself, put into the box, would be a right answer
    )


def main(folder: Path) -> None:
    rng = random.Random(SEED)
    problems = draw_distinct(TRAIN + VALIDATION, lambda _: rng.choice(KINDS)(rng), lambda problem: problem.question)
    write_splits(folder, [task(problem) for problem in problems], VALIDATION, EXAMPLES)


if __name__ == "__main__":
    main(output_folder(__doc__, HERE))
