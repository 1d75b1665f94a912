"""2048 up to the tile 64, which scores 1. If the moves run out or the board is full, the score is at most 0.5."""

from __future__ import annotations

import math
import random

from .game import IllegalMove

SIDE, TARGET, MOVES, MOVES_A_TURN = 4, 64, 80, 10
Board = tuple[tuple[int, ...], ...]


class Twenty48:
    rules = (
        f"2048. A move pushes all tiles; two equal ones that meet become one. Reach {TARGET}. 0 is an empty square. "
        f"Your move is one or more of: up, down, left, right, separated by spaces (at most {MOVES_A_TURN})."
    )

    def __init__(self, seed: int) -> None:
        self.score: float | None = None
        self.salt, self.left = f"2048 {seed}", MOVES
        empty: Board = ((0,) * SIDE,) * SIDE
        self.board = add_tile(add_tile(empty, f"{self.salt} a"), f"{self.salt} b")

    def show(self) -> str:
        return "\n".join(" ".join(f"{tile:>3}" for tile in row) for row in self.board) + f"\nMoves left: {self.left}."

    def play(self, move: str) -> str:
        steps = move.split(" ")
        if len(steps) > MOVES_A_TURN or any(step not in ("up", "down", "left", "right") for step in steps):
            raise IllegalMove(f"a move is 1 to {MOVES_A_TURN} of up, down, left, right")
        for number, step in enumerate(steps):
            after = slide(self.board, step)
            if after == self.board:
                if number == 0:
                    raise IllegalMove(f"{step} moves no tile")
                return f"Stopped after {number} moves: {step} moves no tile."
            self.left -= 1
            self.board = add_tile(after, f"{self.salt} {self.left}")
            self.score = score(self.board, self.left)
            if self.score is not None:
                return f"The highest tile is {max(map(max, self.board))}."
        return ""


def score(board: Board, moves_left: int) -> float | None:
    highest = max(map(max, board))
    if highest >= TARGET:
        return 1.0
    stuck = all(slide(board, step) == board for step in ("up", "down", "left", "right"))
    return 0.5 * math.log2(highest) / math.log2(TARGET) if stuck or moves_left == 0 else None


def add_tile(board: Board, salt: str) -> Board:
    """The board with one more tile on an empty square. The salt determines the square and the tile (2 or 4)."""
    rng = random.Random(salt)
    row, column = rng.choice([(r, c) for r in range(SIDE) for c in range(SIDE) if board[r][c] == 0])
    tile = 4 if rng.random() < 0.1 else 2
    changed = (*board[row][:column], tile, *board[row][column + 1 :])
    return (*board[:row], changed, *board[row + 1 :])


def slide(board: Board, step: str) -> Board:
    if step == "left":
        return tuple(_merge(row) for row in board)
    if step == "right":
        return tuple(_merge(row[::-1])[::-1] for row in board)
    transposed = slide(tuple(zip(*board, strict=True)), "left" if step == "up" else "right")
    return tuple(zip(*transposed, strict=True))


def _merge(row: tuple[int, ...]) -> tuple[int, ...]:
    tiles = [tile for tile in row if tile]
    out: list[int] = []
    while tiles:
        tile = tiles.pop(0)
        if tiles and tiles[0] == tile:
            tile += tiles.pop(0)
        out.append(tile)
    return tuple(out + [0] * (SIDE - len(out)))
