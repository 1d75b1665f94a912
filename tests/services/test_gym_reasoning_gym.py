"""gym_servers/reasoning_gym with the real library: known answers score 1, others less, and no text harms the server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from bridge_service import alone, serve_bridged
from click.testing import CliRunner
from shipped_gym import rollout, rows, says

from ngym.cli.validate import main
from ngym.errors import ServiceError
from ngym.peers import Peer

NAME = "reasoning_gym"
GARBAGE = ("no idea", "0", "[]", "{}", "[1, 2]", "null", "Yes", "True", "nan", "-1")


@pytest.fixture(scope="module")
def gold() -> dict[str, dict[str, Any]]:
    """Dataset -> a case whose answer is right."""
    cases = [case for case in rows(NAME, "gold") if case["expect"]["is_correct"]]
    return {case["task"]["dataset"]: case for case in cases}


async def verify_answer(peer: Peer, task: dict[str, Any], answer: str) -> dict[str, Any]:
    found: dict[str, Any] = await peer.post("/verify", rollout(task, says(f"<answer>{answer}</answer>")))
    return found


async def test_known_answers_are_right_and_what_the_library_gets_wrong_is_put_right(
    tmp_path: Path, shared_venvs: Path, gold: dict[str, dict[str, Any]]
) -> None:
    mark = tmp_path / "was-run"
    attack = f"__import__('pathlib').Path('{mark}').touch()"
    async with serve_bridged(NAME, tmp_path, shared_venvs) as peer:
        for name in ("game_of_life_halting", "graph_color", "gsm_symbolic", "arc_agi", "rearc", "rubiks_cube"):
            verdict = await peer.post("/verify", rollout(gold[name]["task"], says(gold[name]["text"])))
            assert (verdict["reward"], verdict["is_correct"], verdict["score"]) == (1.0, True, 1.0), (name, verdict)
            assert (await verify_answer(peer, gold[name]["task"], "anything"))["reward"] == 0.0, name
        unreadable = await verify_answer(peer, gold["prime_factorization"]["task"], "two times three")
        assert (unreadable["reward"], unreadable["reason"]) == (0.0, "the library cannot read it: ValueError")
        assert (await verify_answer(peer, gold["puzzle24"]["task"], "6*4*1*1"))[
            "reward"
        ] == 0.0  # not the numbers given
        trying = await verify_answer(peer, gold["countdown"]["task"], "1 + 1")
        assert trying["reward"] == 0.0 < trying["score"]
        left_open = await peer.post("/verify", rollout(gold["countdown"]["task"], says("<answer>1 + 1")))
        assert left_open["reward"] == 0.0 and left_open["extracted_answer"] is None
        for name, fooling in (("complex_arithmetic", "nan"), ("gsm_symbolic", "one of 1 2 3 4 5 6 7 8 9")):
            assert (await verify_answer(peer, gold[name]["task"], fooling))["reward"] == 0.0, name
        for name in (
            "string_insertion",
            "spiral_matrix",
            "binary_matrix",
            "n_queens",
            "countdown",
            "simple_integration",
        ):
            assert (await verify_answer(peer, gold[name]["task"], attack))["reward"] == 0.0, name
        assert (await verify_answer(peer, gold["simple_integration"]["task"], "Integral(x, x)"))["reward"] == 0.0
        assert not mark.exists()


async def test_bombs_do_not_hang_it_wrong_rows_get_a_line_and_scores_can_be_rewards(
    tmp_path: Path, shared_venvs: Path, gold: dict[str, dict[str, Any]]
) -> None:
    async with serve_bridged(NAME, tmp_path, shared_venvs, "deadline_s=1", "reward=score") as peer:
        bombs = [
            verify_answer(peer, gold["countdown"]["task"], "9**9**9**9"),
            verify_answer(peer, gold["intermediate_integration"]["task"], "9**9**9**9 + exp(x**9**9**9)"),
        ]
        for verdict in await asyncio.gather(*bombs):
            assert verdict["reward"] in (0.0, 0.01, None) and verdict["outcome"] != "correct", verdict
        trying = await verify_answer(peer, gold["countdown"]["task"], "1 + 1")
        assert 0 < trying["reward"] == trying["score"] < 1 and not trying["is_correct"]
        task = gold["leg_counting"]["task"]
        other = await verify_answer(peer, {**task, "fingerprint": "0"}, "4")
        assert (other["reward"], other["reason"]) == (None, "the library generates another task from this row")
        for wrong, complaint in (
            ({"dataset": "leg_countin"}, "did you mean 'leg_counting'?"),
            ({"dataset": "propositional_logic"}, "a copied premise gets the full score"),
            ({"dataset": "boxnet"}, "boxnet is not supported"),
        ):
            with pytest.raises(ServiceError) as caught:
                await peer.session().post("/seed_session", {**rows(NAME, "example")[0], **wrong})
            assert caught.value.status == 422 and complaint in caught.value.detail


@pytest.mark.soak
def test_ng_validate_finds_it_right_in_all_datasets(tmp_path: Path, shared_venvs: Path) -> None:
    config = alone(NAME, tmp_path, shared_venvs)
    tried = CliRunner().invoke(main, ["--config", str(config), "--environment", NAME, "--within", "60"])
    assert tried.exit_code == 0, tried.output


@pytest.mark.soak
async def test_no_garbage_is_paid_for_in_any_dataset(
    tmp_path: Path, shared_venvs: Path, gold: dict[str, dict[str, Any]]
) -> None:
    questions = {row["dataset"]: row for row in rows(NAME, "train")}
    async with serve_bridged(NAME, tmp_path, shared_venvs) as peer:
        for name, case in gold.items():
            known = json.dumps(case["text"])
            wrong = [answer for answer in GARBAGE if f">{answer}<".casefold() not in known.casefold()]
            for answer in (*wrong, "( " * 500, "[" * 2000, questions[name]["responses_create_params"]["input"]):
                found = await verify_answer(peer, case["task"], answer)
                assert found["reward"] == 0.0, (name, answer, found)
