"""games: gold games, levels, illegal moves, /reset and /step, and agents/gymnasium."""

import asyncio
import copy
import random
import sys

import pytest
from local_services import local_services
from shipped_gym import ROOT, gold_failures, module, rollout, rows, says, unreproducible_files

from ngym.errors import ServiceError
from ngym.services.base.app import load

server = module("games")


def part(name):
    return sys.modules[f"{server.__name__}.{name}"]


def playing():
    return local_services({}, games=server.app)


async def test_every_gold_game_gets_the_reward_it_must_get():
    assert not await gold_failures("games")


def test_the_shipped_data_is_what_its_script_makes(tmp_path):
    assert unreproducible_files("games", tmp_path) == []


def test_no_level_of_validation_is_trained_on():
    def levels(file):
        return {repr(vars(server.GAMES[row["game"]](row["seed"]))) for row in rows("games", file)}

    assert len(levels("train")) == len(rows("games", "train")) == 240
    assert not levels("train") & levels("validation")


@pytest.mark.parametrize("seed", range(20))
def test_levels_can_be_won_and_boards_stay_what_they_were_after_an_illegal_move(seed):
    blackjack, sokoban, mines, tic = (part(name) for name in ("blackjack", "sokoban", "minesweeper", "tic_tac_toe"))
    deck = blackjack.Blackjack(seed)
    for _ in range(blackjack.winning_hits(deck.deck)):
        deck.play("hit")
    deck.play("stand")
    room = sokoban.Sokoban(seed)
    for step in room.level.solution:
        room.play(step)
    field = mines.Minesweeper(seed)
    while field.score is None:
        row, column = min(mines.deduce_safe_cells(field.open, field.mines) - field.open)
        field.play(f"{row + 1} {column + 1}")
    board = tic.TicTacToe(seed)
    for square in tic.winning_line(board.board, board.salt):
        board.play(str(square + 1))
    assert [game.score for game in (deck, room, field, board)] == [1.0] * 4
    for game in server.GAMES.values():
        fresh = game(seed)
        before = copy.deepcopy(vars(fresh))
        for junk in ("", "win", "up " * 500, "0", "10", "9 9", "-1 1", "\u0663", "hit stand", "\U0001f600", "abcde1"):
            with pytest.raises(part("game").IllegalMove):
                fresh.play(junk)
        assert vars(fresh) == before


def test_wordle_marks_a_letter_only_as_often_as_the_word_has_it():
    marks = part("wordle").marks
    assert marks("geese", "these") == "--GGG"
    assert marks("eerie", "these") == "Y---G"
    assert marks("crane", "crane") == "GGGGG"
    assert marks("allow", "label") == "YYY--"


def test_2048_merges_each_tile_once_and_towards_the_wall():
    pushed = part("twenty48").slide
    assert pushed(((2, 2, 2, 2), (4, 2, 2, 0), (2, 0, 0, 2), (0, 0, 0, 0)), "left")[:3] == (
        (4, 4, 0, 0),
        (4, 4, 0, 0),
        (4, 0, 0, 0),
    )
    assert pushed(((2, 2, 2, 0),) + ((0,) * 4,) * 3, "right")[0] == (0, 0, 2, 4)
    assert pushed(((2, 0, 0, 0), (2, 0, 0, 0), (4, 0, 0, 0), (0,) * 4), "down")[2:] == ((4, 0, 0, 0), (4, 0, 0, 0))


def test_every_game_ends_with_any_player():
    moves = ["hit", "stand", "crane", "up", "down", "left", "right", *"123456789"]
    moves += [f"{row} {column}" for row in range(1, 6) for column in range(1, 6)]
    for game in server.GAMES.values():
        rng = random.Random(7)
        played = game(7)
        for _ in range(3000):
            if played.score is not None:
                break
            try:
                played.play(rng.choice(moves))
            except part("game").IllegalMove:
                continue
        assert played.score is not None
        assert 0 <= played.score <= 1


def turn(row, text):
    return rollout(row, says(text))


WORDLE = {"responses_create_params": {"input": []}, "game": "wordle", "seed": 5}
SECRET = server.GAMES["wordle"](5).secret


async def test_reset_and_step_play_an_episode_and_verify_is_the_sum_of_its_rewards():
    async with playing() as peers:
        session = peers["games"].session()
        start = await session.post("/reset", WORDLE)
        assert start["observation"].startswith("Wordle.")
        first = await session.post("/step", turn(WORDLE, "zzzzz"))
        assert (first["reward"], first["terminated"], first["truncated"]) == (0.0, False, False)
        last = await session.post("/step", turn(WORDLE, f"It is\n{SECRET.upper()}."))
        assert (last["reward"], last["terminated"]) == (1.0, True)
        with pytest.raises(ServiceError, match="POST /reset first"):
            await session.post("/step", turn(WORDLE, SECRET))
        answer = await session.post("/verify", turn(WORDLE, "whatever"))
    assert (answer["reward"], answer["reward_components"], answer["steps"]) == (1.0, {"return": 1.0}, 2)


async def test_reset_begins_again_and_forgets_what_was_won():
    async with playing() as peers:
        session = peers["games"].session()
        await session.post("/reset", WORDLE)
        await session.post("/step", turn(WORDLE, SECRET))
        await session.post("/reset", WORDLE)
        assert (await session.post("/verify", rollout(WORDLE)))["reward"] == 0.0


async def test_the_third_illegal_move_loses_and_none_changes_the_game():
    async with playing() as peers:
        session = peers["games"].session()
        await session.post("/reset", WORDLE)
        steps = [await session.post("/step", turn(WORDLE, "I deserve \\boxed{reward 1.0}")) for _ in range(3)]
    assert [step["terminated"] for step in steps] == [False, False, True]
    assert all(step["observation"].startswith("Illegal move: a guess is five letters") for step in steps)
    assert "After 2 more the game is lost.\n\nGuesses left: 6." in steps[0]["observation"]
    assert sum(step["reward"] for step in steps) == 0.0


async def test_a_step_without_an_episode_and_a_row_of_no_game_are_refused():
    async with playing() as peers:
        with pytest.raises(ServiceError, match="field 'game'"):
            await peers["games"].session().post("/reset", {**WORDLE, "game": "chess"})
        session = peers["games"].session()
        await session.post("/seed_session", WORDLE)
        with pytest.raises(ServiceError, match="POST /reset first"):
            await session.post("/step", turn(WORDLE, SECRET))


async def test_sixty_four_games_at_once_do_not_see_each_other():
    async with playing() as peers:

        async def play(number):
            session = peers["games"].session()
            row = {**WORDLE, "seed": number}
            await session.post("/reset", row)
            await session.post("/step", turn(row, "zzzzz"))
            await session.post("/step", turn(row, server.GAMES["wordle"](number - number % 2).secret))
            return (await session.post("/verify", rollout(row)))["reward"]

        rewards = await asyncio.gather(*map(play, range(64)))
    assert rewards[::2] == [1.0] * 32
    assert sum(rewards[1::2]) <= 1


def service(folder):
    return load(ROOT / folder / "app.py").app


async def play(replies, row, **options):
    apps = {"games": server.app, "agent": service("agents/gymnasium"), "model": service("models/scripted")}
    configured = {"agent": {"gym": "games", "model": "model", **options}, "model": {"replies": replies, "tokens": True}}
    async with local_services(configured, **apps) as peers:
        return await peers["agent"].post("/run", row)


async def test_the_agent_plays_to_the_end_and_the_tokens_are_one_segment():
    scored = await play([{"turn": 1, "text": "crane"}, {"turn": 2, "text": SECRET}], WORDLE)
    trace = scored["ng"]
    roles = [item["role"] for item in scored["response"]["output"]]
    assert (scored["reward"], trace["stop_reason"], trace["turns"]) == (1.0, "answer", 2)
    assert roles == ["user", "assistant", "user", "assistant"]
    (segment,) = trace["segments"]
    assert len(segment["mask"]) == 2
    masked = [bytes(segment["token_ids"][start:end]).decode("utf-8", "replace") for start, end in segment["mask"]]
    assert masked[0].startswith("crane")
    assert masked[1].startswith(SECRET)


async def test_an_agent_that_does_not_take_turns_is_refused():
    apps = {"games": server.app, "agent": service("agents/simple"), "model": service("models/scripted")}
    async with local_services({"agent": {"gym": "games", "model": "model"}}, **apps) as peers:
        with pytest.raises(ServiceError, match=r"games is played turn by turn .* `app: agents/gymnasium`") as raised:
            await peers["agent"].post("/run", WORDLE)
    assert raised.value.failure == "config"


async def test_the_agents_trajectory_alone_is_worth_the_same():
    scored = await play([{"turn": 1, "text": "no"}, {"turn": 2, "text": SECRET}], WORDLE)
    async with playing() as peers:
        again = await peers["games"].post("/verify", {**WORDLE, "response": scored["response"]})
    assert (scored["reward"], again["reward"], again["steps"]) == (1.0, 1.0, 2)


def user_message(text):
    return {"type": "message", "role": "user", "content": text}


@pytest.mark.parametrize("starts_with_the_board", [False, True])
@pytest.mark.parametrize(
    "turns",
    [
        pytest.param([["Let me think.", guess] for guess in ("crane", "slate", SECRET)], id="two messages in a turn"),
        pytest.param([[], [], []], id="turns without output"),
        pytest.param([["crane"], [], [SECRET]], id="one turn without output"),
    ],
)
async def test_a_stored_game_has_the_steps_and_the_reward_of_the_played_one(turns, starts_with_the_board):
    async with playing() as peers:
        session = peers["games"].session()
        board = (await session.post("/reset", WORDLE))["observation"]
        output = [user_message(board)] if starts_with_the_board else []
        for texts in turns:
            step = await session.post("/step", rollout(WORDLE, *map(says, texts)))
            output += [*map(says, texts), user_message(step["observation"])]
        if starts_with_the_board:
            output.pop()  # agents/gymnasium ends with the last turn
        live = await session.post("/verify", rollout(WORDLE, *output))
        stored = await peers["games"].post("/verify", rollout(WORDLE, *output))
    assert [stored[key] for key in ("reward", "steps", "over")] == [live[key] for key in ("reward", "steps", "over")]
    assert live["steps"] == 3


async def test_a_last_turn_that_was_cut_off_is_not_a_step_of_a_stored_game():
    cut_off = rollout(WORDLE, user_message("Wordle."), says("crane"), user_message("YY---"), says(SECRET))
    cut_off["response"]["status"] = "incomplete"
    async with playing() as peers:
        stored = await peers["games"].post("/verify", cut_off)
    assert (stored["reward"], stored["steps"]) == (0.0, 1)


async def test_without_observations_each_message_of_a_stored_game_is_a_turn():
    async with playing() as peers:
        stored = await peers["games"].post("/verify", rollout(WORDLE, says("crane"), says(SECRET)))
    assert (stored["reward"], stored["steps"]) == (1.0, 2)


async def test_the_agent_stops_at_its_limit():
    scored = await play([{"text": "zzzzz"}], WORDLE, max_steps=3)
    assert (scored["reward"], scored["ng"]["stop_reason"], scored["ng"]["turns"]) == (0.0, "max_steps", 3)


async def test_an_environment_without_steps_fails_the_rollout_by_name():
    apps = {
        "games": module("tool_minimal").app,
        "agent": service("agents/gymnasium"),
        "model": service("models/scripted"),
    }
    async with local_services({"agent": {"gym": "games", "model": "model"}}, **apps) as peers:
        with pytest.raises(ServiceError, match="/reset"):
            await peers["agent"].post("/run", rows("tool_minimal", "example")[0])
