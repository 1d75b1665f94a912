"""ng_quickstart without its commands: the rollouts that it shows, and its last lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ngym.cli import quickstart
from ngym.cli.shell.walkthrough import Walkthrough


def row(task: int, reward: float | None, tool_calls: int) -> dict[str, Any]:
    return {"_ng_task_index": task, "_ng_rollout_index": 0, "reward": reward, "ng": {"tool_calls": tool_calls}}


class Rehearsal(Walkthrough):
    """Runs no command, but writes the rollouts that `ng_collect_rollouts` would write."""

    rows: tuple[dict[str, Any], ...] = ()

    def _run(self, arguments: list[str], name: str) -> None:
        if name == "ng_collect_rollouts":
            output = Path(arguments[arguments.index("--output") + 1])
            output.write_text("".join(json.dumps(row) + "\n" for row in self.rows))

    @contextmanager
    def background(self, log: Path, name: str, *arguments: str) -> Iterator[None]:
        yield


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(quickstart, "version", lambda name: "1")
    monkeypatch.setattr(quickstart, "Walkthrough", Rehearsal)
    return tmp_path / "quick"


@pytest.mark.parametrize(
    ("rows", "shown"),
    [
        ([row(0, 0, 1), row(1, 0, 0), row(2, 1, 0), row(3, 1, 2), row(4, 0, 3)], [3, 1, 4]),
        ([row(0, 1, 0), row(1, 1, 1), row(2, None, 0), row(3, 1, 4)], [1, 3, 0]),
        ([row(0, None, 0)], [0]),
        ([], []),
    ],
)
def test_the_quickstart_shows_a_use_of_the_tool_a_wrong_guess_and_a_longer_rollout(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]], shown: list[int]
) -> None:
    monkeypatch.setattr(Rehearsal, "rows", tuple(rows))
    result = CliRunner().invoke(quickstart.main, ["--folder", str(folder)])
    assert result.exit_code == 0, result.output
    headlines = [line for line in result.stdout.splitlines() if line.startswith("task ")]
    assert [int(line.split()[1].rstrip(",")) for line in headlines] == shown


def test_the_quickstart_ends_with_what_to_try_next_or_one_json_object(folder: Path) -> None:
    result = CliRunner().invoke(quickstart.main, ["--folder", str(folder)])
    assert result.exit_code == 0 and f"Everything is in {folder}" in result.stdout
    assert f"ng_run --config {folder / 'global_config.yaml'}" in result.stdout
    result = CliRunner().invoke(quickstart.main, ["--folder", str(folder), "--json"])
    written = json.loads(result.stdout)
    assert written.pop("seconds") >= 0 and written == {
        "before": str(folder / "sft" / "policy"),
        "policy": str(folder / "grpo" / "policy"),
        "rollouts": str(folder / "rollouts.jsonl"),
        "metrics": str(folder / "grpo" / "metrics.jsonl"),
    }
