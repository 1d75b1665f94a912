"""`ng_validate --environments`: shipped environments pass; environments that can be fooled, or that forget, do not."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from local_services import local_services
from pydantic import BaseModel

from ngym import Session, ToolError, VerifyRequest, gym_server
from ngym.cli.init import project
from ngym.cli.validate import main
from ngym.errors import UsageError
from ngym.validation import ROWS, Environment, validate_environment


class Task(VerifyRequest):
    word: str


class Key(BaseModel):
    key: str


GOLD = [
    {"case": "right", "task": {"word": "stone"}, "text": "It is stone.", "expect": {"reward": 1.0}},
    {"case": "wrong", "task": {"word": "stone"}, "text": "It is bread.", "expect": {"reward": 0.0}},
]


def environment(folder: Path, gold: list[dict[str, Any]] = GOLD, **rows: list[dict[str, Any]]) -> Environment:
    for name, lines in {"gold": gold, **rows}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Environment("words", folder)


async def mistakes_of(verify: Any, environment: Environment, within_s: float = 60.0) -> dict[str, list[str]]:
    async with local_services({}, words=gym_server(verify=verify)) as peers:
        findings = await validate_environment(environment, peers["words"], within_s)
    return {finding.check: finding.mistakes for finding in findings if finding.mistakes}


async def right(task: Task) -> float:
    return float(task.word in task.text)


def test_every_shipped_environment_passes(root: Path) -> None:
    # Answers with an endless loop use up the CPU time that they have.
    options = ["--environments", "--within", "60", "code_exec.limits.cpu_s=1"]
    result = CliRunner().invoke(main, ["--config", str(root / "global_config.yaml"), *options])
    assert result.exit_code == 0, result.output
    assert "environments, all right" in result.output


async def test_an_environment_that_is_right_has_no_mistakes(tmp_path: Path) -> None:
    assert await mistakes_of(right, environment(tmp_path)) == {}


async def test_one_that_always_pays_is_found_by_gold_and_by_damaged_answers(tmp_path: Path) -> None:
    async def generous(task: Task) -> float:
        return 1.0

    found = await mistakes_of(generous, environment(tmp_path))
    assert found["gold"] == found["together"] == ["wrong: got {'reward': 1.0}, must be {'reward': 0.0}"]
    assert found["worse"] == [f"right: {what} gets 1.0 too" for what in ("saying nothing", "noise", "half of it")]


async def test_one_that_crashes_on_a_damaged_answer_is_reported(tmp_path: Path) -> None:
    """A policy could avoid a bad score by such an answer."""

    async def fragile(task: Task) -> float:
        return float(task.word == task.text.split()[-1].strip("."))

    found = await mistakes_of(fragile, environment(tmp_path))
    assert set(found) == {"worse"}
    [mistake] = found["worse"]
    assert mistake.startswith("right: saying nothing is refused: verify failed: IndexError: list index out of range (")


async def test_one_that_changes_its_mind_is_reported(tmp_path: Path) -> None:
    requests = []

    async def moody(task: Task) -> float:
        requests.append(task)
        return float(task.word in task.text) / len(requests)

    found = await mistakes_of(moody, environment(tmp_path))
    assert found["again"][0].startswith("right: a second time it gets (0.")


async def test_one_whose_sessions_share_something_is_reported(tmp_path: Path) -> None:
    inside = 0

    async def crowded(task: Task, session: Session) -> float:
        nonlocal inside
        inside += 1
        alone = inside == 1
        for _ in range(3):
            await asyncio.sleep(0)
        inside -= 1
        return float(alone and task.word in task.text)

    assert set(await mistakes_of(crowded, environment(tmp_path))) == {"together"}


async def test_a_tool_that_crashes_is_reported_though_no_case_calls_it(tmp_path: Path) -> None:
    async def lookup(body: Key) -> str:
        """Look it up."""
        raise RuntimeError("the database is gone")

    async def listed(body: Key) -> set[str]:
        """All of them."""
        return {body.key}

    async def refused(body: Key) -> str:
        """Says no."""
        raise ToolError("there is no such key")

    words = gym_server(verify=right, tools=[lookup, listed, refused])
    async with local_services({}, words=words) as peers:
        findings = await validate_environment(environment(tmp_path), peers["words"], 60.0)
    [(check, tried, (first, second))] = [(one.check, one.looked_at, one.mistakes) for one in findings if one.mistakes]
    assert (check, tried) == ("tools", "3 that no gold case calls, tried with made-up arguments")
    assert first.startswith("lookup: lookup failed: RuntimeError: the database is gone (test_validation.py:")
    assert second.startswith("listed: listed returned a value that is not JSON")


async def test_one_that_is_slow_is_reported(tmp_path: Path) -> None:
    assert set(await mistakes_of(right, environment(tmp_path), within_s=0.0)) == {"time"}


async def test_rows_that_it_refuses_and_tasks_of_both_splits_are_reported(tmp_path: Path) -> None:
    row = {"responses_create_params": {"input": "Say stone."}, "word": "stone"}
    tools = {"input": "Say bread.", "tools": [{"type": "function", "name": "fly"}]}
    rows = {
        "train": [row, {**row, "word": 3}],
        "validation": [row, {"responses_create_params": tools, "word": "bread"}],
    }
    found = await mistakes_of(right, environment(tmp_path, **rows))
    assert set(found) == {"rows"}
    refusal, twice = found["rows"]
    assert refusal.startswith(str(tmp_path)) and "/train.jsonl:2: " in refusal and "word" in refusal
    assert twice.startswith(str(tmp_path)) and twice.endswith("/validation.jsonl:1: this task is also in train.jsonl")


@pytest.mark.parametrize(
    ("line", "reason"),
    [("[1]", "not a JSON object but list"), ('{"case": "x"}', "task: Field required"), ("{", "not JSON")],
)
def test_a_gold_line_that_is_invalid_is_named(tmp_path: Path, line: str, reason: str) -> None:
    (tmp_path / "gold.jsonl").write_text(f"\n{line}\n")
    with pytest.raises(UsageError, match=rf"gold\.jsonl:2: {reason}"):
        Environment("words", tmp_path).cases()


def test_a_gold_case_that_calls_what_is_not_a_tool_is_reported(tmp_path: Path) -> None:
    for path, text in project("mine").items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    case = {"case": "x", "task": {"word": "ab"}, "calls": [["miror", {"word": "ab"}]], "expect": {"reward": 1.0}}
    (tmp_path / "gym_servers" / "mine" / "data" / "gold.jsonl").write_text(json.dumps(case))
    words = ["--config", str(tmp_path / "global_config.yaml"), "--environment", "mine", "--within", "60"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 1
    assert "it calls 'miror', which is not a tool of this server (did you mean 'mirror'?)" in result.output


@pytest.mark.parametrize("name", ["counter", "games"])
def test_a_copy_of_an_environments_folder_is_an_environment_with_its_tasks(
    root: Path, tmp_path: Path, name: str
) -> None:
    shutil.copytree(root / "gym_servers" / name, tmp_path / "gym_servers" / "mine")
    (tmp_path / "global_config.yaml").write_text("mine: {kind: gym_server, app: gym_servers/mine}\n")
    words = ["--config", str(tmp_path / "global_config.yaml"), "--environment", "mine", "--within", "60"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    rows = sum(len((root / "data" / name / file).read_text().splitlines()) for file in ROWS)
    assert f"right  rows      {rows:,} rows" in result.output


def test_data_next_to_the_config_is_found_by_the_name_of_the_environment(tmp_path: Path) -> None:
    for path, text in project("mine").items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / "data").mkdir()
    (tmp_path / "gym_servers" / "mine" / "data").rename(tmp_path / "data" / "mine")
    words = ["--config", str(tmp_path / "global_config.yaml"), "--environment", "mine", "--within", "60"]
    assert CliRunner().invoke(main, words).exit_code == 0


def test_a_new_project_passes_and_a_gym_server_without_gold_is_named(tmp_path: Path) -> None:
    for path, text in project("mine").items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    words = ["--config", str(tmp_path / "global_config.yaml"), "--environment", "mine"]
    assert CliRunner().invoke(main, [*words, "--within", "60"]).exit_code == 0
    (tmp_path / "gym_servers" / "mine" / "data" / "gold.jsonl").unlink()
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2 and "'mine' has no gold answers" in result.stderr


async def test_a_tool_that_never_answers_ends_the_checks(tmp_path: Path) -> None:
    ended = asyncio.Event()

    async def lookup(body: Key) -> str:
        """Look it up."""
        await ended.wait()
        return "too late"

    own = environment(tmp_path, [{**case, "calls": [["lookup", {"key": "x"}]]} for case in GOLD])
    async with local_services({}, words=gym_server(tools=[lookup], verify=right)) as peers:
        found = await validate_environment(own, peers["words"], 60.0, 0.2)
        ended.set()
    ((check, looked_at, (mistake,)),) = found
    assert (check, looked_at) == ("gold", "1 of 2 cases") and "the other checks were not made" in mistake


def test_ports_that_a_run_of_the_same_config_holds_are_not_an_obstacle(tmp_path: Path) -> None:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    head, service = (each.getsockname()[1] for each in listeners)
    config = tmp_path / "global_config.yaml"
    config.write_text(
        f"ngym: {{head: {{port: {head}}}}}\nletters: {{kind: gym_server, app: gym_servers/letters, port: {service}}}\n"
    )
    result = CliRunner().invoke(main, ["--config", str(config), "--environment", "letters"])
    for each in listeners:
        each.close()
    assert result.exit_code == 0, result.output
    assert "1 environment, all right" in result.output
