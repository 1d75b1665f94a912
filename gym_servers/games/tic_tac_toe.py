"""Tic-tac-toe. The opponent sees a win or a block three times in four. A win scores 1, a draw 0.5."""

from __future__ import annotations

import random
from itertools import count

from .game import IllegalMove

LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
SEES = 0.75


class TicTacToe:
    rules = "Tic-tac-toe. You are X. Three in a row, column or diagonal win. Your move is the number of a free square, 1 to 9."

    def __init__(self, seed: int) -> None:
        self.score: float | None = None
        for attempt in count():
            self.salt = f"tic-tac-toe {seed} {attempt}"
            self.board = " " * 9
            if random.Random(self.salt).random() < 0.5:
                self.board = apply_reply(self.board, self.salt)
            if winning_line(self.board, self.salt) is not None:
                return

    def show(self) -> str:
        squares = [mark if mark != " " else str(number + 1) for number, mark in enumerate(self.board)]
        return "\n".join(" ".join(squares[row : row + 3]) for row in (0, 3, 6))

    def play(self, move: str) -> str:
        if move not in tuple("123456789") or self.board[int(move) - 1] != " ":
            raise IllegalMove("the move is the number of a free square")
        self.board = with_mark(self.board, int(move) - 1, "X")
        if score(self.board) is None:
            self.board = apply_reply(self.board, self.salt)
        self.score = score(self.board)
        return ""


def with_mark(board: str, square: int, mark: str) -> str:
    return board[:square] + mark + board[square + 1 :]


def score(board: str) -> float | None:
    for line in LINES:
        marks = {board[square] for square in line}
        if marks == {"X"} or marks == {"O"}:
            return 1.0 if marks == {"X"} else 0.0
    return None if " " in board else 0.5


def apply_reply(board: str, salt: str) -> str:
    """The board after O's move, which the salt and the board determine."""
    rng = random.Random(f"{salt} {board}")
    free = [square for square in range(9) if board[square] == " "]
    square = rng.choice(free)
    if rng.random() < SEES:
        for mark in "XO":  # the last mark has priority: a win over a block
            square = next((s for s in free if completes(board, s, mark)), square)
    return with_mark(board, square, "O")


def completes(board: str, square: int, mark: str) -> bool:
    after = with_mark(board, square, mark)
    return any(square in line and all(after[s] == mark for s in line) for line in LINES)


def winning_line(board: str, salt: str) -> list[int] | None:
    """Squares that win against this opponent, or None."""
    for square in range(9):
        if board[square] != " ":
            continue
        after = with_mark(board, square, "X")
        if score(after) == 1.0:
            return [square]
        after = apply_reply(after, salt) if score(after) is None else after
        rest = winning_line(after, salt) if score(after) is None else None
        if rest is not None:
            return [square, *rest]
    return None
