"""games: six small games, played turn by turn. The rollout's reward is the game's score, 0 to 1."""

import asyncio
from statistics import fmean
from typing import Any, Literal
from zlib import crc32

from pydantic import model_validator

from ngym import Session, Step, VerifyRequest, step_server
from ngym.grading.answers import move
from ngym.schema import Json
from ngym.stats import means_by

from .blackjack import Blackjack
from .game import Game, IllegalMove
from .minesweeper import Minesweeper
from .sokoban import Sokoban
from .tic_tac_toe import TicTacToe
from .twenty48 import Twenty48
from .wordle import Wordle

ILLEGAL_MOVES = 3
Name = Literal["blackjack", "wordle", "sokoban", "tic_tac_toe", "2048", "minesweeper"]
GAMES: dict[str, type[Game]] = {
    "blackjack": Blackjack,
    "wordle": Wordle,
    "sokoban": Sokoban,
    "tic_tac_toe": TicTacToe,
    "2048": Twenty48,
    "minesweeper": Minesweeper,
}
HOW = "Say your move alone in the last line, or in \\boxed{}."


class Task(VerifyRequest):
    game: Name = "blackjack"
    seed: int

    @model_validator(mode="before")
    @classmethod
    def _without_a_seed(cls, row: Any) -> Any:
        """A row without a seed (NeMo Gym's blackjack) is another game in each task and rollout."""
        if not isinstance(row, dict) or "seed" in row:
            return row
        return {**row, "seed": crc32(f"{row.get('_ng_task_index')} {row.get('_ng_rollout_index')}".encode())}


async def reset(task: Task, session: Session) -> str:
    game = await asyncio.to_thread(GAMES[task.game], task.seed)  # draws levels until one can be solved
    session.update(game=game, illegal=0)
    return f"{game.rules} {HOW}\n\n{game.show()}"


async def step(task: Task, session: Session) -> Step:
    game: Game = session["game"]
    try:
        comment = game.play(normalized(move(task.text)))
    except IllegalMove as error:
        session["illegal"] += 1
        attempts_left = ILLEGAL_MOVES - session["illegal"]
        if attempts_left == 0:
            return Step(f"Illegal move: {error}. That was one too many: the game is lost.", terminated=True)
        return Step(f"Illegal move: {error}. After {attempts_left} more the game is lost.\n\n{game.show()}")
    text = f"{comment}\n\n{game.show()}".lstrip()
    if game.score is None:
        return Step(text)
    return Step(f"{text}\nThe game is over.", reward=game.score, terminated=True)


def normalized(move: str) -> str:
    """The move in lower case, with single spaces and without marks around it."""
    return " ".join(move.casefold().split()).strip(" .*`\"'")


def compute_metrics(rows: list[Json]) -> dict[str, float]:
    """The mean score of each game, and the share of finished games."""
    finished = {"finished": fmean(row["over"] for row in rows)} if rows else {}
    return {**finished, **means_by(rows, "game")}


app = step_server(task=Task, reset=reset, step=step, compute_metrics=compute_metrics)
