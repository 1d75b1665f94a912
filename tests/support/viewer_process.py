"""Rollout rows for the viewer's tests, and a viewer process with its address."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import orjson

Json = dict[str, Any]
LOCAL = build_opener(ProxyHandler({}))
LONG_S = 120


def rollout(task: int = 0, index: int = 0, reward: float | None = 1.0, said: str = "It is 4.", **own: Any) -> Json:
    """An output row (reference/rows.md)."""
    status = "unscored" if reward is None else "ok"
    return {
        "responses_create_params": {"input": f"What is {task} + 2?"},
        "agent_ref": {"type": "responses_api_agents", "name": "math_agent"},
        "response": {
            "id": "resp_1",
            "output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": said}]}],
            "usage": {"input_tokens": 20, "output_tokens": 5 + index, "total_tokens": 25 + index},
        },
        "reward": reward,
        "_ng_task_index": task,
        "_ng_rollout_index": index,
        "ng": {
            "schema_version": 1, "run_id": "run-1", "task_id": f"{task:016x}", "rollout_id": f"r-{task}-{index}",
            "attempt": 0, "status": status, "policy_version": [3, 4], "stop_reason": "answer", "turns": 2,
            "tool_calls": 1, "tool_errors": 0, "reward_components": {} if reward is None else {"right": reward},
            "segments": [segment()], "timings": {"total_s": 1.5}, "started_at": "2026-01-01T00:00:00+00:00",
        },
        **own,
    }  # fmt: skip


def of_task(task_id: str | None, task: int, index: int, reward: float) -> Json:
    """A rollout whose task has this id; None: its row has none, as rows of other tools."""
    row = rollout(task, index, reward)
    if task_id is None:
        del row["ng"]["task_id"]
    else:
        row["ng"]["task_id"] = task_id
    return row


def segment() -> Json:
    """Three tokens of a prompt, two sampled ones of different versions."""
    return {
        "token_ids": [5, 6, 7, 8, 9],
        "mask": [[3, 5]],
        "logprobs": [-0.25, -1.5],
        "policy_version": [[3, 4, 3], [4, 5, 4]],
    }


def failure(task: int = 0, index: int = 0, kind: str = "timeout", attempt: int = 0) -> Json:
    """A row of out_failures.jsonl."""
    row = rollout(task, index)
    trace = {name: row["ng"][name] for name in ("schema_version", "run_id", "task_id", "rollout_id")}
    error = {"class": kind, "stage": "run", "service": "policy", "http_status": None, "message": "it took too long"}
    fields = {
        name: row[name] for name in ("responses_create_params", "agent_ref", "_ng_task_index", "_ng_rollout_index")
    }
    return {**fields, "attempt": attempt, "failure": {**error, "retryable": True}, "ng": trace}


def write(path: Path, rows: Sequence[Json | bytes]) -> Path:
    """As the collector writes them; bytes as they are."""
    path.write_bytes(b"".join((row if isinstance(row, bytes) else orjson.dumps(row)) + b"\n" for row in rows))
    return path


@dataclass(frozen=True)
class Viewer:
    """A viewer that runs. report: what it printed with --json."""

    report: Json
    process: subprocess.Popen[bytes]

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers with names in lower case, body."""
        request = Request(self.report["address"].rstrip("/") + path, method=method, headers=headers)
        try:
            with LOCAL.open(request, timeout=LONG_S) as answer:
                return answer.status, {name.lower(): value for name, value in answer.headers.items()}, answer.read()
        except HTTPError as error:
            with error:
                return error.code, {name.lower(): value for name, value in error.headers.items()}, error.read()

    def get(self, path: str) -> Any:
        """The JSON of an answer of 200."""
        status, _, body = self.ask(path)
        assert status == 200, body
        return json.loads(body)


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "ngym.cli.view", *map(str, arguments)]


def environment(cache: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(cache), **more}


def run(*arguments: str | Path, cache: Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command, to its end."""
    return subprocess.run(
        command(*arguments),
        env=environment(cache),
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=LONG_S,
    )


@contextmanager
def viewer(*arguments: str | Path, cache: Path, **variables: str) -> Iterator[Viewer]:
    """`ng_view` on a free port, until the end of the block; it has to end quietly."""
    process = subprocess.Popen(
        command("--json", "--no-open", "--port", "0", *arguments),
        env=environment(cache, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise AssertionError(process.communicate()[1].decode())
        yield Viewer(json.loads(line), process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=LONG_S)
        assert (process.returncode, errors) == (0, b"")
    finally:
        process.kill()
        process.communicate()
