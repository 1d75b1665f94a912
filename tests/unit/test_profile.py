"""`ng_profile`: tasks that are solved always, never or sometimes, and tasks without a learning signal."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import ngym
from ngym.cli.rollouts.export import main as export
from ngym.cli.rollouts.profile import main
from ngym.cli.rollouts.reverify import main as reverify
from ngym.files.hub_upload import rollouts_upload


def rollout(index: int, reward: float | None) -> dict[str, Any]:
    return {"agent_ref": {"name": "a"}, "_ng_task_index": index, "reward": reward, "ng": {"task_id": f"t{index}"}}


def write_rollouts(folder: Path, *rewards: list[float | None]) -> str:
    rows = [rollout(index, reward) for index, of_task in enumerate(rewards) for reward in of_task]
    path = folder / "out.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_reward_that_is_1_but_for_rounding_solves_its_task(tmp_path: Path) -> None:
    """As of a rubric with six equal criteria that an answer meets in full."""
    almost = 0.9999999999999999
    source = write_rollouts(tmp_path, [almost, 1.0], [0.999, 1.0])
    result = CliRunner().invoke(main, [source, "--output", str(tmp_path / "tasks.jsonl")])
    assert result.exit_code == 0, result.output
    tasks = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    assert [(task["verdict"], task["pass_rate"]) for task in tasks] == [("always", 1.0), ("mixed", 0.5)]
    rows = [{**json.loads(line), "response": {"output": []}} for line in Path(source).read_text().splitlines()]
    Path(source).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert ngym.load_rollouts(source).pass_at(1) == 0.75


def test_each_task_is_listed_with_its_pass_rate_and_learning_signal(tmp_path: Path) -> None:
    source = write_rollouts(
        tmp_path, [1.0, 1.0], [0.0, 0.0], [1.0, 0.0, None, 0.0], [None], [0.2, 0.4], [0.1 + 0.2, 0.3]
    )
    result = CliRunner().invoke(main, [source, "--output", str(tmp_path / "tasks.jsonl")])
    assert result.exit_code == 0, result.output
    tasks = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    assert [(task["verdict"], task["pass_rate"], task["has_learning_signal"]) for task in tasks] == [
        ("always", 1.0, False),
        ("never", 0.0, False),
        ("mixed", 1 / 3, True),
        ("unscored", None, False),
        ("never", 0.0, True),
        ("never", 0.0, False),  # equal up to rounding
    ]
    assert (tasks[2]["rollouts"], tasks[2]["unscored"], tasks[2]["task_id"]) == (4, 1, "t2")
    assert "a: 6 tasks, 11 scored rollouts, mean pass rate 0.267" in result.output
    assert "no signal        4   66.7%" in result.output


def test_a_task_that_training_drew_several_times_is_one_task(tmp_path: Path) -> None:
    rows = [{**rollout(draw, float(draw % 2)), "ng": {"task_id": f"t{draw % 4}"}} for draw in range(96)]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = CliRunner().invoke(main, [str(tmp_path / "rollouts.jsonl"), "--json"])
    tasks = [json.loads(line) for line in result.output.splitlines()]
    assert [(task["task_id"], task["rollouts"]) for task in tasks] == [(f"t{number}", 24) for number in range(4)]


def test_rows_without_task_ids_are_distinguished_by_their_index(tmp_path: Path) -> None:
    rows = [{**rollout(index, 1.0), "ng": {}} for index in (0, 0, 1)]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = CliRunner().invoke(main, [str(tmp_path / "rollouts.jsonl"), "--json"])
    assert [json.loads(line)["rollouts"] for line in result.output.splitlines()] == [2, 1]


def test_an_output_that_is_named_as_compressed_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, [write_rollouts(tmp_path, [1.0]), "--output", str(tmp_path / "tasks.jsonl.gz")])
    assert result.exit_code != 0 and not (tmp_path / "tasks.jsonl.gz").exists()


def test_what_counts_as_solved_can_be_said(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, [write_rollouts(tmp_path, [0.2, 0.4]), "--solved", "0.3", "--json"])
    assert json.loads(result.output)["verdict"] == "mixed"
    for value in ("nan", "inf"):
        result = CliRunner().invoke(main, [write_rollouts(tmp_path, [0.2, 0.4]), "--solved", value])
        assert result.exit_code == 2 and f"--solved: must be a number within ±3.4e+38, not {value}" in result.stderr


def test_the_tasks_are_distinguished_by_a_field(tmp_path: Path) -> None:
    tasks = [
        (0, "easy", 1.0),
        (0, "easy", 1.0),
        (1, "hard", 1.0),
        (1, "hard", 0.0),
        (2, "hard", 0.0),
        (2, "hard", None),
    ]
    path = tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps({**rollout(i, reward), "level": level}) + "\n" for i, level, reward in tasks))
    result = CliRunner().invoke(main, [str(path), "--by", "level"])
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    assert ["easy", "1", "1.000", "1", "0", "0", "1", "0.0%"] in lines
    assert ["hard", "2", "0.250", "0", "1", "1", "1", "25.0%"] in lines
    rows = [
        json.loads(line)
        for line in CliRunner().invoke(main, [str(path), "--by", "level", "--json"]).output.splitlines()
    ]
    assert [row["subset"] for row in rows] == ["easy", "hard", "hard"]
    assert "subset" not in json.loads(CliRunner().invoke(main, [str(path), "--json"]).output.splitlines()[0])


def test_control_characters_of_a_row_do_not_reach_the_terminal(tmp_path: Path) -> None:
    path, title = tmp_path / "out.jsonl", "\x1b]0;title\x07\x9b2J"
    path.write_text(json.dumps({**rollout(0, 1.0), "agent_ref": {"name": f"a{title}"}, "level": f"b{title}"}) + "\n")
    result = CliRunner().invoke(main, [str(path), "--by", "level"])
    assert result.exit_code == 0 and not {"\x1b", "\x07", "\x9b"} & set(result.output)
    assert r"a\x1b]0;title\x07\x9b2J: 1 tasks" in result.output and r"b\x1b]0;title\x07\x9b2J" in result.output


def test_what_is_not_a_rollout_is_named(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text('{"reward": 1.0}\n')
    result = CliRunner().invoke(main, [str(tmp_path / "out.jsonl")])
    assert result.exit_code == 2 and "out.jsonl:1: not a rollout" in result.stderr


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"reward": "x"}, "'reward' must be null or a number within ±3.4e+38, not 'x'"),
        ({"reward": True}, "'reward' must be null or a number within ±3.4e+38, not True"),
        ({"ng": {"schema_version": 2}}, "its ng.schema_version is 2, and this ngym reads 1; update ngym"),
    ],
)
def test_all_readers_of_stored_rollouts_refuse_the_same_rows(
    tmp_path: Path, root: Path, wrong: dict[str, Any], problem: str
) -> None:
    path, good = tmp_path / "out.jsonl", {**rollout(0, 1.0), "response": {"output": []}}
    good["agent_ref"] = {"name": "counter_agent"}
    path.write_text(json.dumps({**good, "ng": {"schema_version": 1}}) + "\n" + json.dumps(good | wrong) + "\n")
    result = CliRunner().invoke(main, [str(path)])
    assert result.exit_code == 2 and f"out.jsonl:2: {problem}" in result.stderr
    words = [
        "--config",
        str(root / "global_config.yaml"),
        "--input",
        str(path),
        "--output",
        str(tmp_path / "again.jsonl"),
    ]
    result = CliRunner().invoke(reverify, [*words, "--dry-run"])
    assert result.exit_code == 2 and f"out.jsonl:2: {problem}" in result.stderr
    with pytest.raises(ngym.UsageError, match=re.escape(f"out.jsonl:2: {problem}")):
        rollouts_upload([path], "me/mine")
    with pytest.raises(ngym.UsageError, match=re.escape(problem)):
        _ = ngym.load_rollouts(path).mean_reward
    path.write_text(json.dumps(good | wrong) + "\n")
    with pytest.raises(ngym.UsageError, match=re.escape(f"its first row: {problem}")):
        ngym.load_rollouts(path)


def test_copies_of_rollouts_are_refused_wherever_they_would_count_twice(tmp_path: Path) -> None:
    rows = [
        {**rollout(0, reward), "ng": {"task_id": "t0", "rollout_id": name}, "_ng_rollout_index": 0}
        | {"response": {"status": "completed", "output": []}, "responses_create_params": {"input": "Question?"}}
        for name, reward in (("r0", 1.0), ("r1", 0.0))
    ]
    part, merged = tmp_path / "out.jsonl", tmp_path / "merged.jsonl"
    part.write_text(json.dumps(rows[1]) + "\n")
    merged.write_text("".join(json.dumps(row) + "\n" for row in rows))
    problem = "the rollout r1 was read before; leave out one of its copies"
    result = CliRunner().invoke(main, [str(part), str(merged)])
    assert result.exit_code == 2 and f"merged.jsonl:2: {problem}" in result.stderr
    words = ["--format", "rollouts", "--input", str(part), str(merged), "--output", str(tmp_path / "all.jsonl")]
    result = CliRunner().invoke(export, words)
    assert result.exit_code == 2 and f"merged.jsonl:2: {problem}" in result.stderr
    assert CliRunner().invoke(export, [*words, "--dedupe"]).exit_code == 0
    both = ngym.load_rollouts(part, merged)
    with pytest.raises(ngym.UsageError, match="the rollout r1 is there twice, as rows 0 and 2 of what was loaded"):
        _ = both.mean_reward
    with pytest.raises(ngym.UsageError, match=re.escape(problem)):
        both.metrics()
    assert both[1:].mean_reward == 0.5 and both[:1].mean_reward == 0
