"""`ng_reverify`: rewards of a fixed verifier without a model; tools are called again, and other fields stay."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fastapi import Request
from local_services import local_services
from pydantic import BaseModel
from starlette.responses import Response

from ngym import ServiceError, Session, VerifyRequest, gym_server
from ngym.cli.rollouts.reverify import _replace_file, main
from ngym.grading.reverify import verify_row
from ngym.peers import Peer
from ngym.services.gym.tools import Tool, describe_tool, register_tool


class Add(BaseModel):
    amount: int


async def add(body: Add, session: Session) -> str:
    """Add."""
    if body.amount < 0:
        raise RuntimeError("the database is gone")
    session["total"] = session.get("total", 0) + body.amount
    return "added"


async def verify(task: VerifyRequest, session: Session) -> float:
    return float(session.get("total", 0))


def rollout(agent: str, output: list[dict[str, Any]], reward: float | None, **fields: Any) -> dict[str, Any]:
    trace = {"stop_reason": "answer", "status": "ok", "segments": [{"token_ids": [1, 2]}], "reward_components": {}}
    return {
        "responses_create_params": {"input": "a question"},
        "agent_ref": {"type": "responses_api_agents", "name": agent},
        "response": {"output": output},
        "reward": reward,
        "ng": trace,
        **fields,
    }


def says(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def adds(amount: int, call_id: str) -> dict[str, Any]:
    arguments = json.dumps({"amount": amount})
    return {"type": "function_call", "name": "add", "call_id": call_id, "arguments": arguments}


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    rows = [
        rollout("mcqa_agent", [says("\\boxed{B}")], 0.0, options=[{"A": "x"}, {"B": "y"}], expected_answer="B"),
        rollout("counter_agent", [adds(3, "a"), adds(4, "b"), says("Done.")], 1.0, target=7),
        rollout("counter_agent", [adds(3, "a"), says("Done.")], None, target=7),
    ]
    path = tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(root: Path, *words: str) -> Any:
    return CliRunner().invoke(main, ["--config", str(root / "global_config.yaml"), *words])


def test_rewards_are_recomputed_and_the_rest_stays(root: Path, stored: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.jsonl"
    result = run(root, "--input", str(stored), "--output", str(again))
    assert result.exit_code == 0, result.output
    assert "1 rewards are the same, 2 changed" in result.output and "row 1: 0.0 -> 1.0" in result.output
    before, after = ([json.loads(line) for line in path.read_text().splitlines()] for path in (stored, again))
    assert [row["reward"] for row in after] == [1.0, 1.0, 0.0]
    for old, new in zip(before, after, strict=True):
        assert new["response"] == old["response"] and new["ng"]["segments"] == old["ng"]["segments"]
    assert run(root, "--input", str(stored), "--output", str(again)).exit_code == 2, "it is there already"


CASES = 4  # of each environment


def gold_rollouts(root: Path) -> list[dict[str, Any]]:
    """Of every shipped environment that has an agent: gold answers as they would be stored, their calls among the items."""
    config = (root / "global_config.yaml").read_text()
    found = []
    for file in sorted((root / "data").glob("*/gold.jsonl")):
        agent = f"{file.parent.name}_agent"
        cases = [json.loads(line) for line in file.read_text().splitlines()] if f"\n{agent}:" in config else []
        for case in [case for case in cases if "reward" in case["expect"]][:CASES]:
            output = case.get("output") or [says(case.get("text", ""))]
            if not any(item["type"] == "function_call" for item in output):
                output = [*function_calls(case.get("calls", ())), *output]
            found.append(rollout(agent, output, case["expect"]["reward"], **case["task"]))
    return found


def function_calls(calls: Iterable[tuple[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"type": "function_call", "name": name, "call_id": f"c{number}", "arguments": json.dumps(arguments)}
        for number, (name, arguments) in enumerate(calls)
    ]


def test_stored_rollouts_of_every_shipped_environment_get_their_rewards_again(root: Path, tmp_path: Path) -> None:
    stored = gold_rollouts(root)
    agents = {row["agent_ref"]["name"] for row in stored}
    assert {"games_agent", "workplace_agent", "judge_agent", "tool_minimal_agent", "code_exec_agent"} <= agents
    source, again = tmp_path / "out.jsonl", tmp_path / "again.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in stored))
    judge = ["policy.app=models/scripted", "policy.file=data/judge/model.jsonl"]
    result = run(root, "--input", str(source), "--output", str(again), "--concurrency", "4", "--models", *judge)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in again.read_text().splitlines()]
    wrong = [
        (old["agent_ref"]["name"], old["reward"], new["reward"], new.get("reason"))
        for old, new in zip(stored, rows, strict=True)
        if new["reward"] != (None if old["reward"] is None else pytest.approx(old["reward"], abs=1e-9))
    ]
    assert wrong == []


def test_what_a_judge_scores_is_refused_where_no_model_may_be_asked(root: Path, tmp_path: Path) -> None:
    source, again = tmp_path / "out.jsonl", tmp_path / "again.jsonl"
    source.write_text(json.dumps(rollout("judge_agent", [says("Dear Ada")], 0.5, mode="rubric")) + "\n")
    result = run(root, "--input", str(source), "--output", str(again))
    assert result.exit_code == 2 and "'judge' asks policy for its rewards; --models starts" in result.stderr
    assert not again.exists()


def test_a_rollout_that_cannot_be_verified_keeps_its_reward_and_is_counted(root: Path, tmp_path: Path) -> None:
    source = tmp_path / "out.jsonl"
    row = rollout("counter_agent", [says("Done.")], 0.5, target="seven", _ng_task_index=3)
    source.write_text(json.dumps(row) + "\n")
    result = run(root, "--input", str(source), "--output", str(tmp_path / "again.jsonl"))
    assert result.exit_code == 1 and "1 could not be verified" in result.output
    assert "row 1: field 'target'" in result.stderr and "row 3" not in result.stderr
    assert json.loads((tmp_path / "again.jsonl").read_text())["reward"] == 0.5


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"reward": 1.0}, "not a rollout: a row has 'response' and 'reward'"),
        ({"reward": 1.0, "response": {}}, "its agent_ref names no agent"),
        (rollout("nobody", [], 1.0), "its rows are of 'nobody', which"),
        (
            {**rollout("counter_agent", [], 1.0), "response": {"output": "x"}},
            "out.jsonl:1: not a rollout: the 'output'",
        ),
        ({**rollout("counter_agent", [], 1.0), "response": {"output": [1, None]}}, "must be a list of objects"),
        (
            {**rollout("counter_agent", [], 1.0), "ng": {"finish_reasons": 5}},
            "ng.finish_reasons must be a list of texts",
        ),
        ({**rollout("counter_agent", [], 1.0), "ng": {"stop_reason": ["x"]}}, "and ng.stop_reason a text"),
    ],
)
def test_what_cannot_be_verified_at_all_is_refused(
    root: Path, tmp_path: Path, row: dict[str, Any], reason: str
) -> None:
    source = tmp_path / "out.jsonl"
    source.write_text(json.dumps(row) + "\n")
    result = run(root, "--input", str(source), "--output", str(tmp_path / "again.jsonl"))
    assert result.exit_code == 2 and reason in result.stderr
    assert not (tmp_path / "again.jsonl").exists()


def test_an_output_has_one_writer_and_a_killed_ones_part_is_replaced(root: Path, stored: Path, tmp_path: Path) -> None:
    words = ["--input", str(stored), "--output", str(tmp_path / "again.jsonl")]
    with _replace_file(tmp_path / "again.jsonl"):
        result = run(root, *words)
    assert result.exit_code == 1
    assert re.search(r"again\.jsonl is being written by .*; wait for it, or choose another --output", result.stderr)
    (tmp_path / "again.jsonl").unlink()
    (tmp_path / ".again.jsonl.partial").write_text("a part of a killed run, longer than nothing\n" * 1000)
    assert run(root, *words).exit_code == 0
    assert len((tmp_path / "again.jsonl").read_text().splitlines()) == 3
    assert {path.name for path in tmp_path.iterdir()} == {"out.jsonl", "again.jsonl"}


def test_an_output_that_is_a_link_stays_one(root: Path, stored: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "again.jsonl"
    link.symlink_to(tmp_path / "elsewhere" / "target.jsonl")
    assert run(root, "--input", str(stored), "--output", str(link)).exit_code == 0
    assert link.is_symlink() and len((tmp_path / "elsewhere" / "target.jsonl").read_text().splitlines()) == 3


def test_the_output_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, synced = tmp_path / "again.jsonl", []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append((os.fstat(fd).st_size, output.exists())))
    with _replace_file(output) as file:
        synced.clear()
        file.write(b"{}\n")
    assert synced[0] == (3, False)


def test_a_signal_leaves_no_file(root: Path, stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupt(row: dict[str, Any], gym: Peer) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    monkeypatch.setattr("ngym.grading.reverify.verify_row", interrupt)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        result = run(root, "--input", str(stored), "--output", str(tmp_path / "again.jsonl"))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert result.exit_code != 0
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


@pytest.mark.parametrize(("output_text", "reward"), [("added", None), ("Error: add failed", 3.0)])
async def test_a_tool_that_crashes_now_is_not_a_reward_unless_the_model_read_it_then(
    output_text: str, reward: float | None
) -> None:
    output = [adds(3, "a"), adds(-1, "b"), {"type": "function_call_output", "call_id": "b", "output": output_text}]
    row = rollout("counter_agent", [*output, says("Done.")], 3.0)
    async with local_services(counter=gym_server(tools=[add], verify=verify)) as peers:
        if reward is None:
            with pytest.raises(ServiceError, match="the database is gone"):
                await verify_row(row, peers["counter"])
        else:
            assert (await verify_row(row, peers["counter"]))["reward"] == reward


async def test_calls_are_repeated_with_all_digits_of_their_integers() -> None:
    bodies: list[bytes] = []

    async def send(arguments: dict[str, Any], session: Session, request: Request) -> Response:
        bodies.append(await request.body())
        return Response("sent")

    gym = gym_server(verify=verify)
    register_tool(gym, Tool(describe_tool("send", "Send.", {"type": "object"}), send))
    arguments = {"account": 123456789012345678901234567890}
    call = {"type": "function_call", "name": "send", "call_id": "a", "arguments": json.dumps(arguments)}
    async with local_services(counter=gym) as peers:
        await verify_row(rollout("counter_agent", [call, says("Sent.")], 1.0), peers["counter"])
    assert [json.loads(body) for body in bodies] == [arguments]
