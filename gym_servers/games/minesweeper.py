"""Minesweeper on a small field. Opening all safe cells scores 1. Every field can be solved without a guess."""

from __future__ import annotations

import random
import re
from itertools import count

from .game import IllegalMove

SIDE, MINES = 5, 5
Cell = tuple[int, int]
CELLS = [(row, column) for row in range(SIDE) for column in range(SIDE)]


class Minesweeper:
    rules = (
        f"Minesweeper, {SIDE} by {SIDE}, {MINES} mines. A number tells how many of the up to eight neighbours are mines; ? is closed. Open all "
        "cells without a mine. Your move is a row and a column, counted from 1, such as: 2 5."
    )

    def __init__(self, seed: int) -> None:
        self.score: float | None = None
        for attempt in count():
            rng = random.Random(f"minesweeper {seed} {attempt}")
            first = rng.choice(CELLS)
            self.mines = frozenset(rng.sample([cell for cell in CELLS if cell not in neighbourhood(first)], MINES))
            self.open = reveal(frozenset(), first, self.mines)
            if len(self.open) < SIDE * SIDE - MINES and solvable(self.open, self.mines):
                return

    def show(self) -> str:
        lines = []
        for row in range(SIDE):
            lines.append(" ".join(self._mark((row, column)) for column in range(SIDE)))
        return "\n".join(lines)

    def play(self, move: str) -> str:
        match = re.fullmatch(r"(?:open )?([0-9])[ ,]+([0-9])", move)
        cell = (int(match[1]) - 1, int(match[2]) - 1) if match else None
        if cell not in CELLS or cell in self.open:
            raise IllegalMove(f"the move is the row and the column (1 to {SIDE}) of a closed cell")
        if cell in self.mines:
            self.score = 0.0
            return "That was a mine."
        self.open = reveal(self.open, cell, self.mines)
        if len(self.open) == SIDE * SIDE - MINES:
            self.score = 1.0
        return ""

    def _mark(self, cell: Cell) -> str:
        if cell in self.open:
            return str(len(neighbourhood(cell) & self.mines))
        return "*" if self.score is not None and cell in self.mines else "?"


def neighbourhood(cell: Cell) -> frozenset[Cell]:
    """The cell and its neighbours."""
    row, column = cell
    return frozenset((r, c) for r, c in CELLS if abs(r - row) <= 1 and abs(c - column) <= 1)


def reveal(before: frozenset[Cell], cell: Cell, mines: frozenset[Cell]) -> frozenset[Cell]:
    """The open cells after opening one. A cell without neighbouring mines also opens its neighbours."""
    visited, todo = set(before), [cell]
    while todo:
        here = todo.pop()
        if here not in visited:
            visited.add(here)
            if not neighbourhood(here) & mines:
                todo += neighbourhood(here)
    return frozenset(visited)


def solvable(opened_cells: frozenset[Cell], mines: frozenset[Cell]) -> bool:
    """Whether `deduce_safe_cells` opens every safe cell, so that no guess is needed."""
    while len(opened_cells) < SIDE * SIDE - MINES:
        safe = deduce_safe_cells(opened_cells, mines)
        if not safe:
            return False
        for cell in safe:
            opened_cells = reveal(opened_cells, cell, mines)
    return True


def deduce_safe_cells(opened_cells: frozenset[Cell], mines: frozenset[Cell]) -> frozenset[Cell]:
    """Closed cells that cannot be mines. A fact is a set of closed cells and the number of mines among them."""
    facts = {(neighbourhood(cell) - opened_cells, len(neighbourhood(cell) & mines)) for cell in opened_cells}
    facts.add((frozenset(CELLS) - opened_cells, MINES))
    for _ in range(4):
        inside = {(big - small, many - few) for big, many in facts for small, few in facts if small < big}
        if inside <= facts:
            break
        facts |= inside
    return frozenset(cell for cells, many in facts if many == 0 for cell in cells)
