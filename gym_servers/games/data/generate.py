"""Seeds of games, and for some of them the moves that win; no level of validation is trained on.

python data/games/generate.py [FOLDER]  # train, validation, example and gold.jsonl; default: here
"""

from __future__ import annotations

import copy
import itertools
import random
from pathlib import Path
from typing import Any

from ngym.files.jsonl import write_rows
from ngym.files.task_rows import assistant_message, output_folder, task_row
from ngym.services.base.app import load

HERE = Path(__file__).resolve().parent
server = load(HERE.parent / "app.py")
SEED = 2026
TRAIN, VALIDATION, GOLD = 40, 10, 3  # of each game
INSTRUCTIONS = "You play a game, one move a turn. Think briefly, then say your move in the last line."
DIRECTIONS = ("down", "left", "right", "up")


def row(game: str, seed: int) -> dict[str, Any]:
    return task_row("games_agent", {"input": [], "instructions": INSTRUCTIONS}, game=game, seed=seed)


def level(game: str, seed: int) -> str:
    """The fields by which two games are equal, the outcomes of chance included."""
    return repr(vars(server.GAMES[game](seed)))


def winning(game: str, seed: int) -> list[str]:
    """Moves that win; they know what a player does not."""
    start = server.GAMES[game](seed)
    if game == "wordle":
        return [start.secret]
    if game == "sokoban":
        solution: list[str] = start.level.solution
        return solution
    if game == "minesweeper":
        return by_opening(start)
    if game == "2048":
        return by_merging(start)
    return by_trying(start, ("stand", "hit") if game == "blackjack" else tuple("123456789"))


def by_opening(game: Any) -> list[str]:
    moves = []
    while game.score is None:
        cell = min({(r, c) for r in range(5) for c in range(5)} - game.open - game.mines)
        moves.append(f"{cell[0] + 1} {cell[1] + 1}")
        game.play(moves[-1])
    return moves


def by_trying(game: Any, choices: tuple[str, ...]) -> list[str]:
    """Depth first; [] if nothing wins."""
    for choice in choices:
        after = copy.deepcopy(game)
        try:
            after.play(choice)
        except Exception as error:
            if type(error).__name__ != "IllegalMove":
                raise
            continue
        if after.score == 1.0:
            return [choice]
        rest = by_trying(after, choices) if after.score is None else []
        if rest:
            return [choice, *rest]
    return []


def by_merging(game: Any) -> list[str]:
    """Of the moves, again and again, the one that leaves most squares empty two moves later."""
    moves = []
    while game.score is None:
        best = max((emptiest(game, direction, 2), direction) for direction in DIRECTIONS)[1]
        game.play(best)
        moves.append(best)
    return moves if game.score == 1.0 else []


def emptiest(game: Any, direction: str, depth: int) -> int:
    after = copy.deepcopy(game)
    board = after.board
    try:
        after.play(direction)
    except Exception as error:
        if type(error).__name__ != "IllegalMove":
            raise
        return -1
    if after.score is not None or depth == 0 or after.board == board:
        return 100 if after.score == 1.0 else sum(tile == 0 for line in after.board for tile in line)
    return max(emptiest(after, further, depth - 1) for further in DIRECTIONS)


def conversation(moves: list[str]) -> list[dict[str, Any]]:
    return [assistant_message(move) for move in moves]


def cases(game: str, seed: int) -> list[dict[str, Any]]:
    moves, task = winning(game, seed), {"game": game, "seed": seed}
    boxed = [f"I think this is best: \\boxed{{{move}}}" for move in moves]
    return [
        {"case": f"won: {game} {seed}", "task": task, "output": conversation(boxed), "expect": {"reward": 1.0, "over": True}},
        {"case": f"not finished: {game} {seed}", "task": task, "output": conversation(moves[:-1]), "expect": {"reward": 0.0, "over": False}},
        {"case": f"no moves: {game} {seed}", "task": task, "output": conversation(["I win!"] * 5), "expect": {"reward": 0.0, "over": True, "steps": 3}},
    ]  # fmt: skip


def main(folder: Path) -> None:
    rng = random.Random(SEED)
    parts: dict[str, list[dict[str, Any]]] = {"validation": [], "train": [], "example": [], "gold": []}
    for game in server.GAMES:
        seeds: dict[str, int] = {}
        while len(seeds) < TRAIN + VALIDATION:
            seed = rng.randrange(10**6)
            seeds.setdefault(level(game, seed), seed)
        tasks = list(seeds.values())
        parts["validation"] += [row(game, seed) for seed in tasks[:VALIDATION]]
        parts["train"] += [row(game, seed) for seed in tasks[VALIDATION:]]
        parts["example"].append(row(game, tasks[0]))
        winnable = itertools.islice((seed for seed in tasks if winning(game, seed)), GOLD)
        parts["gold"] += [case for seed in winnable for case in cases(game, seed)]
    rng.shuffle(parts["train"])
    write_rows(folder, parts)


if __name__ == "__main__":
    main(output_folder(__doc__, HERE))
