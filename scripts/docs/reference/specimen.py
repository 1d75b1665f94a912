"""A small run of ngym that the reference quotes: three services, three tasks, what they answered and what lies on the disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parents[3]
READY_S = 60.0
SECRETS = ("NGYM_", "OPENAI_", "OTEL_")

CONFIG = r"""
policy:
  kind: model
  app: models/scripted
  tokens: true
  replies:
    - {turn: 1, match: 'Bring it to (-?\d+)', tool_calls: [{name: add, arguments: '{"amount": {1}}'}]}
    - {turn: 2, text: "The counter is at {tool_output}."}
counter: {kind: gym_server, app: gym_servers/counter}
counter_agent: {kind: agent, app: agents/simple, gym: counter, model: policy}
games: {kind: gym_server, app: gym_servers/games}
endpoint: {kind: model, app: models/openai, model: any, base_url: "http://127.0.0.1:9/v1", api_key_env: null}
ngym: {head: {port: 0}}
"""
TASKS = (
    {"responses_create_params": {"input": "The counter starts at 0. Bring it to 65."}, "target": 65},
    {"responses_create_params": {"input": "The counter starts at 0. Bring it to -3."}, "target": 4},
    {"responses_create_params": {"input": "The counter starts at 0. Bring it to 7."}},  # has no target: a failure
)


@dataclass(frozen=True)
class Answer:
    """The answer of a route. body: JSON, else text."""

    status: int
    media_type: str
    body: Any


@dataclass(frozen=True)
class Specimen:
    """servers: the head's record of each service. files: what the collection left, by name.

    openapi, metrics: by the service's name. problem: the answer to a row that is not a task.
    """

    servers: list[Json]
    openapi: dict[str, Json]
    metrics: dict[str, str]
    head_routes: dict[str, Answer]
    seeded: Answer
    problem: Answer
    files: dict[str, str]

    def rows(self, name: str) -> list[Json]:
        return [json.loads(line) for line in self.files[name].splitlines()]


HEAD_ROUTES = (
    "/",
    "/servers",
    "/config",
    "/metrics",
    "/prometheus/targets",
    "/server_instances",
    "/global_config_dict_yaml",
)


def specimen() -> Specimen:
    """Starts the services, collects, asks, and stops them; about three seconds."""
    with tempfile.TemporaryDirectory(prefix="ngym-docs-") as name, _run(Path(name)) as head:
        folder = Path(name)
        servers = _ask(f"{head}/servers").body
        urls = {server["name"]: server["url"] for server in servers}
        seeded = _ask(f"{urls['counter']}/seed_session", TASKS[0])
        problem = _ask(f"{urls['counter']}/seed_session", TASKS[2])
        _collect(folder)
        return Specimen(
            servers,
            {name: _ask(f"{url}/openapi.json").body for name, url in urls.items()},
            {name: _ask(f"{url}/metrics").body for name, url in {**urls, "head": head}.items()},
            {route: _ask(f"{head}{route}") for route in HEAD_ROUTES},
            seeded,
            problem,
            {
                path.name: path.read_text().replace(f"{ROOT}/ngym/__main__.py", "ng")
                for path in sorted(folder.glob("out*"))
            },
        )


@contextmanager
def _run(folder: Path) -> Iterator[str]:
    """ng_run in this folder, while it lasts. Yields the head's URL."""
    (folder / "global_config.yaml").write_text(CONFIG)
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    said = folder / "said.txt"
    with said.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "ngym", "run"], cwd=folder, env=_environment(), stdout=log, stderr=log
        )
    try:
        yield _ready(folder, process, said)
    finally:
        process.terminate()
        process.wait(30)


def _ready(folder: Path, process: subprocess.Popen[bytes], said: Path) -> str:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        claimed = folder / ".ngym" / "head.json"
        if claimed.is_file() and (text := claimed.read_text()):
            url: str = json.loads(text)["url"]
            if all(server["status"] == "ready" for server in _ask(f"{url}/servers").body):
                return url
        time.sleep(0.05)
    raise RuntimeError(f"the services of the documentation's run did not become ready:\n{said.read_text()}")


def _collect(folder: Path) -> None:
    command = [sys.executable, "-m", "ngym", "collect_rollouts", "--agent", "counter_agent", "--repeats", "2"]
    subprocess.run(
        [*command, "--input", "tasks.jsonl", "--output", "out.jsonl"],
        cwd=folder,
        env=_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=READY_S,
        check=False,  # one task fails on purpose
    )


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(SECRETS)}


def _ask(url: str, body: Json | None = None) -> Answer:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=READY_S) as answer:
            return _read(answer.status, answer.headers.get_content_type(), answer.read())
    except urllib.error.HTTPError as error:
        return _read(error.code, error.headers.get_content_type(), error.read())


def _read(status: int, media_type: str, raw: bytes) -> Answer:
    text = raw.decode()
    return Answer(status, media_type, json.loads(text) if media_type.endswith("json") else text)
