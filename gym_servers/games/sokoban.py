"""Sokoban in a small room. All boxes on goals scores 1. A search solves every level before it is shown."""

from __future__ import annotations

import random
from collections import deque
from itertools import count
from typing import NamedTuple

from .game import IllegalMove

SIDE, BOXES, WALLS = 5, 2, 3
SHORTEST, MOVES, MOVES_A_TURN = 6, 120, 20
STEPS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}

Cell = tuple[int, int]


class State(NamedTuple):
    player: Cell
    boxes: frozenset[Cell]


class Level(NamedTuple):
    floor: frozenset[Cell]
    goals: frozenset[Cell]
    start: State
    solution: list[str]


class Sokoban:
    rules = (
        "Sokoban. # is wall, @ you, $ a box, . a goal, * a box on a goal, + you on a goal. Push every box onto a goal; you cannot pull, "
        f"nor push two at once. Your move is one or more of: up, down, left, right, separated by spaces (at most {MOVES_A_TURN})."
    )

    def __init__(self, seed: int) -> None:
        self.score: float | None = None
        self.level = level(seed)
        self.state, self.left = self.level.start, MOVES

    def show(self) -> str:
        rows = ["".join(self._mark((row, column)) for column in range(-1, SIDE + 1)) for row in range(-1, SIDE + 1)]
        return "\n".join(rows) + f"\nMoves left: {self.left}."

    def play(self, move: str) -> str:
        steps = move.split(" ")
        if len(steps) > MOVES_A_TURN or any(step not in STEPS for step in steps):
            raise IllegalMove(f"a move is 1 to {MOVES_A_TURN} of up, down, left, right")
        for number, step in enumerate(steps):
            after = apply_step(self.level, self.state, step)
            if after is None:
                if number == 0:
                    raise IllegalMove(f"you cannot go {step}: a wall or a box that cannot be pushed is there")
                return f"Stopped after {number} moves: you cannot go {step}."
            self.state, self.left = after, self.left - 1
            if self.state.boxes == self.level.goals:
                self.score = 1.0
                return "All boxes are on goals."
            if self.left == 0:
                self.score = 0.0
                return "No moves are left."
        return ""

    def _mark(self, cell: Cell) -> str:
        if cell not in self.level.floor:
            return "#"
        goal = cell in self.level.goals
        if cell == self.state.player:
            return "+" if goal else "@"
        if cell in self.state.boxes:
            return "*" if goal else "$"
        return "." if goal else " "


def apply_step(level: Level, state: State, step: str) -> State | None:
    """The state after a step, or None if the way is blocked."""
    (row, column), (down, right) = state.player, STEPS[step]
    there, beyond = (row + down, column + right), (row + 2 * down, column + 2 * right)
    if there not in level.floor:
        return None
    if there not in state.boxes:
        return State(there, state.boxes)
    if beyond not in level.floor or beyond in state.boxes:
        return None
    return State(there, state.boxes - {there} | {beyond})


def level(seed: int) -> Level:
    """The first room drawn from this seed that takes at least SHORTEST moves."""
    for attempt in count():
        rng = random.Random(f"sokoban {seed} {attempt}")
        cells = [(row, column) for row in range(SIDE) for column in range(SIDE)]
        floor = frozenset(cells) - set(rng.sample(cells, WALLS))
        inner = sorted(cell for cell in floor if 0 < cell[0] < SIDE - 1 and 0 < cell[1] < SIDE - 1)
        boxes = frozenset(rng.sample(inner, BOXES))
        goals = frozenset(rng.sample(sorted(floor - boxes), BOXES))
        candidate = Level(floor, goals, State(rng.choice(sorted(floor - boxes)), boxes), [])
        solution = solve(candidate)
        if solution is not None and len(solution) >= SHORTEST:
            return candidate._replace(solution=solution)
    raise AssertionError("count() has no end")


def solve(level: Level) -> list[str] | None:
    """A shortest solution by breadth-first search, or None if there is none."""
    predecessors: dict[State, tuple[State, str] | None] = {level.start: None}
    queue = deque([level.start])
    while queue:
        state = queue.popleft()
        if state.boxes == level.goals:
            path = []
            while (link := predecessors[state]) is not None:
                state, step = link
                path.append(step)
            return path[::-1]
        for step in STEPS:
            after = apply_step(level, state, step)
            if after is not None and after not in predecessors:
                predecessors[after] = (state, step)
                queue.append(after)
    return None
