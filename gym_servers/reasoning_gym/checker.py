"""Scores an answer with the library's scorer. Runs in worker processes, which generate the task again from the row.

Problems of the library's scorers that are fixed here (as of version 0.1.25):

- Four scorers `eval` the answer: they parse literals only. Five pass it to SymPy's `parse_expr`, which is `eval`:
  they get arithmetic and known functions only.
- Some accept wrong answers: game_of_life_halting any text, puzzle24 other numbers than the given ones, coin_flip a 0
  for small probabilities, complex_arithmetic `nan`, gsm_symbolic and spell_backward the answer among other words.
- Some raise on text that they cannot parse (prime_factorization, boxnet, game_of_life): that answer is wrong.
- Four datasets depend on the order of sets, so the workers' hash seed is fixed (app.py).
"""

import ast
import hashlib
import json
import math
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from reasoning_gym.algorithmic import binary_matrix, spiral_matrix, string_insertion
from reasoning_gym.factory import create_dataset
from reasoning_gym.games import n_queens

for module in (binary_matrix, spiral_matrix, string_insertion, n_queens):
    module.eval = ast.literal_eval  # a module global hides the builtin

ARITHMETIC = re.compile(r"[\d\s+\-*/().]+")
WORDS = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")
FUNCTIONS = frozenset(
    ["sin", "cos", "tan", "exp", "log", "ln", "sqrt", "pi", "asin", "acos", "atan", "sinh", "cosh", "tanh", "E", "C"]
)
NO_VARIABLES = frozenset("INOQS")  # SymPy's own
FORMULA = re.compile(r"(?:[A-Za-z0-9\s+\-*/^(),]|(?<=\d)\.|\.(?=\d))+")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+|/\d+)?")
READ_AS = {
    "countdown": "arithmetic",
    "puzzle24": "arithmetic",
    "simple_integration": "formula",
    "intermediate_integration": "formula",
    "polynomial_multiplication": "formula",
}


class GeneratedTask(NamedTuple):
    """A task (entry) of the library, and the dataset that scores it."""

    dataset: Any
    entry: dict[str, Any]


@lru_cache(maxsize=512)
def generate_task(name: str, seed: int, index: int, config: str) -> GeneratedTask:
    """Generate a task. config: JSON of the dataset's options."""
    dataset = create_dataset(name, seed=seed, size=index + 1, **json.loads(config))
    return GeneratedTask(dataset, dataset[index])


def fingerprint(entry: dict[str, Any]) -> str:
    """A hash of the question, to detect that another version of the library generates another task."""
    return hashlib.sha256(entry["question"].encode()).hexdigest()[:16]


def check(
    name: str,
    seed: int,
    index: int,
    config: str,
    expected: str | None,
    answer: str,
    entry: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """`{"outcome": "correct" | "wrong" | "infra_error", "score", "reason"}`; score: the library's own, 0 to 1.

    entry: is scored instead of the generated one.
    """
    try:
        task = generate_task(name, seed, index, config)
        task = task if entry is None else task._replace(entry=entry)
    except Exception as error:  # noqa: BLE001  the row's or the library's fault, never the answer's
        return {"outcome": "infra_error", "score": None, "reason": f"the task cannot be generated: {error}"}
    if expected is not None and fingerprint(task.entry) != expected:
        return {"outcome": "infra_error", "score": None, "reason": "the library generates another task from this row"}
    if not readable(name, answer):
        return {"outcome": "wrong", "score": 0.0, "reason": "not an expression of this kind"}
    try:
        score = min(1.0, float(task.dataset.score_answer(answer, task.entry)))
    except Exception as error:  # noqa: BLE001  scorers accept the known answer, so this is the answer's fault
        return {"outcome": "wrong", "score": 0.0, "reason": f"the library cannot read it: {type(error).__name__}"}
    if score >= 1.0 and is_wrongly_rewarded(name, answer, task.entry):
        return {"outcome": "wrong", "score": 0.0, "reason": "the library accepts it, but it is not the answer"}
    return {"outcome": "correct" if score >= 1.0 else "wrong", "score": score, "reason": None}


def readable(name: str, answer: str) -> bool:
    """Whether the answer may reach `parse_expr`."""
    kind = READ_AS.get(name)
    if kind == "arithmetic":
        return bool(ARITHMETIC.fullmatch(answer))
    if kind == "formula":
        words = set(WORDS.findall(answer))
        variables = {word for word in words if len(word) == 1 and word not in NO_VARIABLES}
        return bool(FORMULA.fullmatch(answer)) and words <= variables | FUNCTIONS
    return True


def is_wrongly_rewarded(name: str, answer: str, entry: dict[str, Any]) -> bool:
    """Whether an answer to which the library gives 1 is wrong."""
    if name == "game_of_life_halting":
        return answer.strip().casefold() != str(entry["answer"]).casefold()
    if name == "puzzle24":
        numbers = sorted(map(int, re.findall(r"\d+", answer)))
        return "." in answer or numbers != sorted(entry["metadata"]["numbers"]) or evaluate_exactly(answer) != 24
    if name == "complex_arithmetic":
        return bool(re.search("nan|inf", answer, re.IGNORECASE))
    if name == "gsm_symbolic":
        numbers = [number.replace(",", "") for number in NUMBER.findall(answer)]
        return len(numbers) != 1 or Fraction(numbers[0]) != Fraction(entry["answer"].replace(",", ""))
    if name == "spell_backward":
        return answer.strip().casefold() != str(entry["answer"]).casefold()
    if name == "coin_flip":
        expected = float(Fraction(entry["answer"]))
        return not math.isclose(float(Fraction(answer.replace(",", ""))), expected, rel_tol=1e-2)
    return False


def evaluate_exactly(expression: str) -> Fraction | None:
    """The exact value of an expression of integers, + - * / and parentheses; None for anything else."""

    def value(node: ast.AST) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return Fraction(node.value)
        if isinstance(node, ast.BinOp):
            left, right = value(node.left), value(node.right)
            if isinstance(node.op, ast.Add):
                return left + right
            if isinstance(node.op, ast.Sub):
                return left - right
            if isinstance(node.op, ast.Mult):
                return left * right
            if isinstance(node.op, ast.Div):
                return left / right
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        raise ValueError(node)

    try:
        return value(ast.parse(expression.strip(), mode="eval").body)
    except (ValueError, SyntaxError, ZeroDivisionError):
        return None
